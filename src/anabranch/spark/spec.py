"""What a step's tasks are told, and what they answer.  Plain values, shipped with every stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from anabranch.connect.source import Slice
from anabranch.model.ids import Attempt, Epoch, HostId, RegionId, ShardId, Step, WorkerId
from anabranch.model.layout import Layout
from anabranch.model.placement import Copy, Cut, Placement

STATE_DIR_VARIABLE = "ANABRANCH_STATE_DIR"
"""Set on a Spark worker machine, it says where that machine keeps shards."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """A slice that one worker reads.  `ordinal` is its place among all slices of the step."""

    input: str
    ordinal: int
    piece: Slice


@dataclass(frozen=True, slots=True)
class Lost:
    """A range of a partition that became one dead letter instead of rows."""

    input: str
    partition: str
    start: int
    end: int
    reason: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Lost:
        return cls(
            str(data["input"]),
            str(data["partition"]),
            int(data["start"]),
            int(data["end"]),
            str(data["reason"]),
        )

    @property
    def record(self) -> str:
        """How the dead letter shows it."""
        return f"{self.partition} from {self.start} to {self.end}"


@dataclass(frozen=True, slots=True)
class Moving:
    """Hashes of a shard that change their copy in this step: to another host, or as the number of shards changes."""

    shard: ShardId
    """The target's."""
    low: int
    end: int
    source: Copy
    """As before the step."""
    target: Copy
    """As after it."""
    fresh: bool
    """Whether the target has nothing yet of what counts; False where earlier steps or a copy beside the steps filled it."""
    since: Step | None
    """Only what changed since that step travels: the rest was copied beside the steps."""
    markers: Mapping[RegionId, Step]
    """What the source's regions are at."""
    slot: ShardId | None = None
    """The target's before the step, where it had some of the shard already."""


@dataclass(frozen=True, slots=True)
class StepSpec:
    """One attempt of one step, the same for every task of it."""

    job: str
    epoch: Epoch
    step: Step
    attempt: Attempt
    layout: Layout
    incarnations: tuple[int, ...]
    """Of each shard."""
    markers: Mapping[RegionId, Mapping[ShardId, Step]]
    """The last committed step that touched a shard; what a task must find there."""
    work: tuple[tuple[Assigned, ...], ...]
    """Of each worker, the slices it reads."""
    state_root: str
    """Where hosts keep their shards, unless the machine says otherwise (STATE_DIR_VARIABLE)."""
    outputs_root: str
    keep_undo_from: Step
    replay: bool = False
    """Whether the step was committed before: outputs are hashed and not written, and inputs must be as they were."""
    lost: tuple[Lost, ...] = ()
    """Of a replay, what the commit record says was lost."""
    isolate: bool = False
    """Whether to note each record before a user's function gets it, to find the one on which processes die."""
    cuts: Mapping[ShardId, Cut] = field(default_factory=dict)
    """Of shards under way; the layout, the incarnations and these are as after the step."""
    generation: int = 0
    moving: tuple[Moving, ...] = ()
    """What changes its copy in this step."""
    marks_since: Step | None = None
    """Keys that move keep the mark that they changed since this step; None: nobody asks."""
    weigh: bool = False
    """Whether to tell how large shards are."""
    write_back: tuple[ShardId, ...] = ()
    """Shards to be written to disk, since it is their turn."""

    @property
    def workers(self) -> int:
        return len(self.layout.workers)

    @property
    def placement(self) -> Placement:
        return Placement(self.layout, self.incarnations, self.cuts, generation=self.generation)


@dataclass(slots=True)
class Report:
    """What one worker did in one stage.  Travels with the blobs of later stages to the driver."""

    worker: WorkerId
    stage: int
    host: HostId
    process: int
    input_rows: dict[str, int] = field(default_factory=dict)
    reads: list[dict[str, Any]] = field(default_factory=list)
    """For each piece of input: `input`, `partition`, `ordinal`, and `rows` and content `hash` of what the source gave."""
    lost: list[dict[str, Any]] = field(default_factory=list)
    """The pieces that became dead letters, as `Lost`."""
    outputs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """For each output, the staged files with their row counts and Z-set hashes; of a replay, `rows` and `hash` alone."""
    touched: dict[RegionId, list[ShardId]] = field(default_factory=dict)
    undo_bytes: int = 0
    """What the stage added to the undo rings."""
    dead_letters: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Where the time went, by part of the stage."""
    collected: dict[ShardId, int] = field(default_factory=dict)
    """Bytes of state that left, by shard."""
    sizes: dict[ShardId, int] = field(default_factory=dict)
    """Bytes of state by slot, where the step was to weigh."""

    def to_wire(self) -> list[Any]:
        return [getattr(self, name) for name in _FIELDS]

    @classmethod
    def from_wire(cls, values: list[Any]) -> Report:
        return cls(**dict(zip(_FIELDS, values, strict=True)))


_FIELDS = tuple(Report.__dataclass_fields__)
