"""Moving keys between stores inside steps, against a plain dictionary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_helpers import dump, fence, identity
from transfer_helpers import (
    ALL,
    HASHES,
    ROWS,
    TABLES,
    Place,
    Q,
    R,
    Rows,
    State,
    address,
    applied,
    changed,
    content,
    owned,
    run,
    take,
    within,
)

from anabranch.errors import EngineError, Fenced, IncompleteInput, ShardMismatch
from anabranch.model.ids import Epoch, Step
from anabranch.model.ranges import HashRange
from anabranch.state.faults import MapFull
from anabranch.state.manifest import Manifest, chain_pieces, plan_work
from anabranch.state.restore import Target, restore_shards
from anabranch.state.snapshot import Snapshot, Source, write_snapshot
from anabranch.state.store import ShardStore
from anabranch.state.survey import survey
from anabranch.state.transaction import StageTransaction, marker_of, rollback_shard
from anabranch.state.transfer import Arrival, collect, weigh
from anabranch.state.undo import UndoRing
from anabranch.storage.local import LocalStorage

CURSORS = sorted({h + d for h in HASHES for d in (0, 1)} - {0})
HALF = 1 << 63


class Journey:
    """One shard on its way from one store to another, with checkpoints, and what it should hold."""

    def __init__(self, root: Path) -> None:
        self.root, self.step, self.cursor, self.keep = root, 0, 0, 0
        self.since: int | None = None
        self.state: State = {}
        self.changed: set[Place] = set()
        """Keys that were written since the last checkpoint."""
        ShardStore.create(root / "old", identity())
        self.storage = LocalStorage(root / "checkpoints")
        self.manifest: Manifest | None = None

    def ranges(self, cursor: int | None = None) -> dict[str, HashRange]:
        cursor = self.cursor if cursor is None else cursor
        found = {"new": (0, cursor), "old": (cursor, 1 << 64)}
        return {name: hashes for name, hashes in found.items() if hashes[0] < hashes[1]}

    def run(self, rows: Rows, cursor: int, attempt: int, vain: bool = False) -> None:
        """A step after which `cursor` is where the shard is cut; keys move on, or back."""
        low, end = sorted((self.cursor, cursor))
        source, target = ("old", "new") if cursor > self.cursor else ("new", "old")
        arriving = None
        if low < end:
            cargos = take(self.root / source, self.step, (low, end), attempt=attempt, marks=self.since)
            arriving = Arrival(cargos, fresh=(target, low) == ("new", 0))
        for name, hashes in self.ranges(cursor).items():
            shard = owned(self.root / name, int(name == "new"), hashes, arriving if name == target else None)
            run(shard, self.step, rows, attempt=attempt, keep=self.keep)
        if not vain:
            self.cursor = cursor
            self.state = applied(self.state, rows)
            self.changed.update(rows)
            self.step += 1
            self.check()

    def check(self) -> None:
        found: State = {}
        for name, hashes in self.ranges().items():
            found.update(content(self.root / name, hashes))
        assert found == self.state

    def checkpoint(self) -> None:
        """As of now; incremental if it is not the first."""
        at, ranges = self.step, self.ranges()
        if self.since is not None:
            delta: dict[Place, bytes | None] = {}
            for name, hashes in ranges.items():
                delta.update(changed(self.root / name, at, self.since, hashes))
            assert delta == {place: self.state.get(place) for place in self.changed}
        self.write_version()
        self.since = self.keep = at
        self.changed.clear()

    def write_version(self) -> None:
        before, at = self.manifest, Step(self.step)
        work = plan_work(before, 2)
        version = 1 if before is None else before.version + 1
        snapshot = Snapshot(version, at, before.step if before else None, Epoch(0), 2, work)
        written = []
        for name, hashes in self.ranges().items():
            path = self.root / name
            who = identity(incarnation=int(name == "new"))
            stands = {r: s for r in TABLES if (s := marker_of(ShardStore.open(path), r)) is not None}
            source = Source(str(path), who, stands, hashes)
            merges = sorted(work.merges) if name == next(iter(self.ranges())) else []
            written += write_snapshot(self.storage, snapshot, [source], merges, name)
        pieces = chain_pieces(before, work, written)
        self.manifest = Manifest(version, at, {}, {}, 2, "f", "0", 0.0, pieces)
        target = Target(self.root / f"restored-{version}", identity(incarnation=9), {})
        restore_shards(self.storage, self.manifest, [target], fence(self.step))
        assert content(Path(target.path)) == self.state


@settings(max_examples=60)
@given(
    before=st.lists(ROWS, max_size=4), moving=ROWS, vain=st.none() | ROWS, after=st.lists(ROWS, max_size=4)
)
def test_a_whole_shard_moves_in_a_step(
    tmp_path_factory: pytest.TempPathFactory, before: list, moving: Rows, vain: Rows | None, after: list
) -> None:
    shard = Journey(tmp_path_factory.mktemp("whole"))
    for rows in before:
        shard.run(rows, 0, 0)
    left = content(shard.root / "old")
    if vain is not None:
        shard.run(vain, 1 << 64, 0, vain=True)
    shard.run(moving, 1 << 64, 1)
    assert content(shard.root / "old") == left
    for rows in after:
        shard.run(rows, 1 << 64, 0)


STEP = st.tuples(
    ROWS,
    st.none() | st.sampled_from([0, *CURSORS]),
    st.none() | st.tuples(ROWS, st.sampled_from([0, *CURSORS])),
    st.booleans(),
)


@settings(max_examples=60)
@given(steps=st.lists(STEP, max_size=9))
def test_a_shard_moves_in_parts_and_back_with_attempts_in_vain_and_checkpoints(
    tmp_path_factory: pytest.TempPathFactory, steps: list
) -> None:
    shard = Journey(tmp_path_factory.mktemp("parts"))
    for rows, cursor, vain, checkpoint in steps:
        if vain is not None and cut(shard, vain[1]):
            shard.run(vain[0], vain[1], 0, vain=True)
        shard.run(rows, cursor if cursor is not None and cut(shard, cursor) else shard.cursor, 1)
        if checkpoint:
            shard.checkpoint()


def cut(shard: Journey, cursor: int) -> bool:
    """Whether a step can end with this cursor: a shard that has left a store for good does not come back."""
    return shard.cursor < 1 << 64 and cursor != shard.cursor


# --- attempts, fences, places


def rows(*hashes: int, value: bytes = b"v", table: str = "q.a") -> dict[Place, bytes | None]:
    return {(table, address(h)): value for h in hashes}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A shard in which three steps wrote."""
    path = tmp_path / "old"
    ShardStore.create(path, identity())
    run(owned(path), 0, rows(1, 2, HALF, table="r.t"))
    run(owned(path), 1, rows(1, HALF + 1))
    run(owned(path), 2, rows(2, HALF, value=b"w"))
    return path


