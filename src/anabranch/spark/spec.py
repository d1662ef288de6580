"""What a step's tasks are told, and what they answer.  Plain values, shipped with every stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anabranch.connect.source import Slice
from anabranch.model.ids import Attempt, Epoch, HostId, RegionId, ShardId, Step, WorkerId
from anabranch.model.layout import Layout

STATE_DIR_VARIABLE = "ANABRANCH_STATE_DIR"
"""Set on a Spark worker machine, it says where that machine keeps shards."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """A slice that one worker reads.  `ordinal` is its place among all slices of the step."""

    input: str
    ordinal: int
    piece: Slice


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

    @property
    def workers(self) -> int:
        return len(self.layout.workers)


@dataclass(slots=True)
class Report:
    """What one worker did in one stage.  Travels with the blobs of later stages to the driver."""

    worker: WorkerId
    stage: int
    host: HostId
    process: int
    input_rows: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """For each output, the staged files with their row counts and Z-set hashes."""
    touched: dict[RegionId, list[ShardId]] = field(default_factory=dict)
    dead_letters: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Where the time went, by part of the stage."""

    def to_wire(self) -> list[Any]:
        return [getattr(self, name) for name in _FIELDS]

    @classmethod
    def from_wire(cls, values: list[Any]) -> Report:
        return cls(**dict(zip(_FIELDS, values, strict=True)))


_FIELDS = tuple(Report.__dataclass_fields__)
