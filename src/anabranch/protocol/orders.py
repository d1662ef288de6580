"""What the machine of a migration is told, what it orders and what it shows: settings, events, commands, phases.

Theory of operation and invariants are in `protocol.migration`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum

from anabranch.model.ids import ShardId, Step
from anabranch.protocol.budget import START
from anabranch.protocol.pieces import Piece


class Strategy(StrEnum):
    SUDDEN = "sudden"
    BATCHED = "batched"
    FLUID = "fluid"
    HOT = "hot"


@dataclass(frozen=True, slots=True)
class Settings:
    strategy: Strategy
    budget: int | None = None
    """Bytes a step for `fluid` and for the switch of `hot`; None adapts."""
    batch: int | None = None
    """Shards a step for `batched`, shards that `hot` copies at a time; None is an eighth of the moves, at least one, and
    for `hot` the most: it begins with one (see `copies`)."""
    most_per_step: int = 512 << 20
    """A step of `sudden` or `batched` that would move more becomes several: all of it is in memory at once."""
    switch_below: int = 4 << 20
    """`hot` switches after a round that copied at most so many bytes."""
    most_rounds: int = 4
    at_once: bool = False
    """`hot` switches all shards in one step, whatever that takes: shards that split or merge cannot do so one by one."""
    target_seconds: float = 0.2
    first_budget: int = START


# Events


@dataclass(frozen=True, slots=True)
class Prepared:
    """All workers are ready, hosts have no copies that the placement does not name, shards were weighed."""

    sizes: Mapping[ShardId, int]


@dataclass(frozen=True, slots=True)
class StepAsked:
    """The step is about to run; its pieces, please.  Answered by exactly one `MoveInStep`."""

    step: Step
    held: Collection[ShardId] = ()
    """Shards of which nothing may come back in this step, as a checkpoint reads them.  All shards will do."""


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """Also welcome of steps that were not asked for: they tell how long a step usually lasts."""

    step: Step
    seconds: float
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class Weighed:
    """What shards have now, in bytes; between two steps, since state grows while it moves."""

    sizes: Mapping[ShardId, int]


@dataclass(frozen=True, slots=True)
class StepAborted:
    """Nothing of the step happened.  It is asked for again before its next attempt, and gets the same pieces."""

    step: Step


@dataclass(frozen=True, slots=True)
class CopyDone:
    """The background copy that was started last holds all steps below `as_of`."""

    as_of: Step
    size: int


@dataclass(frozen=True, slots=True)
class CopyFailed:
    reason: str


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """Back to where everything was."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """What `DropSources` or `DropCopies` named is gone."""

    shards: Collection[ShardId]


Event = (
    Prepared
    | StepAsked
    | StepCommitted
    | Weighed
    | StepAborted
    | CopyDone
    | CopyFailed
    | CancelAsked
    | Dropped
)


# Commands


@dataclass(frozen=True, slots=True)
class MoveInStep:
    step: Step
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class StartCopy:
    """Copy these shards in the background as of the next step: all of it, or what steps from `since` on changed.

    With `since` None, what an earlier try left at the targets is replaced.
    """

    shards: tuple[ShardId, ...]
    since: Step | None


@dataclass(frozen=True, slots=True)
class DropSources:
    """The copies that the committed last pieces of these shards came from are garbage.  Answered by `Dropped`."""

    shards: tuple[ShardId, ...]


@dataclass(frozen=True, slots=True)
class DropCopies:
    """The arriving copies of these shards, if there are any, are garbage: half made, or all of it came back.

    A background copy that is still being made stops first.  Answered by `Dropped`.
    """

    shards: tuple[ShardId, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """All is whole at its target, or, cancelled, at the source; nothing is left behind."""

    cancelled: bool


Command = MoveInStep | StartCopy | DropSources | DropCopies | Finish


# What others may see


class Phase(Enum):
    PREPARING = "preparing"
    COPYING = "copying"
    MOVING = "moving"
    DROPPING = "dropping"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it is, for people.  `bytes_left` is an estimate; `bytes_moved` counts background copies too."""

    shards: int
    shards_moved: int
    bytes_left: int
    bytes_moved: int