def fresh(path: Path, cargos: Sequence, hashes: HashRange = ALL):
    return owned(path, 1, hashes, Arrival(tuple(cargos), True))


def test_the_same_attempt_is_refused_and_the_next_one_begins_anew(old: Path, tmp_path: Path) -> None:
    cargos = take(old, 3)
    run(fresh(tmp_path / "new", cargos), 3, rows(5))
    with pytest.raises(Fenced, match="another task of the same attempt"):
        run(fresh(tmp_path / "new", cargos), 3, rows(5))
    run(fresh(tmp_path / "new", take(old, 3, attempt=1)), 3, rows(6), attempt=1)
    assert content(tmp_path / "new") == applied(content(old), rows(6))
    with pytest.raises(Fenced, match="comes too late"):
        run(fresh(tmp_path / "new", cargos), 3, rows(5))
    with pytest.raises(Fenced, match="comes too late"):
        take(old, 3)


def test_collecting_undoes_what_an_earlier_attempt_did_at_the_source(old: Path) -> None:
    before = content(old)
    run(owned(old), 3, rows(1, 9, value=b"vain"))
    assert content(old) != before
    cargos = take(old, 3, attempt=1)
    found = {
        (t.name, a): v for c in cargos for t in c.tables for a, v in zip(t.addresses, t.values, strict=True)
    }
    assert found == content(old) == before


