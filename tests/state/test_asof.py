"""Reading a shard as of an earlier step, beside a writer, against a plain dictionary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_helpers import fence, identity

from anabranch.errors import Fenced, ShardMismatch
from anabranch.model.ids import Epoch, RegionId, Step
from anabranch.state import asof
from anabranch.state.asof import AsOf, Rows
from anabranch.state.store import UNDO, ShardStore
from anabranch.state.transaction import StageTransaction, rollback_to
from anabranch.state.undo import short_name

LONG_REGION = "region-" + "ä" * 150
TABLES = {"r": ["r.a", "r." + "é" * 120], LONG_REGION: ["b.t"]}
KEYS = [b"a", b"b", b"c", b"d", b"L" * 503, b"M" * 900 + b"1", b"M" * 900 + b"2"]
HASHES = [0, 7, 1 << 63, (1 << 64) - 1]

State = dict[tuple[bytes, bytes], bytes]
Writes = dict[tuple[str, bytes], bytes | None]


def address(hash_: int, key: bytes) -> bytes:
    return hash_.to_bytes(8, "big") + b"\0" + key


ADDRESSES = [address(h, k) for h in HASHES for k in KEYS]
ROWS = st.dictionaries(
    st.tuples(st.sampled_from([t for many in TABLES.values() for t in many]), st.sampled_from(ADDRESSES)),
    st.none() | st.binary(max_size=3),
    max_size=12,
)
STEPS = st.lists(ROWS, max_size=6)


def write(store: ShardStore, step: int, rows: Writes, attempt: int = 0) -> None:
    """One step, a transaction for each region, and the rows in two puts so that keys are written twice."""
    for region, tables in TABLES.items():
        with StageTransaction(store, fence(step, attempt), [RegionId(region)]) as transaction:
            for table in tables:
                mine = {a: v for (t, a), v in rows.items() if t == table}
                for values in (dict.fromkeys(mine, b"first"), mine) if mine else ():
                    addresses = sorted(values)
                    olds = transaction.get(table, addresses, True)
                    transaction.put(
                        RegionId(region), table, addresses, [values[a] for a in addresses], olds, True
                    )
            transaction.commit()


def applied(state: State, rows: Writes) -> State:
    after = {**state, **{(short_name(table), a): v for (table, a), v in rows.items()}}
    return {key: value for key, value in after.items() if value is not None}


def flat(batches: list[Rows]) -> dict[tuple[bytes, bytes], bytes | None]:
    places = [(rows.table, a) for rows in batches for a in rows.addresses]
    assert places == sorted(set(places))
    values = [value for rows in batches for value in rows.values]
    return dict(zip(places, values, strict=True))


class Writer:
    """Goes on writing between the reader's transactions: later steps, some of them first in vain."""

    def __init__(self, store: ShardStore, step: int, todo: list[tuple[Writes, Writes | None]]) -> None:
        self.store, self.step, self.todo = store, step, list(todo)
        self.again: Writes | None = None

    def __call__(self) -> None:
        if self.again is not None:
            write(self.store, self.step - 1, self.again, attempt=1)
            self.again = None
        elif self.todo:
            rows, self.again = self.todo.pop(0)
            write(self.store, self.step, rows)
            self.step += 1


@pytest.fixture(autouse=True)
def small_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FEWEST", "FIRST", "MOST"):
        monkeypatch.setattr(asof, name, 2)
    monkeypatch.setattr(asof, "_BATCH_ROWS", 3)
    monkeypatch.setattr(asof, "_RECORD_BYTES", 40)


@settings(max_examples=80)
@given(
    before=STEPS,
    after=st.lists(st.tuples(ROWS, st.none() | ROWS), max_size=8),
    since=st.integers(0, 6),
    ahead=st.integers(0, 4),
)
def test_a_shard_as_of_a_step_beside_a_writer(
    tmp_path_factory: pytest.TempPathFactory, before: list, after: list, since: int, ahead: int
) -> None:
    store = ShardStore.create(tmp_path_factory.mktemp("asof") / "s", identity())
    state: State = {}
    for n, rows in enumerate(before):
        write(store, n, rows)
        state = applied(state, rows)
    at = Step(len(before))
    writer = Writer(store, at, after)
    for _ in range(ahead):
        writer()

    assert flat(list(AsOf(store, at, Epoch(0), between=writer).scan())) == state

    since = min(since, at)
    changed = {(short_name(t), a) for rows in before[since:] for t, a in rows}
    writer = Writer(store, writer.step, after)
    found = flat(list(AsOf(store, at, Epoch(0), between=writer).changed(Step(since))))
    assert found == {place: state.get(place) for place in changed}

    half = 1 << 63
    ranges = [(1, half), (half, half + 1), (half + 1, 1 << 64)]
    inside = {place: value for place, value in state.items() if int.from_bytes(place[1][:8], "big") >= 1}
    parts = list(AsOf(store, at, Epoch(0)).scan(ranges))
    assert flat(parts) == inside


