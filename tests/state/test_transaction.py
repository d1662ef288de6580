"""Fences, markers and undo in one shard: re-runs, zombies, kills."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_helpers import R, dump, fence, identity

from anabranch.errors import CorruptError, Fenced, ShardMismatch
from anabranch.model.ids import RegionId, Step
from anabranch.state.identity import Fence, Marker
from anabranch.state.store import UNDO, ShardStore
from anabranch.state.transaction import StageTransaction, marker_of, rollback_to, write_transaction
from anabranch.state.undo import short_name

OTHER = RegionId("other")


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    return ShardStore.create(tmp_path / "s", identity())


def at(key: bytes, hash_: int = 1) -> bytes:
    return hash_.to_bytes(8, "big") + b"\0" + key


def put(
    transaction: StageTransaction, rows: dict[bytes, bytes | None], region: RegionId = R, table: str = "op.t"
) -> None:
    addresses = sorted(map(at, rows))
    values = [rows[a[9:]] for a in addresses]
    transaction.put(region, table, addresses, values, transaction.get(table, addresses, True), True)


def step(
    store: ShardStore, fence: Fence, rows: dict[bytes, bytes | None], region: RegionId = R, **more: object
) -> None:
    with StageTransaction(store, fence, [region], **more) as transaction:
        put(transaction, rows, region, f"{region}.t")
        transaction.commit()


def content(store: ShardStore, table: bytes = b"r.t") -> dict[bytes, bytes]:
    return {k[9:]: v for k, v in dump(store).get(table, [])}


def test_a_second_attempt_undoes_the_first_and_gives_the_same(store: ShardStore) -> None:
    step(store, fence(0), {b"a": b"0", b"b": b"0"})
    start = dump(store, meta=False)
    step(store, fence(1), {b"a": b"1", b"b": None, b"c": b"1"})
    once = dump(store, meta=False)
    step(store, fence(1, attempt=1), {b"zzz": b"something else"})
    step(store, fence(1, attempt=2), {b"a": b"1", b"b": None, b"c": b"1"})
    assert dump(store, meta=False) == once
    rollback_to(store, fence(0, epoch=1), R, Step(0))
    assert dump(store, meta=False) == start
    assert marker_of(store, R) == 0


def test_a_rolled_back_and_re_run_step_leaves_the_same_environment(tmp_path: Path) -> None:
    stores = [ShardStore.create(tmp_path / name, identity()) for name in "ab"]
    for store in stores:
        step(store, fence(0), {b"a": b"0", b"long" * 200: b"0"})
    step(stores[0], fence(1), {b"a": b"wrong", b"long" * 200: None, b"n" * 600: b"1"})
    for store in stores:
        step(store, fence(1, attempt=1), {b"a": b"1", b"b": b"1", b"n" * 600: b"2"})
    assert dump(stores[0]) == dump(stores[1])


def test_a_key_written_twice_in_a_step_goes_back_to_what_it_was_before(store: ShardStore) -> None:
    step(store, fence(0), {b"a": b"0"})
    with StageTransaction(store, fence(1), [R]) as transaction:
        put(transaction, {b"a": b"1", b"b": b"1"}, table="r.t")
        put(transaction, {b"a": b"2", b"b": None}, table="r.t")
        transaction.commit()
    rollback_to(store, fence(2), R, Step(0))
    assert content(store) == {b"a": b"0"}


@pytest.mark.parametrize(
    ("late", "newest"),
    [
        (fence(5), fence(5, attempt=1)),
        (fence(5, attempt=9), fence(6)),
        (fence(9, attempt=9), fence(5, epoch=1)),
    ],
)
def test_an_older_fence_is_refused_and_harms_nothing(store: ShardStore, late: Fence, newest: Fence) -> None:
    step(store, newest, {b"a": b"new"})
    before = dump(store)
    with pytest.raises(Fenced, match="comes too late"):
        step(store, late, {b"a": b"old"})
    with pytest.raises(Fenced):
        rollback_to(store, late, R, None)
    assert dump(store) == before


def test_one_attempt_writes_each_of_its_regions_once(store: ShardStore) -> None:
    step(store, fence(0), {b"a": b"1"}, R, run=b"task")
    step(store, fence(0), {b"a": b"2"}, OTHER, run=b"task of another stage")
    with pytest.raises(Fenced, match="another task of the same attempt"):
        step(store, fence(0), {b"a": b"twin"}, R, run=b"twin")
    assert content(store) == {b"a": b"1"}
    step(store, fence(0), {b"a": b"again"}, R, run=b"task")
    assert content(store) == {b"a": b"again"}
    assert content(store, b"other.t") == {b"a": b"2"}


def test_regions_are_rolled_back_each_for_itself(store: ShardStore) -> None:
    step(store, fence(0), {b"a": b"r0"}, R)
    step(store, fence(0), {b"a": b"o0"}, OTHER)
    step(store, fence(0, attempt=1), {b"b": b"r1"}, R)
    assert content(store) == {b"b": b"r1"}
    assert content(store, b"other.t") == {b"a": b"o0"}


def test_a_region_that_is_not_where_it_should_be_is_a_mismatch(store: ShardStore) -> None:
    with pytest.raises(ShardMismatch, match="at step None, expected 3"):
        step(store, fence(4), {}, expected={R: Step(3)})
    step(store, fence(4), {b"a": b"1"}, expected={R: None})
    before = dump(store)
    with pytest.raises(ShardMismatch, match="at step 4, expected 3 before step 5"):
        step(store, fence(5), {b"a": b"2"}, expected={R: Step(3)})
    with pytest.raises(ShardMismatch, match="at step 4, expected None"):
        step(store, fence(5), {b"a": b"2"}, expected={R: None})
    with pytest.raises(ShardMismatch, match="beyond step 2"):
        step(store, fence(2, epoch=1), {b"a": b"2"})
    assert dump(store) == before
    # Expectations are those of the time before the step, also when an earlier attempt got through.
    step(store, fence(4, attempt=1), {b"a": b"2"}, expected={R: None})


def test_the_ring_is_kept_from_the_given_step_and_shrinks_by_and_by(store: ShardStore) -> None:
    for n in range(40):
        step(store, fence(n), {b"a": b"%d" % n}, keep_undo_from=Step(0))
    assert len(dump(store)[UNDO]) == 40
    step(store, fence(40), {b"a": b"40"}, keep_undo_from=Step(39))
    assert len(dump(store)[UNDO]) == 41 - 16
    for n in range(41, 45):
        step(store, fence(n), {b"a": b"%d" % n}, keep_undo_from=Step(n))
    assert len(dump(store)[UNDO]) == 1
    with pytest.raises(ShardMismatch, match="before step 43"):
        rollback_to(store, fence(45), R, Step(42))
    assert content(store) == {b"a": b"44"}
    rollback_to(store, fence(45), R, Step(43))
    assert content(store) == {b"a": b"43"}


def test_the_current_steps_undo_record_is_always_kept(store: ShardStore) -> None:
    step(store, fence(0), {b"a": b"0"}, keep_undo_from=Step(99))
    rollback_to(store, fence(1), R, None)
    assert content(store) == {}
    assert marker_of(store, R) is None


def test_pruning_leaves_other_regions_alone(store: ShardStore) -> None:
    names = [RegionId(name) for name in ("r", "ra", "q", "x" * 300, "x" * 300 + "y")]
    for region in names:
        step(store, fence(0), {b"a": b"0"}, region)
    step(store, fence(1), {b"a": b"1"}, R, keep_undo_from=Step(1))
    for region in names[1:]:
        rollback_to(store, fence(1), region, None)
        assert marker_of(store, region) is None
    assert marker_of(store, R) == 1


KEYS = st.sampled_from([b"a", b"b", b"c", b"L" * 503, b"L" * 900 + b"1", b"L" * 900 + b"2"])
STEPS = st.lists(st.dictionaries(KEYS, st.none() | st.binary(max_size=3), max_size=4), max_size=6)


@settings(max_examples=30)
@given(steps=STEPS, back=st.integers(-1, 6))
def test_rolling_back_several_steps(tmp_path_factory: pytest.TempPathFactory, steps: list, back: int) -> None:
    store = ShardStore.create(tmp_path_factory.mktemp("ring") / "s", identity())
    oracle: list[dict[bytes, bytes]] = [{}]
    for n, rows in enumerate(steps):
        step(store, fence(n), rows)
        oracle.append({k: v for k, v in {**oracle[-1], **rows}.items() if v is not None})
    back = min(back, len(steps) - 1)
    since = None if back < 0 else Step(back)
    rollback_to(store, fence(99), R, since)
    keys = sorted({key for rows in steps for key in rows})
    with StageTransaction(store, fence(99), [R]) as transaction:
        values = transaction.get("r.t", [at(key) for key in keys], True)
    assert {k: v for k, v in zip(keys, values, strict=True) if v is not None} == oracle[back + 1]


def test_damaged_undo_and_markers_are_corrupt(store: ShardStore) -> None:
    step(store, fence(0), {b"a": b"0"})
    with write_transaction(store) as txn:
        undo = store.env.open_db(UNDO, txn=txn)
        ((key, _),) = list(txn.cursor(db=undo))
        txn.put(key, b"\xc1", db=undo)
    with pytest.raises(CorruptError, match="undo record"):
        step(store, fence(0, attempt=1), {})
    with pytest.raises(CorruptError, match="marker"):
        Marker.decode(b"\x01")


def test_long_names_stay_apart() -> None:
    names = ["a" * 199, "a" * 200, "a" * 201, "a" * 202, "ä" * 150]
    assert len({short_name(name) for name in names}) == len(names)
    assert max(len(short_name(name)) for name in names) <= 200