def test_collecting_what_this_attempt_has_written_is_refused(old: Path) -> None:
    run(owned(old, hashes=(HALF, 1 << 64)), 3, rows(HALF))
    before = dump(ShardStore.open(old))
    with pytest.raises(Fenced, match="another task of the same attempt"):
        take(old, 3, (0, HALF))
    assert dump(ShardStore.open(old)) == before


def test_a_first_attempt_leaves_the_source_as_it_was_and_a_later_one_fences_it(old: Path) -> None:
    before = dump(ShardStore.open(old))
    take(old, 3)
    assert dump(ShardStore.open(old)) == before
    take(old, 3, attempt=1)
    with pytest.raises(Fenced):
        run(owned(old), 3, {})


def test_a_source_that_is_elsewhere_is_a_mismatch(old: Path) -> None:
    store = ShardStore.open(old)
    with pytest.raises(ShardMismatch, match="is at step 2, expected 1 before it moves in step 3"):
        collect(store, fence(3), Q, TABLES[Q], ALL, Step(1), None)
    with (
        StageTransaction(store, fence(3), [R]),
        pytest.raises(EngineError, match="while a transaction is open"),
    ):
        collect(store, fence(3), Q, TABLES[Q], ALL, Step(2), None)


def test_cargo_for_another_store_and_missing_cargo_are_refused(old: Path, tmp_path: Path) -> None:
    cargos = take(old, 3)
    with pytest.raises(IncompleteInput, match=r"region 'q': hashes 0 to .* should arrive, and \[\] did"):
        run(fresh(tmp_path / "a", cargos[1:]), 3, {})
    with pytest.raises(IncompleteInput):
        run(fresh(tmp_path / "b", take(old, 3, (0, HALF))), 3, {})
    with pytest.raises(ShardMismatch, match="different layouts"):
        run(fresh(tmp_path / "c", cargos, (0, HALF)), 3, {})
    with pytest.raises(ShardMismatch, match="different layouts"):
        run(fresh(tmp_path / "d", [replace(c, shard=7) for c in cargos]), 3, {})


def test_a_foreign_store_in_the_way_is_a_mismatch(old: Path, tmp_path: Path) -> None:
    cargos = take(old, 3)
    with pytest.raises(ShardMismatch, match="incarnation: expected 1, found 0"):
        run(fresh(old, cargos), 3, {})
    with pytest.raises(ShardMismatch, match="found none there"):
        run(owned(tmp_path / "new", 1, ALL, Arrival(cargos, False)), 3, {})


def test_a_region_that_arrives_is_touched_without_a_row(old: Path, tmp_path: Path) -> None:
    touched = run(fresh(tmp_path / "new", take(old, 3)), 3, {})
    assert [(t.step, t.regions) for t in touched] == [(3, (Q,)), (3, (R,))]
    store = ShardStore.open(tmp_path / "new")
    assert [marker_of(store, region) for region in TABLES] == [3, 3]
    with store.begin(write=False) as txn:
        assert [UndoRing(store, txn).record(r, Step(3))[0].step for r in TABLES] == [2, 0]  # type: ignore[union-attr]


def test_rows_outside_of_the_valid_hashes_are_refused(old: Path) -> None:
    with pytest.raises(
        ShardMismatch, match=r"rows of shards \[0\] came to a worker that owns \[0\], of hash 1 "
    ):
        _force(owned(old, hashes=(HALF, 1 << 64)), rows(1))
    with pytest.raises(ShardMismatch):
        _force(owned(old, hashes=(0, 0)), rows(0))


