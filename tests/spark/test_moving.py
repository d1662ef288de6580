"""Shards that change their host inside steps, without Spark: the same output as if nothing had moved."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from inprocess import InProcess
from richflow import add_up, build, expected, write_input

from anabranch.connect.source import Slice
from anabranch.errors import WrongHost
from anabranch.model.ids import Attempt, Epoch, HostId, ShardId, Step, WorkerId
from anabranch.model.layout import FixedSharding, Layout, rescale
from anabranch.model.placement import Intent, joined, next_version
from anabranch.protocol.migration import Migration
from anabranch.protocol.orders import (
    CancelAsked,
    DropCopies,
    Dropped,
    DropSources,
    Finish,
    MoveInStep,
    Prepared,
    Settings,
    StepAborted,
    StepAsked,
    StepCommitted,
    Strategy,
)
from anabranch.runtime.standing import Moves
from anabranch.runtime.targets import journeys, moves_of
from anabranch.spark.background import roll_back_worker
from anabranch.spark.moving import drop_copies, prepare_host
from anabranch.spark.shards import sync_shards
from anabranch.spark.spec import StepSpec


class Migrating:
    """A job that the machine moves about, a step at a time."""

    def __init__(self, job: InProcess, strategy: Strategy, seed: int) -> None:
        self.job = job
        self.strategy = strategy
        self.rng = random.Random(seed)
        self.machine: Migration | None = None
        self.moved = 0
        self.cuts = 0

    def begin(self, target: Layout) -> None:
        job = self.job
        origin = job.layout
        self.intent = Intent(1, origin, target, str(self.strategy), str(self.strategy))
        job.placement, _ = joined(job.placement, self.intent, target)
        sizes: dict[ShardId, int] = {}
        for host in job.layout.hosts:
            sizes |= prepare_host(self.spec(), host)
        left = journeys(job.placement, sizes)
        settings = Settings(self.strategy, budget=2_000 if self.strategy is Strategy.FLUID else None)
        self.machine = Migration(settings, left.moves, left.cursors, job.progress.next_step, left.backwards)
        self.left: dict[ShardId, object] = {}
        self.arriving: dict[ShardId, object] = {}
        self.tell(Prepared(sizes))

    def spec(self) -> StepSpec:
        return self.job.spec(Attempt(0), {})

    def tell(self, event: object) -> list[object]:
        assert self.machine is not None
        commands = self.machine.handle(event)  # type: ignore[arg-type]
        self.machine.validate()
        todo = list(commands)
        while todo:
            command = todo.pop(0)
            match command:
                case DropSources(shards) | DropCopies(shards):
                    where = self.left if isinstance(command, DropSources) else self.arriving
                    copies = [where.pop(shard) for shard in shards if shard in where]
                    for host in self.job.root.joinpath("state").iterdir():
                        drop_copies(self.spec(), HostId(host.name), copies)  # type: ignore[arg-type]
                    todo += self.machine.handle(Dropped(shards))
                case Finish(cancelled):
                    goal = self.intent.origin if cancelled else self.intent.target
                    self.job.placement = next_version(self.job.placement, goal, intent=None)
                    self.machine = None
                    break
        return list(commands)

    def moves(self) -> Moves | None:
        if self.machine is None:
            return None
        commands = self.tell(StepAsked(self.job.progress.next_step))
        pieces = next(command.pieces for command in commands if isinstance(command, MoveInStep))
        if not pieces:
            return None
        moves = moves_of(self.job.placement, pieces, self.job.progress.markers)
        for piece, moving in zip(pieces, moves.moving, strict=True):
            self.arriving[piece.shard] = moving.source if piece.back else moving.target
            if piece.last and not piece.back:
                self.left[piece.shard] = moving.source
        self.moved += len(pieces)
        self.cuts += len(moves.placement.cuts)
        return moves

    def step(self, slices: dict[str, list[Slice]], fail: float = 0.3) -> dict[str, object]:
        """One step, some of whose attempts fail behind some stage, and some of whose plans are made anew."""
        job = self.job
        moves = self.moves()
        attempt = 0
        while self.rng.random() < fail:
            job.attempt(slices, attempt, stop_after=self.rng.randrange(job.plan.depth + 1), moves=moves)
            attempt += 1
            if self.machine is not None and self.rng.random() < 0.3:
                # Another coordinator takes over, and plans the step anew.
                self.tell(StepAborted(job.progress.next_step))
                job.epoch += 1  # type: ignore[assignment]
                attempt = 0
                moves = self.moves()
        reports = job.attempt(slices, attempt, moves=moves)
        commit = job.commit(slices, reports, moves)
        if self.machine is not None:
            size = sum(sum(report.collected.values()) for report in reports)
            self.tell(StepCommitted(Step(commit["step"]), 0.1, size))
        return {"changes": job.changes(commit), "commit": commit}


def hosts(count: int) -> list[HostId]:
    return [HostId(f"host-{number}") for number in range(count)]


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "strategy", [Strategy.SUDDEN, pytest.param(Strategy.BATCHED, marks=pytest.mark.slow), Strategy.FLUID]
)
def test_every_step_is_what_it_would_have_been(tmp_path: Path, strategy: Strategy, seed: int) -> None:
    data = write_input(tmp_path / "in", seed, orders=600)
    flow = build(tmp_path / "in")
    still = InProcess(flow, tmp_path / "still", 1, 8)
    job = InProcess(flow, tmp_path / "job", 2, 8, hosts=2)
    migrating = Migrating(job, strategy, seed)
    rng = random.Random(seed)
    steps = []
    finished = 0
    while still.planner.backlog(still.progress.positions):
        if migrating.machine is None and job.progress.next_step > 1:
            finished += 1
            workers, count = rng.choice([(2, 2), (3, 3), (4, 2), (1, 1), (5, 3)])
            migrating.begin(rescale(job.layout, workers, hosts(count), FixedSharding(8)))
        elif rng.random() < 0.1 and migrating.machine is not None:
            migrating.tell(CancelAsked())
        slices = still.cut(40)
        wanted = still.commit(slices, still.attempt(slices))
        found = migrating.step(slices)
        assert found["commit"]["outputs"].keys() == wanted["outputs"].keys()  # type: ignore[index]
        for name, output in wanted["outputs"].items():
            theirs = found["commit"]["outputs"][name]  # type: ignore[index]
            assert (theirs["rows"], theirs["hash"]) == (output["rows"], output["hash"]), name
        steps.append(found["changes"])
    assert finished > 1
    assert migrating.moved > 10
    assert (migrating.cuts > 0) == (strategy is Strategy.FLUID)
    for name, table in expected(data).items():
        assert add_up([step[name] for step in steps if name in step]) == table, name  # type: ignore[index,operator]


def test_a_host_that_was_the_jobs_before_is_cleared(tmp_path: Path) -> None:
    write_input(tmp_path / "in", 0, orders=100)
    job = InProcess(build(tmp_path / "in"), tmp_path / "job", 2, 8, hosts=2)
    slices = job.cut(40)
    job.commit(slices, job.attempt(slices))
    # The second host is lost, and comes again with its disk when its shards are elsewhere, under other incarnations.
    there = {path.name for path in (tmp_path / "job" / "state" / "host-1").glob("shard-*")}
    assert there
    job.epoch = Epoch(job.epoch + 1)
    layout = rescale(job.layout, 2, hosts(1), FixedSharding(8))
    lost = replace(job.spec(Attempt(0), {}), layout=layout)
    assert prepare_host(lost, HostId("host-1")) == {}
    assert [*(tmp_path / "job" / "state" / "host-1").glob("shard-*")] == []
    # One that has shards keeps them, whatever else is under way.
    kept = {path.name for path in (tmp_path / "job" / "state" / "host-0").glob("shard-*")}
    assert prepare_host(job.spec(Attempt(0), {}), HostId("host-0"))
    assert {path.name for path in (tmp_path / "job" / "state" / "host-0").glob("shard-*")} == kept


def test_a_worker_without_shards_needs_no_directory(tmp_path: Path) -> None:
    write_input(tmp_path / "in", 0, orders=100)
    job = InProcess(build(tmp_path / "in"), tmp_path / "job", 2, 8, hosts=2)
    layout = replace(job.layout, shards=(WorkerId(0),) * 8)
    spec = replace(job.spec(Attempt(0), {}), layout=layout)
    shutil.rmtree(tmp_path / "job" / "state" / "host-1")
    roll_back_worker(spec, WorkerId(1))
    sync_shards(spec, WorkerId(1))
    with pytest.raises(WrongHost):
        roll_back_worker(job.spec(Attempt(0), {}), WorkerId(1))
