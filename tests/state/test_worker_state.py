"""All of a worker's shards as keyed tables, against a dict."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_helpers import R, apply, dump_all, fence, make_shards, run_step, sorted_rows

from anabranch.errors import EngineError, Fenced, ShardMismatch
from anabranch.model.ids import RegionId, Step
from anabranch.state.faults import MapFull
from anabranch.state.store import ShardStore
from anabranch.state.transaction import StageTransaction
from anabranch.state.worker import OwnedShard, TouchedShard, WorkerState, run_with_growth, shard_low

TOP = 2**64 - 1


def state_at(owned: list[OwnedShard], step: int, attempt: int = 0) -> WorkerState:
    return WorkerState(len(owned), owned, fence(step, attempt), [R])


def read(owned: list[OwnedShard]) -> dict[tuple[int, bytes], bytes]:
    """Everything in the table, through its files alone (short keys)."""
    entries = [e for shard in dump_all(owned) for e in shard.get(b"op.t", [])]
    return {(int.from_bytes(k[:8], "big"), k[9:]): v for k, v in entries}


def test_rows_land_in_the_shard_of_their_hash(tmp_path: Path) -> None:
    owned = make_shards(tmp_path, 3)
    rows = {(h, b"k"): b"%d" % h for h in (0, TOP // 3, TOP // 3 + 1, TOP // 2, TOP - 1, TOP)}
    touched = run_step(owned, 0, rows)
    assert touched == [TouchedShard(s, 0, 0, (R,)) for s in range(3)]
    for shard, entries in enumerate(dump_all(owned)):
        for key, _ in entries[b"op.t"]:
            assert int.from_bytes(key[:8], "big") * 3 >> 64 == shard
    assert read(owned) == rows


@given(st.integers(1, 65_536), st.data())
def test_shard_low_is_the_first_hash_of_its_shard(of: int, data: st.DataObject) -> None:
    shard = data.draw(st.integers(0, of - 1))
    low = shard_low(shard, of)
    assert low * of >> 64 == shard
    assert shard == 0 or (low - 1) * of >> 64 == shard - 1


HASHES = st.sampled_from([0, 1, 2**40, TOP // 2, TOP])
STEM = st.sampled_from([b"", b"a", b"a\xff", b"ab", b"P" * 398, b"P" * 400, b"P" * 495, b"P" * 700])
TAIL = st.sampled_from(
    [b"", b"\0", b"\1", b"z", b"\xff", b"\xff\xff", b"Q" * 50, b"Q" * 50 + b"r", b"P" * 2000]
)
KEYS = st.builds(lambda stem, tail: stem + tail, STEM, TAIL)
STEPS = st.lists(
    st.dictionaries(st.tuples(HASHES, KEYS), st.none() | st.binary(max_size=4), max_size=12),
    min_size=1,
    max_size=3,
)


@settings(max_examples=35)
@given(of=st.integers(1, 3), steps=STEPS, prefixes=st.sets(st.tuples(HASHES, KEYS), min_size=1, max_size=8))
def test_get_scan_and_edge_against_a_dict(
    tmp_path_factory: pytest.TempPathFactory, of: int, steps: list, prefixes: set
) -> None:
    owned = make_shards(tmp_path_factory.mktemp("oracle"), of)
    oracle: dict[tuple[int, bytes], bytes] = {}
    for n, rows in enumerate(steps):
        run_step(owned, n, rows)
        oracle = {k: v for k, v in {**oracle, **rows}.items() if v is not None}
    asked = sorted(prefixes)
    hashes = np.array([h for h, _ in asked], dtype=np.uint64)
    keys = [k for _, k in asked]
    with state_at(owned, len(steps)) as state:
        view = state.scoped("op", R)
        assert view.get("t", hashes, keys) == [oracle.get(pair) for pair in asked]
        under = [
            [(k[len(p) :], v) for (h2, k), v in sorted(oracle.items()) if h2 == h and k.startswith(p)]
            for h, p in asked
        ]
        scan = view.scan("t", hashes, keys)
        assert scan.index.tolist() == [i for i, found in enumerate(under) for _ in found]
        assert list(zip(scan.suffixes, scan.values, strict=True)) == [e for found in under for e in found]
        assert view.edge("t", hashes, keys, last=False) == [f[0] if f else None for f in under]
        assert view.edge("t", hashes, keys, last=True) == [f[-1] if f else None for f in under]


def test_short_and_long_keys_of_a_prefix_come_in_one_order(tmp_path: Path) -> None:
    owned = make_shards(tmp_path, 1)
    keys = [b"p", b"pa" + b"x" * 600, b"pb", b"pb" + b"x" * 600, b"pc", b"q"]
    run_step(owned, 0, {(1, key): key[:2] for key in keys})
    one = np.array([1], dtype=np.uint64)
    with state_at(owned, 1) as state:
        view = state.scoped("op", R)
        assert [b"p" + suffix for suffix in view.scan("t", one, [b"p"]).suffixes] == keys[:-1]
        assert view.edge("t", one, [b"pa"], last=False) == [(b"x" * 600, b"pa")]
        assert view.edge("t", one, [b"pb"], last=False) == [(b"", b"pb")]
        assert view.edge("t", one, [b"pb"], last=True) == [(b"x" * 600, b"pb")]
        assert view.edge("t", one, [b"p"], last=True) == [(b"c", b"pc")]


def test_nothing_asked_gives_nothing(tmp_path: Path) -> None:
    none = np.empty(0, dtype=np.uint64)
    with state_at(make_shards(tmp_path, 2), 0) as state:
        view = state.scoped("op", R)
        view.put("t", none, [], [], [])
        assert view.get("t", none, []) == []
        assert view.edge("t", none, [], last=True) == []
        scan = view.scan("t", none, [])
        assert (len(scan.index), scan.suffixes, scan.values) == (0, [], [])
        assert state.commit() == []


def test_operators_and_tables_are_apart_and_reads_see_writes(tmp_path: Path) -> None:
    owned = make_shards(tmp_path, 1)
    one = np.array([1], dtype=np.uint64)
    with state_at(owned, 0) as state:
        views = [state.scoped(name, R) for name in ("a", "b")]
        for view in views:
            for table in ("x", "y"):
                view.put(table, one, [b"k"], [table.encode()], [None])
        views[0].put("x", one, [b"k"], [None], [b"x"])
        found = [view.get(table, one, [b"k"])[0] for view in views for table in ("x", "y")]
        assert found == [None, b"y", b"x", b"y"]


def test_leaving_without_commit_changes_nothing(tmp_path: Path) -> None:
    owned = make_shards(tmp_path, 2)
    run_step(owned, 0, {(1, b"k"): b"0", (TOP, b"k"): b"0"})
    before = dump_all(owned)
    with state_at(owned, 1) as state:
        apply(state, {(1, b"k"): b"1"}, table="new table")
    assert dump_all(owned) == before
    assert run_step(owned, 1, {(1, b"k"): b"1"})[0].shard == 0


def test_an_attempt_undoes_an_earlier_one_also_where_it_writes_nothing(tmp_path: Path) -> None:
    owned = make_shards(tmp_path, 4)
    run_step(owned, 0, {(1, b"k"): b"0", (TOP, b"k"): b"0"})
    run_step(owned, 1, {(TOP, b"k"): b"first", (TOP, b"l"): b"first", (TOP // 2, b"m"): b"first"})
    touched = run_step(owned, 1, {(1, b"k"): b"second"}, attempt=1)
    assert [t.shard for t in touched] == [0]
    assert read(owned) == {(1, b"k"): b"second", (TOP, b"k"): b"0"}
    for shard in owned:
        with pytest.raises(Fenced, match="comes too late"):
            StageTransaction(ShardStore.open(shard.path), fence(1), [R])


def test_a_shard_without_a_put_is_not_written_in_the_usual_case(tmp_path: Path) -> None:
    owned = make_shards(tmp_path, 2)
    run_step(owned, 0, {(1, b"k"): b"0"})
    stores = [ShardStore.open(o.path) for o in owned]
    before = [store.env.info()["last_txnid"] for store in stores]
    run_step(owned, 1, {(1, b"k"): b"1"})
    assert [s.env.info()["last_txnid"] - b for s, b in zip(stores, before, strict=True)] == [1, 0]


def test_the_map_grows_from_tiny_and_keeps_everything(tmp_path: Path) -> None:
    owned = make_shards(tmp_path, 2, map_size=64 << 10)
    rows = {(i << 51, b"k%d" % i): os.urandom(200) for i in range(1 << 13)}
    runs = 0

    def body(state: WorkerState) -> list[TouchedShard]:
        nonlocal runs
        runs += 1
        apply(state, rows)
        return state.commit()

    touched = run_with_growth(lambda: state_at(owned, 0), body)
    assert runs > 1
    assert [t.shard for t in touched] == [0, 1]
    assert read(owned) == rows


@pytest.mark.parametrize("value", [8, 200, 3000])
def test_a_step_that_outgrows_all_maps_is_not_repeated_for_each(tmp_path: Path, value: int) -> None:
    owned = make_shards(tmp_path, 16, map_size=64 << 10)
    rows = {(i << 51, b"k%d" % i): os.urandom(value) for i in range(1 << 13)}
    runs = 0

    def body(state: WorkerState) -> list[TouchedShard]:
        nonlocal runs
        runs += 1
        apply(state, rows)
        return state.commit()

    run_with_growth(lambda: state_at(owned, 0), body)
    assert runs <= 3
    run_with_growth(lambda: state_at(owned, 1), body)
    run_with_growth(lambda: state_at(owned, 2), body)
    assert runs <= 8
    assert read(owned) == rows


def test_the_first_steps_of_many_small_keys_run_once_each(tmp_path: Path) -> None:
    """Also where every step is another process's, which has not seen the shards grow."""
    owned = make_shards(tmp_path, 4)
    runs = []
    for step in range(5):
        rows = {(i << 50, b"k%07d" % i): os.urandom(24) for i in range(1 << 14)}

        def body(state: WorkerState, step: int = step, rows: dict[tuple[int, bytes], bytes] = rows) -> None:
            runs.append(step)
            apply(state, rows)
            state.commit()

        run_with_growth(lambda step=step: state_at(owned, step), body)  # type: ignore[misc]
        for shard in owned:
            ShardStore.forget(shard.path)
    assert runs == [0, 1, 2, 3, 4]
    assert read(owned) == rows


