"""Addresses: injective, ordered by hash and then by key as far as LMDB's limit allows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import CorruptError
from anabranch.state import address as a

HASHES = st.integers(0, 2**64 - 1)
LONG = st.builds(lambda n, tail: b"p" * n + tail, st.integers(380, 600), st.binary(max_size=150))
KEYS = st.binary(max_size=40) | LONG


def test_short_address_is_hash_zero_key() -> None:
    found = a.addresses_of(np.array([1, 2**64 - 1], dtype=np.uint64), [b"ab", b""])
    assert found == [b"\0\0\0\0\0\0\0\1\0ab", b"\xff" * 8 + b"\0"]


@given(st.lists(st.tuples(HASHES, KEYS), max_size=8))
def test_disk_keys_fit_and_lead_back(rows: list[tuple[int, bytes]]) -> None:
    addresses = a.addresses_of(np.array([h for h, _ in rows], dtype=np.uint64), [k for _, k in rows])
    for (hash_, key), address in zip(rows, addresses, strict=True):
        assert (int.from_bytes(address[:8], "big"), address[a.HEAD :]) == (hash_, key)
        disk = a.disk_key(address)
        assert len(disk) <= a.MAX_DISK_KEY
        assert (disk == address) != a.is_long(address)
        assert a.unpack_long(a.pack_long(address, b"value")) == (key, b"value")
    assert len({a.disk_key(address) for address in addresses}) == len(set(rows))


@given(HASHES, LONG)
def test_every_prefix_finds_the_long_key_in_its_range(hash_: int, key: bytes) -> None:
    (full,) = a.addresses_of(np.array([hash_], dtype=np.uint64), [key + b"z" * 200])
    assert a.is_long(full)
    for cut in (0, 1, 399, 400, 401, len(key)):
        (prefix,) = a.addresses_of(np.array([hash_], dtype=np.uint64), [key[:cut]])
        assert a.disk_key(full).startswith(a.long_range(prefix))


@given(st.binary(max_size=4), st.binary(max_size=4))
def test_after_is_the_end_of_a_prefix(prefix: bytes, suffix: bytes) -> None:
    prefix = b"\0" + prefix
    assert prefix + suffix < a.after(prefix)
    assert not a.after(prefix).startswith(prefix)
    assert a.after(prefix) <= prefix[:-1] + b"\xff" * 9 or prefix[-1] == 0xFF


@pytest.mark.parametrize("stored", [b"", b"\0\0\0", b"\0\0\0\5abcd"])
def test_damaged_long_values_are_corrupt(stored: bytes) -> None:
    with pytest.raises(CorruptError, match="long key"):
        a.unpack_long(stored)