def _force(shard, some: Rows) -> None:
    import numpy as np

    from anabranch.state.worker import WorkerState

    with WorkerState(1, [shard], fence(3), [Q]) as state:
        hashes = np.array([int.from_bytes(a[:8], "big") for _, a in some], dtype=np.uint64)
        state.scoped("q", Q).get("a", hashes, [a[9:] for _, a in some])


# --- what is known of the time before


def test_a_move_keeps_the_marks_of_what_changed(old: Path, tmp_path: Path) -> None:
    run(owned(old), 3, {("q.a", address(2)): None})
    run(fresh(tmp_path / "new", take(old, 4, marks=2)), 4, rows(77))
    assert changed(tmp_path / "new", 5, 2) == {
        **rows(77),
        **rows(HALF, value=b"w"),
        ("q.a", address(2)): None,
    }
    assert changed(tmp_path / "new", 5, 4) == rows(77)
    # And on: from there to a third store, of which the marks are all that is left of steps 2 and 3.
    run(owned(tmp_path / "third", 2, ALL, Arrival(take(tmp_path / "new", 5, marks=2), True)), 5, {})
    assert changed(tmp_path / "third", 6, 2) == changed(tmp_path / "new", 5, 2)
    for where in ("new", "third"):
        with pytest.raises(ShardMismatch, match="take a full checkpoint"):
            changed(tmp_path / where, 6, 1)


def test_without_marks_nothing_before_the_move_is_claimed(old: Path, tmp_path: Path) -> None:
    run(fresh(tmp_path / "new", take(old, 3, marks=None)), 3, rows(77))
    assert changed(tmp_path / "new", 4, 3) == rows(77)
    with pytest.raises(ShardMismatch, match="take a full checkpoint"):
        changed(tmp_path / "new", 4, 2)


def test_a_ring_that_is_too_short_for_marks_says_how_far_they_reach(old: Path, tmp_path: Path) -> None:
    store = ShardStore.open(old)
    with store.begin(write=True) as txn:
        UndoRing(store, txn).drop_before(Q, Step(2))
    cargos = take(old, 3, marks=1)
    assert [c.known for c in cargos] == [2, 1]
    run(fresh(tmp_path / "new", cargos), 3, {})
    assert changed(tmp_path / "new", 4, 2) == rows(2, HALF, value=b"w")
    with pytest.raises(ShardMismatch, match="take a full checkpoint"):
        changed(tmp_path / "new", 4, 1)
    with pytest.raises(ShardMismatch, match="no longer known"):
        take(old, 3, since=1)


def test_marks_go_when_nobody_goes_back_so_far(old: Path, tmp_path: Path) -> None:
    new, upper = tmp_path / "new", (HALF, 1 << 64)
    run(fresh(new, take(old, 3, (0, HALF)), (0, HALF)), 3, {})
    store = ShardStore.open(new)

    def marks() -> int:
        with store.begin(write=False) as txn:
            return sum(1 for r in TABLES for _ in UndoRing(store, txn).marks(r, Step(0)))

    assert marks() == 2
    # An attempt in vain, and the one that counts, which moves less and nothing that has a mark.
    run(owned(new, 1, ALL, Arrival(take(old, 4, upper), False)), 4, {})
    assert marks() == 4
    less = (HALF, HALF + 1)
    rest = take(old, 4, less, attempt=1, marks=3)
    run(owned(new, 1, (0, less[1]), Arrival(rest, False)), 4, {}, attempt=1)
    assert marks() == 2

    run(owned(new, 1), 5, rows(1, 2) | rows(1, table="r.t"), keep=2)
    assert marks() == 2
    run(owned(new, 1), 6, rows(1, 2) | rows(1, table="r.t"), keep=3)
    assert marks() == 0