def test_few_keys_make_no_room_in_a_large_shard(tmp_path: Path) -> None:
    owned = make_shards(tmp_path, 1)
    run_step(owned, 0, {(i << 50, b"k%d" % i): bytes(24) for i in range(1 << 14)})
    store = ShardStore.open(owned[0].path)
    store.foresee(1 << 14)
    assert store._expected > 0
    store._expected = 0
    store.foresee(100)
    assert store._expected == 0


def test_a_shard_with_ample_room_does_not_grow_because_another_was_full(tmp_path: Path) -> None:
    owned = make_shards(tmp_path, 1)
    run_step(owned, 0, {(i << 50, b"k%d" % i): bytes(24) for i in range(1 << 14)})
    store = ShardStore.open(owned[0].path)
    store._remap(store._pages()[0] + 5_000)
    for _ in range(10):
        store.expect(100, 10_000)
        store.begin(write=True).abort()
    assert store._pages()[1] == 5_000
    store.expect(100, 10 << 20)
    store.begin(write=True).abort()
    assert store._pages()[1] >= 7_500


def test_a_shard_into_which_keys_are_loaded_has_room_to_copy_all_that_is_there(tmp_path: Path) -> None:
    """In a process that has not seen it grow."""
    owned = make_shards(tmp_path, 1)
    run_step(owned, 0, {(i << 50, b"k%d" % i): bytes(24) for i in range(1 << 14)})
    ShardStore.forget(owned[0].path)
    store = ShardStore.open(owned[0].path)
    used, _ = store._pages()
    store.reserve(1_000, 40_000)
    store.begin(write=True).abort()
    assert store._pages()[1] >= used + 40_000 // 4096


