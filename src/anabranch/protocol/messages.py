"""What the coordinator and a worker say to each other.

Every message carries the round it belongs to.  A round begins when the coordinator asks for versions and
ends with `Finished`, `Fail` or the next round, so that whatever arrives late from an earlier one, or from
a worker that died since, is told apart by one comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from anabranch.model.ids import Step, WorkerId
from anabranch.protocol.versions import Answer, Version

Round = NewType("Round", int)
"""How often the coordinator has asked for versions: 1, 2, …; a worker that was never asked is at 0."""

NO_ROUND = Round(0)


@dataclass(frozen=True, slots=True)
class GiveVersions:
    """`versions()`: what can you open?  Ends whatever the worker did in an earlier round."""

    round: Round


@dataclass(frozen=True, slots=True)
class Start:
    """`start(version)`."""

    round: Round
    version: Version


@dataclass(frozen=True, slots=True)
class PauseNow:
    """`pause()`: begin no further step, and say which one would be next."""

    round: Round


@dataclass(frozen=True, slots=True)
class StopAt:
    """`stop(step)`: run every step below `step`, commit, and stop."""

    round: Round
    step: Step


ToWorker = GiveVersions | Start | PauseNow | StopAt


@dataclass(frozen=True, slots=True)
class HasVersions:
    round: Round
    worker: WorkerId
    answer: Answer


@dataclass(frozen=True, slots=True)
class HasOpened:
    """The version is open; `step` is the next one to run."""

    round: Round
    worker: WorkerId
    step: Step


@dataclass(frozen=True, slots=True)
class HasPaused:
    """The worker begins no step from `step` on until it is told where to stop."""

    round: Round
    worker: WorkerId
    step: Step


@dataclass(frozen=True, slots=True)
class HasStopped:
    round: Round
    worker: WorkerId
    step: Step


@dataclass(frozen=True, slots=True)
class HasBroken:
    """The worker was told something that cannot be; a fatal error."""

    round: Round
    worker: WorkerId
    reason: str


ToCoordinator = HasVersions | HasOpened | HasPaused | HasStopped | HasBroken
