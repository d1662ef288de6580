"""Run the stages of a step in this process, one worker after another, without Spark.

The very functions that Spark's tasks run; only the shuffle is a list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from anabranch.connect.sink import Staged
from anabranch.connect.sinks import parquet
from anabranch.connect.source import Slice
from anabranch.flow.plan import DEAD_LETTERS, Plan, make_plan
from anabranch.flow.stream import Flow
from anabranch.log.steplog import Progress
from anabranch.model.ids import Attempt, Epoch, HostId, Step, WorkerId
from anabranch.model.layout import FixedSharding, Layout, initial_layout
from anabranch.model.placement import Placement
from anabranch.runtime.commit import commit_record
from anabranch.runtime.planner import Planner
from anabranch.runtime.standing import Moves
from anabranch.spark.blob import decode
from anabranch.spark.shards import copy_path, identity
from anabranch.spark.spec import Report, StepSpec
from anabranch.spark.stage import run_stage
from anabranch.state.store import ShardStore
from anabranch.storage import open_storage

Tamper = Callable[[int, list[list[bytes]]], None]
"""Called before each stage with its number and the blobs that wait for each worker; may change them."""


class InProcess:
    """A job without Spark: steps are planned, run and committed here."""

    def __init__(self, flow: Flow, root: Path, workers: int = 2, shards: int = 8, hosts: int = 1) -> None:
        self.plan: Plan = make_plan(flow)
        self.root = root
        names = [HostId(f"host-{n}") for n in range(hosts)]
        layout = initial_layout(workers, names, FixedSharding(shards))
        self.placement = Placement(layout, (0,) * shards)
        self.progress = Progress()
        self.epoch = Epoch(1)
        sources = {name: node.source for name, node in self.plan.inputs.items() if node.source is not None}
        self.planner = Planner(sources)
        for name, source in sources.items():
            source.start(open_storage(root / "inputs" / name))
        spec = self.spec(Attempt(0), {})
        for copy in self.placement.copies():
            ShardStore.create(copy_path(spec, copy), identity(spec, copy))

    @property
    def layout(self) -> Layout:
        return self.placement.layout

    def spec(self, attempt: Attempt, slices: dict[str, list[Slice]]) -> StepSpec:
        placement = self.placement
        return StepSpec(
            job="job",
            epoch=self.epoch,
            step=self.progress.next_step,
            attempt=attempt,
            layout=placement.layout,
            incarnations=placement.incarnations,
            cuts=placement.cuts,
            generation=placement.generation,
            marks_since=Step(0),
            markers=self.progress.markers,
            work=self.planner.assign(slices, placement.layout),
            state_root=str(self.root / "state"),
            outputs_root=str(self.root / "outputs"),
            keep_undo_from=Step(0),
        )

    def moving(self, spec: StepSpec, slices: dict[str, list[Slice]], moves: Moves) -> StepSpec:
        """The attempt of a step that also moves state."""
        placement = moves.placement
        return replace(
            spec,
            layout=placement.layout,
            incarnations=placement.incarnations,
            cuts=placement.cuts,
            generation=placement.generation,
            moving=moves.moving,
            work=self.planner.assign(slices, placement.layout),
        )

    def cut(self, rows: int) -> dict[str, list[Slice]]:
        backlog = self.planner.backlog(self.progress.positions)
        return self.planner.cut(backlog, rows, 1 << 40, len(self.layout.workers))

    def attempt(
        self,
        slices: dict[str, list[Slice]],
        number: int = 0,
        tamper: Tamper | None = None,
        stop_after: int | None = None,
        moves: Moves | None = None,
    ) -> list[Report]:
        """Run one attempt of the next step; `stop_after` ends it behind that stage, as a crash would."""
        spec = self.spec(Attempt(number), slices)
        if moves is not None:
            spec = self.moving(spec, slices, moves)
        waiting: list[list[bytes]] = [[] for _ in range(spec.workers)]
        reports: list[Report] = []
        for stage in range(self.plan.depth + 1):
            if tamper is not None:
                tamper(stage, waiting)
            leaving: list[list[bytes]] = [[] for _ in range(spec.workers)]
            for worker in range(spec.workers):
                for receiver, blob in run_stage(self.plan, spec, stage, WorkerId(worker), waiting[worker]):
                    leaving[receiver].append(blob)
            if stop_after == stage:
                return []
            waiting = leaving
        for blobs in waiting:
            for blob in blobs:
                reports += [Report.from_wire(wire) for wire in decode(blob).reports]
        return reports

    def commit(
        self, slices: dict[str, list[Slice]], reports: list[Report], moves: Moves | None = None
    ) -> dict[str, Any]:
        commit = commit_record(self.progress.next_step, self.epoch, self.layout, reports, 0.0)
        plan: dict[str, Any] = {
            "slices": {name: [piece.to_json() for piece in pieces] for name, pieces in slices.items()}
        }
        if moves is not None:
            self.placement = moves.placement
            plan["placement"] = moves.placement.to_json()
        self.progress.advance(plan, commit)
        return commit

    def step(self, rows: int = 1000) -> dict[str, pl.DataFrame]:
        """A whole step; returns the changes of each output."""
        slices = self.cut(rows)
        return self.changes(self.commit(slices, self.attempt(slices)))

    def changes(self, commit: dict[str, Any]) -> dict[str, pl.DataFrame]:
        found: dict[str, pl.DataFrame] = {}
        for name, output in commit["outputs"].items():
            sink = parquet() if name == DEAD_LETTERS else self.plan.outputs[name].sink
            assert sink is not None
            staged = [Staged.from_json(file) for file in output["files"]]
            root = open_storage(self.root / "outputs").child(name)
            sink.publish(root, staged)
            found[name] = sink.read(root, staged)
        return found

    def run(self, rows: int = 1000) -> list[dict[str, pl.DataFrame]]:
        """Steps until nothing is left."""
        steps = []
        while self.planner.backlog(self.progress.positions):
            steps.append(self.step(rows))
        return steps