def test_a_checkpoint_has_of_each_copy_only_what_is_valid_there(tmp_path: Path) -> None:
    shard = Journey(tmp_path)
    shard.run(rows(1, HALF), 0, 0)
    shard.checkpoint()
    shard.run(rows(1, HALF, value=b"w"), 0, 0)
    shard.run(rows(1, value=b"x"), HALF, 0)
    shard.checkpoint()
    assert shard.manifest is not None
    latest = [piece for piece in shard.manifest.pieces if piece.version == 2]
    assert sorted((piece.rows, piece.low, piece.high) for piece in latest) == [(1, 1, 1), (1, HALF, HALF)]


def test_a_step_is_rolled_back_to_what_arrived_in_it(old: Path, tmp_path: Path) -> None:
    state = content(old)
    run(fresh(tmp_path / "new", take(old, 3)), 3, rows(1, 5, value=b"n"))
    store = ShardStore.open(tmp_path / "new")
    rollback_shard(store, fence(3, epoch=1), {Q: Step(2), R: Step(0)})
    assert content(tmp_path / "new") == state


def test_survey_knows_before_which_steps_a_store_cannot_go(old: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    run(fresh(new, take(old, 3, (0, HALF)), (0, HALF)), 3, rows(1))
    run(owned(new, 1, (0, HALF)), 4, rows(1) | rows(1, table="r.t"))
    run(owned(new, 1, ALL, Arrival(take(old, 5, (HALF, 1 << 64)), False)), 5, rows(1))
    who = identity(incarnation=1)
    assert survey(new, who, TABLES).floors == {Q: 6, R: 6}
    assert survey(new, who, TABLES, (0, HALF)).floors == {Q: 4, R: 4}
    assert survey(old, identity(), TABLES).floors == {Q: 0, R: 0}
    # The second part may be undone, and the first is as it was.
    state = content(new, (0, HALF))
    rollback_shard(ShardStore.open(new), fence(5, epoch=1), {Q: Step(4), R: Step(4)})
    assert content(new, (0, HALF)) == state


# --- room


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(("keys", "size", "overhead"), [(5_000, 500, 1.05), (16_000, 24, 1.1)])
def test_a_map_that_is_full_when_keys_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool, keys: int, size: int, overhead: float
) -> None:
    """All of them changed of late, and a third changes in the step that moves them."""
    old, new = tmp_path / "old", tmp_path / "new"
    ShardStore.create(old, identity())
    places = [("q.a", address(n << 50, b"k%07d" % n)) for n in range(keys)]
    run(owned(old), 0, dict.fromkeys(places, b"x" * size))
    cargos = take(old, 1)
    assert sum(len(c.encode()) for c in cargos) < overhead * sum(c.size for c in cargos)
    again: Rows = dict.fromkeys(places[::3], b"y" * size)
    full: list[MapFull] = []
    failed = ShardStore.failed

    def count(self: ShardStore, error: Exception) -> Exception:
        found = failed(self, error)  # type: ignore[arg-type]
        full.append(found)  # type: ignore[arg-type]
        return found

    monkeypatch.setattr(ShardStore, "failed", count)
    if not ahead:
        monkeypatch.setattr(ShardStore, "reserve", lambda self, keys, size: None)
        monkeypatch.setattr(ShardStore, "foresee", lambda self, keys: None)
    run(fresh(new, cargos), 1, again)
    assert len(full) in ([0] if ahead else range(1, 4))
    assert content(new) == applied(content(old), again)


def test_weighing_counts_pages_and_shares_them_by_hash(tmp_path: Path) -> None:
    old = tmp_path / "old"
    ShardStore.create(old, identity())
    store = ShardStore.open(old)
    assert weigh(store) == 0
    run(owned(old), 0, {("q.a", address(n << 52, b"k%d" % n)): b"x" * 200 for n in range(4096)})
    total = weigh(store)
    assert 4096 * 200 < total < 3 * 4096 * 220
    assert weigh(store, ALL) == total
    assert abs(weigh(store, (0, HALF)) - total / 2) < total / 100
    assert within(content(old), (0, HALF))
