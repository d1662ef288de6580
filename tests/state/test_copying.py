"""Copies of shards made beside the steps, against a plain dictionary."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_helpers import dump, fence, identity
from transfer_helpers import (
    ALL,
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
    stands,
    take,
)

from anabranch.errors import Fenced, ShardMismatch
from anabranch.model.ids import Epoch, Step
from anabranch.state import asof, copying
from anabranch.state.copying import Filler
from anabranch.state.removal import drop_shard
from anabranch.state.store import ShardStore
from anabranch.state.transaction import marker_of, read_fence, rollback_shard
from anabranch.state.transfer import Arrival, Cargo, copy_in, copy_out

NEW = identity(incarnation=1)


def filler(job: int, run: bytes = b"") -> Filler:
    return Filler(Epoch(0), job, run)


class Copier:
    """A shard that steps write, and a copy of it."""

    def __init__(self, root: Path) -> None:
        self.old, self.new = root / "old", root / "new"
        ShardStore.create(self.old, identity())
        self.step = 0
        self.state: State = {}
        self.writes: list[Rows] = []
        self.copied: int | None = None
        self.jobs = 0

    def run(self, rows: Rows) -> None:
        run(owned(self.old), self.step, rows)
        self.state = applied(self.state, rows)
        self.writes.append(rows)
        self.step += 1

    def read(self, beside: list[Rows], marks: int | None = 0, anew: bool = False) -> list[Cargo]:
        """What travels as of now, while some more steps are run."""
        store, todo = ShardStore.open(self.old), list(beside)
        markers = {r: s for r in TABLES if (s := marker_of(store, r)) is not None}
        return [
            Cargo.decode(cargo.encode())
            for cargo in copy_out(
                store,
                Step(self.step),
                Epoch(0),
                markers,
                ALL,
                TABLES,
                None if marks is None else Step(marks),
                None if anew or self.copied is None else Step(self.copied),
                lambda: self.run(todo.pop(0)) if todo else None,
            )
        ]

    def copy(self, beside: list[Rows] | None = None, marks: int | None = 0, anew: bool = False) -> None:
        at = self.step
        first = anew or self.copied is None
        self.jobs += 1
        # One by one, as they come from the network.
        for cargo in self.read(beside or [], marks, anew):
            copy_in(self.new, NEW, [cargo], fence(at), Step(at), first, filler(self.jobs))
            first = False
        self.copied = at

    def switch(self, rows: Rows, attempt: int = 0, marks: int | None = 0) -> None:
        cargos = take(self.old, self.step, attempt=attempt, marks=marks, since=self.copied)
        run(owned(self.new, 1, arriving=Arrival(cargos, False)), self.step, rows, attempt=attempt)

    def changed(self, since: int) -> dict[Place, bytes | None]:
        """What steps from `since` on have written."""
        return {place: self.state.get(place) for rows in self.writes[since:] for place in rows}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FEWEST", "FIRST", "MOST"):
        monkeypatch.setattr(asof, name, 3)
    monkeypatch.setattr(asof, "_RECORD_BYTES", 40)
    monkeypatch.setattr(copying, "CHUNK_BYTES", 40)


ROUND = st.tuples(st.lists(ROWS, max_size=2), st.lists(ROWS, max_size=3), st.none() | ROWS, st.booleans())


@settings(max_examples=50)
@given(rounds=st.lists(ROUND, min_size=1, max_size=4), last=ROWS, since=st.integers(0, 8))
def test_a_copy_that_follows_the_shard_until_a_step_switches_to_it(
    tmp_path_factory: pytest.TempPathFactory, rounds: list, last: Rows, since: int
) -> None:
    shard = Copier(tmp_path_factory.mktemp("copy"))
    for before, beside, vain, anew in rounds:
        for rows in before:
            shard.run(rows)
        shard.copy(beside, anew=anew)
        if vain is not None:
            shard.switch(vain)
            # The step is run again, and without the move.
            shard.run(vain)
    shard.switch(last, attempt=1)
    shard.state = applied(shard.state, last)
    shard.writes.append(last)
    assert content(shard.new) == shard.state
    found = changed(shard.new, shard.step + 1, min(since, shard.step))
    # Keys that only arrived may be told once more; what changed must be.
    assert found.items() >= shard.changed(min(since, shard.step)).items()
    assert found.items() <= shard.changed(0).items()


def rows(*hashes: int, value: bytes = b"v", table: str = "q.a") -> Rows:
    return {(table, address(h)): value for h in hashes}


@pytest.fixture
def shard(tmp_path: Path) -> Copier:
    made = Copier(tmp_path)
    made.run(rows(1, 2, 3))
    made.run(rows(4))
    return made


def test_a_copy_has_the_markers_and_marks_of_its_source(shard: Copier) -> None:
    shard.run({("q.a", address(1)): None})
    shard.copy(marks=1)
    store = ShardStore.open(shard.new)
    assert [marker_of(store, region) for region in TABLES] == [2, None]
    assert changed(shard.new, 3, 1) == {**rows(4), ("q.a", address(1)): None}
    with pytest.raises(ShardMismatch, match="take a full checkpoint"):
        changed(shard.new, 3, 0)


def test_the_step_that_switches_is_undone_and_run_again(shard: Copier) -> None:
    shard.copy()
    shard.run(rows(1, value=b"later"))
    shard.switch(rows(9))
    store = ShardStore.open(shard.new)
    assert [stands(store, region, 3) for region in TABLES] == [1, None]
    shard.switch(rows(8), attempt=1)
    assert content(shard.new) == applied(shard.state, rows(8))
    rollback_shard(store, fence(3, epoch=1), {Q: Step(1)})
    assert content(shard.new) == shard.state
    assert marker_of(store, R) is None


def test_marks_of_the_switch_suffice_where_the_copy_had_none(shard: Copier) -> None:
    shard.copy(marks=None)
    shard.run(rows(1, value=b"later"))
    shard.switch(rows(9), marks=1)
    assert changed(shard.new, 4, 1) == {**rows(4, 9), **rows(1, value=b"later")}


def test_changes_for_a_copy_of_another_step_are_refused(shard: Copier) -> None:
    with pytest.raises(ShardMismatch, match="found none there"):
        copy_in(shard.new, NEW, shard.read([]), fence(2), Step(2), False, filler(1))
    shard.copy()
    shard.run(rows(1))
    shard.copied = 1
    with pytest.raises(ShardMismatch, match="from step 1 on arrived, but it was copied as of step 2"):
        shard.switch({})
    shard.copied = 3
    with pytest.raises(ShardMismatch, match="brought from step 3 to 3, but it was copied as of step 2"):
        shard.copy()


def test_a_copier_that_comes_too_late_is_refused(shard: Copier) -> None:
    shard.copy()
    late = shard.read([], anew=True)
    shard.switch(rows(9))
    before = dump(ShardStore.open(shard.new))
    for first in (True, False):
        with pytest.raises(Fenced, match="comes too late"):
            copy_in(shard.new, NEW, late, fence(2), Step(2), first, filler(9))
    assert dump(ShardStore.open(shard.new)) == before


def test_a_half_made_copy_is_replaced_and_a_foreign_store_is_not(shard: Copier) -> None:
    copy_in(shard.new, NEW, shard.read([])[:1], fence(2), Step(2), True, filler(0))
    shard.run({("q.a", address(1)): None})
    shard.copy()
    assert content(shard.new) == shard.state
    with pytest.raises(ShardMismatch, match="incarnation"):
        copy_in(shard.old, NEW, shard.read([], anew=True), fence(3), Step(3), True, filler(9))
    assert content(shard.old) == shard.state


def put(shard: Copier, cargos: list[Cargo], who: Filler, first: bool = True) -> None:
    """As of step 2, whoever does it: jobs as of one step have one fence."""
    copy_in(shard.new, NEW, cargos, fence(2), Step(2), first, who)


@settings(max_examples=60)
@given(order=st.lists(st.booleans(), max_size=24), twin=st.booleans())
def test_a_copier_of_a_job_that_failed_does_no_harm_to_the_next(
    tmp_path_factory: pytest.TempPathFactory, order: list[bool], twin: bool
) -> None:
    """Both work as of one step, piece by piece in any order; the late one may be killed anywhere."""
    shard = Copier(tmp_path_factory.mktemp("copy"))
    shard.run(rows(*(n << 60 for n in range(15))))
    shard.run(rows(1, table="r.t"))
    pieces = shard.read([])
    assert len(pieces) > 5
    fillers = {True: filler(2, b"late") if twin else filler(1), False: filler(2, b"new")}
    done = {True: 0, False: 0}
    for late in [*order, *[False] * len(pieces)]:
        if done[late] == len(pieces):
            continue
        try:
            put(shard, [pieces[done[late]]], fillers[late], done[late] == 0)
            done[late] += 1
        except Fenced:
            if not late:
                # The twin came first, this one fails, and with it the job.
                assert twin
                assert done[False] == 0
                return
            done[late] = len(pieces)
    with pytest.raises(Fenced):
        put(shard, pieces[:1], fillers[True])
    with pytest.raises(Fenced):
        put(shard, pieces[:1], fillers[True], False)
    shard.copied = 2
    shard.switch(rows(9))
    assert content(shard.new) == applied(shard.state, rows(9))


def test_a_late_copier_cannot_put_into_a_copy_that_another_has_begun(shard: Copier) -> None:
    pieces = shard.read([])
    put(shard, pieces[:1], filler(1))
    put(shard, [], filler(2))
    assert not content(shard.new)
    store = ShardStore.open(shard.new)
    with store.begin(write=False) as txn:
        assert read_fence(store, txn) == fence(2)
    with pytest.raises(Fenced, match="copy job 1 of epoch 0 comes too late, job 2 of epoch 0"):
        put(shard, pieces[1:], filler(1), False)
    # A drop in between does not help it, nor does it harm the other unnoticed.
    drop_shard(shard.new, NEW)
    put(shard, pieces[:1], filler(1))
    with pytest.raises(ShardMismatch, match="begun by copy job 1 of epoch 0"):
        put(shard, pieces[1:], filler(2), False)


def test_a_late_round_is_refused_once_the_next_has_put_something(shard: Copier) -> None:
    shard.copy()
    shard.run(rows(1, value=b"later"))
    late = shard.read([])
    shard.copy()
    shard.copied = 2
    shard.copy()
    with pytest.raises(Fenced, match="copy job 2 of epoch 0 comes too late, job 3"):
        copy_in(shard.new, NEW, late, fence(3), Step(3), False, filler(2))
    shard.switch(rows(9))
    assert content(shard.new) == applied(shard.state, rows(9))


def test_a_copy_that_is_made_anew_holds_nothing_of_the_one_before(shard: Copier) -> None:
    shard.run({("q.a", address(5, b"L" * 900)): b"long", ("r.t", address(1)): b"r"})
    shard.copy()
    shard.run(dict.fromkeys(shard.state))
    shard.copied = None
    shard.copy(marks=None)
    assert content(shard.new) == {}
    with pytest.raises(ShardMismatch, match="take a full checkpoint"):
        changed(shard.new, 4, 3)


def test_a_copy_of_an_earlier_boot_is_not_begun_anew(shard: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    shard.copy()
    monkeypatch.setattr(copying, "current_boot_id", lambda: "another")
    with pytest.raises(ShardMismatch, match="earlier boot"):
        shard.copy(anew=True)


def test_a_shard_that_is_behind_is_not_copied(shard: Copier) -> None:
    store = ShardStore.open(shard.old)
    with pytest.raises(ShardMismatch, match="the step log says 5"):
        list(copy_out(store, Step(6), Epoch(0), {Q: Step(5)}, ALL, TABLES, None, None))
