"""The step log: for each step a plan record (what it reads) and a commit record (that it happened).

A step is visible when, and only when, its commit record exists.  Every `SNAPSHOT_EVERY` steps the
sums of all records so far (input positions, step markers) are written as a snapshot, so that opening a
log costs the same after a million steps.

LOG-1  Commit records are gapless: step *n* is committed only after *n−1*.
LOG-2  A plan record is never changed; an attempt of a step reads what the plan record of its epoch says.
LOG-3  The commit record names the epoch whose plan was run.  A plan without a commit record has shown
       nothing to anybody, so a later coordinator may plan the step anew (over a file that was mended, say).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabranch.errors import CorruptError, Fenced
from anabranch.log import record
from anabranch.model.ids import Epoch, PartitionId, RegionId, ShardId, Step

SNAPSHOT_EVERY = 256
_FIRST = Step(0)
_PER_FOLDER = 1000


@dataclass(slots=True)
class Progress:
    """What the committed steps add up to."""

    next_step: Step = _FIRST
    positions: dict[str, dict[PartitionId, int]] = field(default_factory=dict)
    """For each input, the position after what committed steps have read of each partition."""
    markers: dict[RegionId, dict[ShardId, Step]] = field(default_factory=dict)
    """For each region, the last committed step that touched a shard."""
    input_rows: int = 0
    output_rows: int = 0

    def advance(self, plan: dict[str, Any], commit: dict[str, Any]) -> None:
        """Add one committed step."""
        step = Step(commit["step"])
        if step != self.next_step:
            raise CorruptError(f"step log: expected the commit record of step {self.next_step}, found {step}")
        for name, pieces in plan["slices"].items():
            positions = self.positions.setdefault(name, {})
            for piece in pieces:
                positions[piece["partition"]] = piece["end"]
        for region, shards in commit["touched"].items():
            markers = self.markers.setdefault(RegionId(region), {})
            for shard in shards:
                markers[ShardId(shard)] = step
        self.input_rows += commit["input_rows"]
        self.output_rows += sum(output["rows"] for output in commit["outputs"].values())
        self.next_step = Step(step + 1)

    def to_json(self) -> dict[str, Any]:
        return {
            "next_step": self.next_step,
            "positions": self.positions,
            "markers": {
                region: {str(shard): step for shard, step in markers.items()}
                for region, markers in self.markers.items()
            },
            "input_rows": self.input_rows,
            "output_rows": self.output_rows,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Progress:
        return cls(
            next_step=Step(value["next_step"]),
            positions={name: dict(parts) for name, parts in value["positions"].items()},
            markers={
                RegionId(region): {ShardId(int(shard)): Step(step) for shard, step in markers.items()}
                for region, markers in value["markers"].items()
            },
            input_rows=value["input_rows"],
            output_rows=value["output_rows"],
        )


class StepLog:
    """The records of one job's steps, below one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._folder: Path | None = None

    def write_plan(self, step: Step, epoch: Epoch, slices: dict[str, Any], layout: int) -> None:
        """Fix what a step reads."""
        payload = {"step": step, "epoch": epoch, "slices": slices, "layout": layout}
        record.create(self._path(step, f"{epoch}.plan"), payload)

    def write_commit(self, step: Step, payload: dict[str, Any]) -> None:
        """Make a step visible, once.  Raises Fenced when somebody else has."""
        try:
            record.create(self._path(step, "commit"), payload)
        except FileExistsError:
            raise Fenced(
                f"step {step}: another coordinator has committed it; this one (epoch {payload['epoch']}) "
                "must stop"
            ) from None

    def plan(self, step: Step, epoch: Epoch) -> dict[str, Any] | None:
        return self._read(step, f"{epoch}.plan")

    def commit(self, step: Step) -> dict[str, Any] | None:
        return self._read(step, "commit")

    def load(self) -> Progress:
        """Add up the log: the newest snapshot and the records behind it.

        Raises:
            CorruptError: a record is damaged or missing in between; a log that lost its end would start
                the flow afresh in silence.
        """
        progress = self._newest_snapshot()
        while (commit := self.commit(progress.next_step)) is not None:
            plan = self.plan(progress.next_step, Epoch(commit["epoch"]))
            if plan is None:
                raise CorruptError(
                    f"step log {self.directory}: step {progress.next_step} is committed but its plan is missing; "
                    "restore it from a backup of the job directory"
                )
            progress.advance(plan, commit)
        self._check_end(progress.next_step)
        return progress

    def _newest_snapshot(self) -> Progress:
        if not self.directory.is_dir():
            raise CorruptError(
                f"step log {self.directory} is missing; restore it from a backup of the job directory"
            )
        snapshots = sorted(self.directory.glob("snapshot-*.json"))
        if not snapshots:
            return Progress()
        try:
            value = record.read(snapshots[-1])
        except CorruptError:
            # The one before it, and a longer tail, add up to the same.
            if len(snapshots) < 2:
                raise
            value = record.read(snapshots[-2])
        return Progress.from_json(value)

    def _check_end(self, end: Step) -> None:
        """Refuse a log in which the last step or a step before others is missing."""
        later = [
            path
            for number in (end // _PER_FOLDER, end // _PER_FOLDER + 1)
            for path in self._folder_of(number).glob("*.commit")
            if int(path.stem) > end
        ]
        missing = end if later else end - 1
        if later or (end > 0 and not self._path(Step(end - 1), "commit", make=False).exists()):
            raise CorruptError(
                f"step log {self.directory}: the commit record of step {missing} is missing; restore it from a "
                "backup of the job directory"
            )

    def snapshot(self, progress: Progress) -> None:
        """Write the sums so far; keeps the two newest."""
        record.replace(self.directory / f"snapshot-{progress.next_step:012d}.json", progress.to_json())
        for old in sorted(self.directory.glob("snapshot-*.json"))[:-2]:
            old.unlink()

    def commits(self, first: Step = _FIRST) -> Iterator[dict[str, Any]]:
        """Commit records from `first` on, in order."""
        step = first
        while (commit := self.commit(step)) is not None:
            yield commit
            step = Step(step + 1)

    def _read(self, step: Step, kind: str) -> dict[str, Any] | None:
        try:
            payload: dict[str, Any] = record.read(self._path(step, kind, make=False))
        except FileNotFoundError:
            return None
        return payload

    def _folder_of(self, number: int) -> Path:
        return self.directory / f"{number:09d}"

    def _path(self, step: Step, kind: str, *, make: bool = True) -> Path:
        folder = self._folder_of(step // _PER_FOLDER)
        if make and folder != self._folder:
            folder.mkdir(parents=True, exist_ok=True)
            record.sync_directory(self.directory)
            self._folder = folder
        return folder / f"{step:012d}.{kind}"
