"""Where a key lives on disk.

The *address* of a key is `hash64 big-endian ‖ 0x00 ‖ key`.  LMDB takes keys of at most 511 bytes, so an
address that fits is stored as it is, and a longer one as

    hash64 ‖ 0x01 ‖ first 400 bytes of the key ‖ blake2b-256 of the key

with the whole key in front of the value.  All entries of a hash are thus one range, and those that share a
prefix are at most two: one among the short, one among the long keys, where the first 400 bytes
narrow the range and the whole key decides.  An address is longer than 511 bytes exactly when its key is long,
so undo records keep addresses.

Must not know: LMDB's transactions.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from operator import add

import numpy as np

from anabranch.errors import CorruptError, EngineError
from anabranch.model.batch import U64

MAX_DISK_KEY = 511
HEAD = 9
"""Bytes of an address before the key: the hash and the flag."""
MAX_SHORT = MAX_DISK_KEY - HEAD
KEPT = 400
"""Leading bytes of a long key that stay in order on disk."""
_LENGTH = struct.Struct(">I")


def addresses_of(hashes: U64, keys: Sequence[bytes]) -> list[bytes]:
    """The address of each key; about 0.1 µs each."""
    if len(hashes) != len(keys):
        raise EngineError(f"keyed state was asked with {len(hashes)} hashes for {len(keys)} keys")
    heads = np.zeros((len(hashes), HEAD), dtype=np.uint8)
    heads[:, :8] = hashes.astype(">u8").view(np.uint8).reshape(-1, 8)
    return list(map(add, heads.view("V9").ravel().tolist(), keys))


def any_long(keys: Sequence[bytes]) -> bool:
    """Whether some key needs the long form."""
    return max(map(len, keys), default=0) > MAX_SHORT


def is_long(address: bytes) -> bool:
    return len(address) > MAX_DISK_KEY


def disk_key(address: bytes) -> bytes:
    """The key in LMDB of one address."""
    if len(address) <= MAX_DISK_KEY:
        return address
    key = address[HEAD:]
    return address[:8] + b"\x01" + key[:KEPT] + blake2b(key, digest_size=32).digest()


def long_range(address: bytes) -> bytes:
    """What every long disk key under this prefix address begins with."""
    return address[:8] + b"\x01" + address[HEAD : HEAD + KEPT]


def after(prefix: bytes) -> bytes:
    """The smallest byte string above all that begin with `prefix`.

    The prefix is never all 0xff: it holds the flag byte.
    """
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes((stripped[-1] + 1,))


def prefix(hash_: int) -> bytes:
    """What the addresses of a hash begin with; above all addresses for 2⁶⁴."""
    return hash_.to_bytes(8, "big") if hash_ < 1 << 64 else b"\xff" * 9


def whole(disk: bytes, stored: bytes) -> tuple[bytes, bytes]:
    """Address and value of what is on disk."""
    if disk[8] == 0:
        return disk, stored
    key, value = unpack_long(stored)
    return disk[:8] + b"\x00" + key, value


def pack_long(address: bytes, value: bytes) -> bytes:
    """The stored value of a long key: the whole key, then the value."""
    return _LENGTH.pack(len(address) - HEAD) + address[HEAD:] + value


def unpack_long(stored: bytes) -> tuple[bytes, bytes]:
    """(whole key, value) of a long key's stored value; raises CorruptError."""
    if len(stored) < 4:
        raise CorruptError("the value of a long key lacks the length of the key")
    size = _LENGTH.unpack_from(stored)[0]
    if len(stored) < 4 + size:
        raise CorruptError(f"the value of a long key ends inside the key: {len(stored) - 4} of {size} bytes")
    return stored[4 : 4 + size], stored[4 + size :]
