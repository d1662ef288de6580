"""Cargo on the wire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import CorruptError
from anabranch.model.ids import Attempt, Epoch, RegionId, ShardId, Step
from anabranch.state.cargo import Cargo, CargoTable
from anabranch.state.history import Arrived, History
from anabranch.state.identity import Marker

ADDRESS = st.builds(
    lambda n, size: b"%09d" % n + b"k" * size, st.integers(0, 99), st.sampled_from([0, 3, 700])
)
ADDRESSES = st.lists(ADDRESS, max_size=6)
VALUES = st.none() | st.sampled_from([b"", b"v", b"v" * 300])


@st.composite
def tables(draw: st.DrawFn) -> CargoTable:
    addresses = draw(ADDRESSES)
    n = len(addresses)
    values = draw(st.lists(VALUES, min_size=n, max_size=n))
    flags = bytes(draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)))
    return CargoTable(draw(st.text(max_size=5)), addresses, values, flags, draw(ADDRESSES))


MARKER = Marker(Step(3), Epoch(1), Attempt(0), b"run")
CARGOS = st.builds(
    Cargo,
    shard=st.just(ShardId(7)),
    region=st.just(RegionId("ä")),
    low=st.integers(0, 1 << 63),
    end=st.sampled_from([0, 1, 1 << 63, 1 << 64]),
    before=st.sampled_from([None, MARKER]),
    since=st.none() | st.just(Step(4)),
    known=st.just(Step(2)),
    tables=st.lists(tables(), max_size=3).map(tuple),
)


@given(CARGOS, st.data())
def test_cargo_comes_as_it_went_and_cut_short_it_is_corrupt(cargo: Cargo, data: st.DataObject) -> None:
    raw = cargo.encode()
    found = Cargo.decode(raw)
    assert found.encode() == raw
    for one, other in zip(found.tables, cargo.tables, strict=True):
        assert (one.name, one.addresses, one.values) == (other.name, other.addresses, other.values)
        assert (one.flags, list(one.gone), one.marked) == (other.flags, other.gone, other.marked)
    assert (found.hashes, found.before, found.since, found.known) == (
        cargo.hashes,
        cargo.before,
        cargo.since,
        cargo.known,
    )
    with pytest.raises(CorruptError):
        Cargo.decode(raw[: data.draw(st.integers(0, len(raw) - 1))])


@given(CARGOS, st.data())
def test_a_damaged_byte_raises_nothing_but_corrupt(cargo: Cargo, data: st.DataObject) -> None:
    raw = bytearray(cargo.encode())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        Cargo.decode(bytes(raw))
    except CorruptError:
        return


def test_integers_as_keys_take_hardly_more_than_their_bytes() -> None:
    addresses = [n.to_bytes(8, "big") + b"\0" + n.to_bytes(8, "big") for n in range(1000)]
    table = CargoTable("t", addresses, [b"v" * 9] * 1000, b"\1" * 1000, ())
    cargo = Cargo(ShardId(0), RegionId("r"), 0, 1 << 64, None, None, Step(0), (table,))
    assert cargo.keys == 1000
    assert cargo.size == 26_000
    assert len(cargo.encode()) < 1.01 * cargo.size


def test_arrivals_replace_those_of_their_step_and_hashes_and_old_ones_become_one() -> None:
    first = History(Step(1)).after([Arrived(Step(1), 0, 9, Step(0))], Step(0))
    second = first.after([Arrived(Step(2), 10, 19, Step(1))], Step(0))
    assert (second.floor([(0, 10)]), second.floor([(5, 11)]), second.floor([(20, 30)])) == (2, 3, 0)
    assert second.after([Arrived(Step(2), 10, 14, Step(1))], Step(0)).floor([(15, 20)]) == 0
    assert second.after([Arrived(Step(3), 0, 19, Step(2))], Step(0)).arrivals == (Arrived(3, 0, 19, 2),)
    third = second.after([Arrived(Step(7), 20, 29, Step(6))], Step(5))
    assert third.arrivals == (Arrived(2, 0, 19, 1), Arrived(7, 20, 29, 6))
    assert not third.knows(Step(5))
    assert third.knows(Step(5), [(0, 20)])
    assert third.knows(Step(6))
    assert History.decode(third.encode()) == third
    with pytest.raises(CorruptError):
        History.decode(b"\xc1")
