"""The step log: for each step a plan record (what it reads) and a commit record (that it happened).

A step is visible when, and only when, its commit record exists.  Every `SNAPSHOT_EVERY` steps the
sums of all records so far (input positions, step markers) are written as a snapshot, so that opening a
log costs the same after a million steps.

LOG-1  Commit records are gapless from `first` on: step *n* is committed only after *n−1*.
LOG-2  A plan record is never changed; an attempt of a step reads what the plan record of its epoch says.
LOG-3  The commit record names the epoch whose plan was run.  A plan without a commit record has shown
       nothing to anybody, so a later coordinator may plan the step anew (over a file that was mended, say).
LOG-5  A step that moves state has the placement that it leaves in its plan record; with the commit record it is in force.
LOG-4  Records below `first` are deleted only when `first` is durable and a snapshot at or beyond it can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from anabranch import crash
from anabranch.errors import CorruptError, Fenced, JobDirError
from anabranch.model.ids import Epoch, PartitionId, RegionId, ShardId, Step
from anabranch.model.placement import Placement
from anabranch.storage import Storage, record
from anabranch.storage.ahead import read_ahead

SNAPSHOT_EVERY = 256
_FIRST = Step(0)
_PER_FOLDER = 1000
_FIRST_RECORD = "first.json"

_PLAN = crash.declare_write("plan", "the plan record of a step is written")
_COMMIT = crash.declare_write("commit", "the commit record of a step is written")
_SNAPSHOT = crash.declare_write("snapshot", "a snapshot of the step log is written")
_TRIM = crash.declare_write("logtrim", "the step log says which step is its first")
_EXPIRED = crash.declare(
    "logtrim.expired", "when the outputs of a trimmed step were removed, its records not yet"
)
_DELETED = crash.declare("logtrim.deleted", "in the middle of deleting trimmed records of steps")


@dataclass(slots=True)
class Progress:
    """What the committed steps add up to."""

    next_step: Step = _FIRST
    positions: dict[str, dict[PartitionId, int]] = field(default_factory=dict)
    """For each input, the position after what committed steps have read of each partition."""
    markers: dict[RegionId, dict[ShardId, Step]] = field(default_factory=dict)
    """For each region, the last committed step that touched a copy of a shard, by the copy's slot."""
    input_rows: int = 0
    output_rows: int = 0
    placement: Placement | None = None
    """As of the last step that moved state; None when none has."""

    def advance(self, plan: dict[str, Any], commit: dict[str, Any]) -> None:
        """Add one committed step."""
        step = Step(commit["step"])
        if step != self.next_step:
            raise CorruptError(f"step log: expected the commit record of step {self.next_step}, found {step}")
        for name, pieces in plan["slices"].items():
            positions = self.positions.setdefault(name, {})
            for piece in pieces:
                positions[piece["partition"]] = piece["end"]
        if plan.get("placement") is not None:
            self.place(Placement.from_json(plan["placement"]))
        for region, shards in commit["touched"].items():
            markers = self.markers.setdefault(RegionId(region), {})
            for shard in shards:
                markers[ShardId(shard)] = step
        self.input_rows += commit["input_rows"]
        self.output_rows += sum(output["rows"] for output in commit["outputs"].values())
        self.next_step = Step(step + 1)

    def place(self, placement: Placement) -> None:
        """State was moved.  A copy that moves is touched by the step that moves it; one that is no more has no marker."""
        self.placement = placement
        shards = len(placement.layout.shards)
        slots = {*range(shards), *(shards + shard for shard in placement.cuts)}
        for markers in self.markers.values():
            for slot in markers.keys() - slots:
                del markers[slot]

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
            "placement": None if self.placement is None else self.placement.to_json(),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Progress:
        placement = value.get("placement")
        return cls(
            next_step=Step(value["next_step"]),
            positions={name: dict(parts) for name, parts in value["positions"].items()},
            markers={
                RegionId(region): {ShardId(int(shard)): Step(step) for shard, step in markers.items()}
                for region, markers in value["markers"].items()
            },
            input_rows=value["input_rows"],
            output_rows=value["output_rows"],
            placement=None if placement is None else Placement.from_json(placement),
        )