def one(store: ShardStore, step: int, value: bytes, **more: object) -> None:
    place = address(1, b"k")
    with StageTransaction(store, fence(step, **more), [RegionId("r")]) as transaction:
        olds = transaction.get("r.a", [place], False)
        transaction.put(RegionId("r"), "r.a", [place], [value], olds, False)
        transaction.commit()


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    return ShardStore.create(tmp_path / "s", identity())


def once(action: Callable[[], None]) -> Callable[[], None]:
    left = [action]
    return lambda: left.pop()() if left else None


def test_a_step_undone_that_then_leaves_the_region_alone(store: ShardStore) -> None:
    one(store, 0, b"0")
    one(store, 1, b"1")
    reader = AsOf(store, Step(1), Epoch(0))
    expected = {(b"r.a", address(1, b"k")): b"0"}
    one(store, 2, b"2")
    assert flat(list(reader.scan())) == expected
    # Attempt 1 of step 2 writes nothing here, and step 3 does: its record follows that of step 1.
    StageTransaction(store, fence(2, 1), [RegionId("r")]).commit()
    assert flat(list(reader.scan())) == expected
    one(store, 3, b"3")
    assert flat(list(reader.scan())) == expected


def test_the_first_step_of_a_region_undone_for_good(store: ShardStore) -> None:
    reader = AsOf(store, Step(0), Epoch(0))
    one(store, 0, b"0")
    assert flat(list(reader.scan())) == {}
    StageTransaction(store, fence(0, 1), [RegionId("r")]).commit()
    assert flat(list(reader.scan())) == {}
    one(store, 1, b"1")
    assert flat(list(reader.scan())) == {}


def test_the_same_attempt_that_repeats_itself_with_other_keys(store: ShardStore) -> None:
    def repeat(key: bytes) -> None:
        place = address(1, key)
        with StageTransaction(store, fence(0), [RegionId("r")], run=b"same") as transaction:
            transaction.put(RegionId("r"), "r.a", [place], [b"v"], [None], False)
            transaction.commit()

    repeat(b"x")
    reader = AsOf(store, Step(0), Epoch(0), between=once(lambda: None))
    assert flat(list(reader.scan())) == {}
    repeat(b"y")
    one(store, 1, b"1")
    assert flat(list(reader.scan())) == {}


def test_it_refuses_a_ring_that_is_too_short(store: ShardStore) -> None:
    for n in range(4):
        one(store, n, b"%d" % n)
    place = address(1, b"k")
    with StageTransaction(store, fence(4), [RegionId("r")], keep_undo_from=Step(3)) as transaction:
        transaction.put(RegionId("r"), "r.a", [place], [b"4"], [b"3"], False)
        transaction.commit()
    assert flat(list(AsOf(store, Step(3), Epoch(0)).scan())) == {(b"r.a", place): b"2"}
    assert flat(list(AsOf(store, Step(4), Epoch(0)).changed(Step(3)))) == {(b"r.a", place): b"3"}
    for reading in (AsOf(store, Step(2), Epoch(0)).scan(), AsOf(store, Step(4), Epoch(0)).changed(Step(2))):
        with pytest.raises(ShardMismatch, match="no longer kept"):
            list(reading)


def test_it_compares_the_shard_with_the_step_log(store: ShardStore) -> None:
    one(store, 0, b"0")
    one(store, 2, b"2")
    region = RegionId("r")
    assert list(AsOf(store, Step(2), Epoch(0), {region: Step(0)}).scan())
    for expected in ({region: Step(1)}, {}, {region: Step(0), RegionId("other"): Step(0)}):
        with pytest.raises(ShardMismatch, match="the step log says"):
            list(AsOf(store, Step(2), Epoch(0), expected).scan())


def test_a_shard_that_was_recovered_meanwhile_is_not_read_on(store: ShardStore) -> None:
    one(store, 0, b"0")
    one(store, 1, b"1")
    reader = AsOf(store, Step(2), Epoch(0), between=None)
    assert list(reader.scan())
    rollback_to(store, fence(0, epoch=1), RegionId("r"), Step(0))
    with pytest.raises(Fenced, match="epoch 1"):
        list(reader.scan())


def test_a_step_tells_the_size_of_its_undo_records(store: ShardStore) -> None:
    with StageTransaction(store, fence(0), [RegionId("r")]) as transaction:
        transaction.put(RegionId("r"), "r.a", [address(1, b"k")], [b"v" * 100], [None], False)
        transaction.commit()
    small = transaction.undo_bytes
    with StageTransaction(store, fence(1), [RegionId("r")]) as transaction:
        transaction.put(RegionId("r"), "r.a", [address(1, b"k")], [b"w"], [b"v" * 100], False)
        transaction.commit()
    assert 0 < small < 100 < transaction.undo_bytes
    with store.begin(write=False) as txn:
        stored = sum(len(raw) for _, raw in txn.cursor(db=store.env.open_db(UNDO, txn=txn)))
    assert stored == small + transaction.undo_bytes