def test_a_task_that_committed_some_shards_may_repeat_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned = make_shards(tmp_path, 2)
    commit = StageTransaction.commit
    calls = 0

    def fails_once(self: StageTransaction, **more: bool) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MapFull("the freelist needed a page")
        commit(self, **more)

    monkeypatch.setattr(StageTransaction, "commit", fails_once)

    def body(state: WorkerState) -> list[TouchedShard]:
        apply(state, {(1, b"k"): b"v%d" % calls, (TOP, b"k"): b"v%d" % calls})
        return state.commit()

    run_with_growth(lambda: state_at(owned, 0), body)
    assert read(owned) == {(1, b"k"): b"v2", (TOP, b"k"): b"v2"}


def test_a_row_of_a_foreign_shard_is_refused_by_number(tmp_path: Path) -> None:
    owned = make_shards(tmp_path, 4)
    with (
        WorkerState(4, owned[1:3], fence(0), [R]) as state,
        pytest.raises(ShardMismatch, match=r"shards \[3\] came to a worker that owns \[1, 2\]"),
    ):
        apply(state, {(TOP // 2, b"k"): b"v", (TOP, b"k"): b"v"})


def test_misuse_is_told(tmp_path: Path) -> None:
    owned = make_shards(tmp_path, 2)
    with pytest.raises(EngineError, match="one of 2, but the layout has 3"):
        WorkerState(3, owned, fence(0), [R])
    with state_at(owned, 0) as state:
        with pytest.raises(EngineError, match="region 'elsewhere'"):
            state.scoped("op", RegionId("elsewhere"))
        view = state.scoped("op", R)
        one = np.array([1], dtype=np.uint64)
        with pytest.raises(EngineError, match="1 keys put with 1 values and 0 old values"):
            view.put("t", one, [b"a"], [b"v"], [])
        with pytest.raises(EngineError, match="1 hashes for 2 keys"):
            view.get("t", one, [b"a", b"b"])
        with pytest.raises(EngineError, match="not sorted"):
            view.get("t", np.array([2, 1], dtype=np.uint64), [b"a", b"b"])


def test_expected_markers_are_checked_in_every_shard(tmp_path: Path) -> None:
    owned = make_shards(tmp_path, 2)
    run_step(owned, 0, {(1, b"k"): b"0"})
    steps: list[Step | None] = [Step(0), None]
    right = [OwnedShard(o.path, o.identity, {R: s}) for o, s in zip(owned, steps, strict=True)]
    wrong = [OwnedShard(o.path, o.identity, {R: Step(0)}) for o in owned]
    before = dump_all(owned)
    with pytest.raises(ShardMismatch, match=r"shard-00001.*at step None, expected 0"):
        run_step(wrong, 1, {(1, b"k"): b"1"})
    assert dump_all(owned) == before
    run_step(right, 1, {(1, b"k"): b"1"})


def test_an_error_in_one_shard_aborts_all_and_ends_the_state(tmp_path: Path) -> None:
    owned = make_shards(tmp_path, 2)
    with state_at(owned, 0) as state:
        apply(state, {(1, b"k"): b"1", (TOP, b"k"): b"1"})
        hashes, keys, values = sorted_rows({(1, b"k"): "not bytes"})
        with pytest.raises(TypeError):
            state.scoped("op", R).put("t", hashes, keys, values, [None])
        run_step(owned, 0, {(1, b"k"): b"2"})
        with pytest.raises(EngineError, match="make a new one"):
            state.scoped("op", R).get("t", hashes, keys)
        with pytest.raises(EngineError, match="make a new one"):
            state.commit()
    assert read(owned) == {(1, b"k"): b"2"}