class StepLog:
    """The records of one job's steps, below one storage."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._first: Step | None = None

    def create(self) -> None:
        """Begin a new log; one that was begun and has no steps yet stays as it is."""
        if not self._storage.exists(_FIRST_RECORD):
            record.replace(self._storage, _FIRST_RECORD, {"first": 0})

    @property
    def first(self) -> Step:
        """The first step whose records are kept; all before it were trimmed.

        Raises:
            CorruptError: there is no log.
        """
        if self._first is None:
            try:
                self._first = Step(record.read(self._storage, _FIRST_RECORD)["first"])
            except FileNotFoundError:
                raise CorruptError(
                    f"step log {self._storage} is missing (it has no {_FIRST_RECORD}); restore it from a backup of "
                    "the job directory"
                ) from None
        return self._first

    def write_plan(
        self,
        step: Step,
        epoch: Epoch,
        slices: dict[str, Any],
        layout: int,
        placement: Placement | None = None,
    ) -> None:
        """Fix what a step reads, and, where it moves state, where that is afterwards."""
        payload: dict[str, Any] = {"step": step, "epoch": epoch, "slices": slices, "layout": layout}
        if placement is not None:
            payload["placement"] = placement.to_json()
        record.create(self._storage, _name(step, f"{epoch}.plan"), payload, _PLAN)

    def write_commit(self, step: Step, payload: dict[str, Any]) -> None:
        """Make a step visible, once.  Raises Fenced when somebody else has."""
        try:
            record.create(self._storage, _name(step, "commit"), payload, _COMMIT)
        except FileExistsError:
            raise Fenced(
                f"step {step}: another coordinator has committed it; this one (epoch {payload['epoch']}) "
                "must stop"
            ) from None

    def plan(self, step: Step, epoch: Epoch) -> dict[str, Any] | None:
        return self._read(_name(step, f"{epoch}.plan"))

    def commit(self, step: Step) -> dict[str, Any] | None:
        return self._read(_name(step, "commit"))

    def load(self) -> Progress:
        """Add up the log: the newest snapshot and the records behind it.

        Raises:
            CorruptError: a record is damaged or missing in between; a log that lost its end would start
                the flow afresh in silence.
        """
        progress = self._newest_snapshot()
        for commit, plan in read_ahead(self._storage, self._pair, count(progress.next_step)):
            if commit is None:
                break
            if plan is None:
                raise CorruptError(
                    f"step log {self._storage}: step {progress.next_step} is committed but its plan is missing; "
                    "restore it from a backup of the job directory"
                )
            progress.advance(plan, commit)
        self._check_end(progress.next_step)
        return progress

    def _pair(self, step: int) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        commit = self.commit(Step(step))
        return commit, None if commit is None else self.plan(Step(step), Epoch(commit["epoch"]))

    def _newest_snapshot(self) -> Progress:
        first = self.first
        snapshots = [name for name in self._snapshots() if _step_of(name) >= first]
        damage: CorruptError | None = None
        # Behind a damaged one, the one before it and a longer tail add up to the same; and so do all records, as long as
        # none was trimmed.
        for name in reversed(snapshots):
            try:
                return Progress.from_json(record.read(self._storage, name))
            except CorruptError as error:
                damage = error
        if damage is not None and first > 0:
            raise damage
        if first > 0:
            raise CorruptError(
                f"step log {self._storage}: its steps before {first} were trimmed, and the snapshot that has their sums "
                "is missing; restore it from a backup of the job directory"
            )
        return Progress()

    def _snapshots(self) -> list[str]:
        return [name for name in self._storage.list() if name.startswith("snapshot-")]

    def _check_end(self, end: Step) -> None:
        """Refuse a log in which the last step or a step before others is missing."""
        later = any(
            _step_of(name) > end
            for number in (end // _PER_FOLDER, end // _PER_FOLDER + 1)
            for name in self._storage.list(f"{number:09d}", after=f"{end:012d}")
            if name.endswith(".commit")
        )
        missing = end if later else end - 1
        if later or (end > self.first and not self._storage.exists(_name(Step(end - 1), "commit"))):
            raise CorruptError(
                f"step log {self._storage}: the commit record of step {missing} is missing; restore it from a "
                "backup of the job directory"
            )

    def snapshot(self, progress: Progress) -> None:
        """Write the sums so far; keeps the two newest."""
        name = f"snapshot-{progress.next_step:012d}.json"
        record.replace(self._storage, name, progress.to_json(), point=_SNAPSHOT)
        self._storage.delete(*self._snapshots()[:-2])

    def commits(self, first: Step = _FIRST) -> Iterator[dict[str, Any]]:
        """Commit records from `first` on, in order; those that were trimmed are left out.

        Raises:
            JobDirError: the log was trimmed beyond the step that was to come next, while it was read.
        """
        step = start = max(first, self.first)
        for commit in read_ahead(self._storage, self.commit, map(Step, count(start))):
            if commit is None:
                break
            yield commit
            step = Step(step + 1)
        self._first = None
        if self.first <= step:
            return
        if step > start:
            raise JobDirError(
                f"step log {self._storage}: step {step} was trimmed while the steps were read; read them again"
            )
        yield from self.commits(self.first)

    def trim(self, before: Step, expire: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Delete the records of all steps below `before`, unless no snapshot at or beyond it can be read.

        `expire` is given each commit record before that is deleted, oldest first, and again when a crash came in
        between: whatever is named nowhere else goes first.  What a crash leaves, the next call deletes.
        """
        if before > self.first:
            if not self._has_snapshot(before):
                return
            record.replace(self._storage, _FIRST_RECORD, {"first": before}, point=_TRIM)
            self._first = before
        for folder in self._storage.list():
            if folder.endswith("/") and int(folder[:-1]) * _PER_FOLDER < self.first:
                self._trim_folder(folder[:-1], expire)

    def _has_snapshot(self, before: Step) -> bool:
        for name in reversed(self._snapshots()):
            if _step_of(name) < before:
                return False
            try:
                record.read(self._storage, name)
            except CorruptError:
                continue
            return True
        return False

    def _trim_folder(self, folder: str, expire: Callable[[dict[str, Any]], None] | None) -> None:
        names = [f"{folder}/{name}" for name in self._storage.list(folder) if _step_of(name) < self.first]
        plans = [name for name in names if not name.endswith(".commit")]
        commits = [name for name in names if name.endswith(".commit")]
        if expire is not None:
            for commit in read_ahead(self._storage, self._read, commits):
                if commit is not None:
                    expire(commit)
                    crash.point(_EXPIRED)
        self._storage.delete(*plans)
        crash.point(_DELETED)
        self._storage.delete(*commits)
        self._storage.sweep(folder)
        self._storage.prune(folder)

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            payload: dict[str, Any] = record.read(self._storage, name)
        except FileNotFoundError:
            return None
        return payload


def _name(step: Step, kind: str) -> str:
    return f"{step // _PER_FOLDER:09d}/{step:012d}.{kind}"


def _step_of(name: str) -> int:
    """The step in the name of a record or a snapshot."""
    return int(name.removeprefix("snapshot-").partition(".")[0])
