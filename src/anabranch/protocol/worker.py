"""The worker: opens a version, runs steps, pauses and stops where it is told.

Theory of operation
-------------------
`start(version)` is a loop.  At its top the worker consults its state:

    Run        begin the next step
    Pause      become Paused(step) and wait
    Stop(x)    step < x: begin the next step;  step == x: commit and become Stopped;  step > x: fatal error

A step has three moments: it is *allowed* (`RunStep`), it has *begun* (`StepBegan`: its input is fixed, other
workers count on this one's part of it), and it is *done*.  A pause takes back a step that is allowed and
has not begun (`CancelStep`: a worker that waits for input must not keep everybody waiting).  A step that has begun is
finished, and its worker answers the pause at once with the step after it.  Answering only at the top of
the loop would deadlock: the step waits in the exchange for a worker that is already paused before it, that one
waits for the stop step, and the coordinator for the answer (`tests/sim` has the trace).

Safety: **in one round, no worker begins a step at or beyond the stop step, and all stop at it.**

Invariants that `validate` asserts:

- WRK-1  a step is begun only when it was allowed, and allowed only when the version is open;
- WRK-2  Paused(s) and Stopped have no step allowed, and s is the worker's step;
- WRK-3  in Stop(x), an allowed step is below x.
"""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.errors import EngineError
from anabranch.model.ids import Attempt, Step, WorkerId
from anabranch.protocol.messages import (
    NO_ROUND,
    GiveVersions,
    HasBroken,
    HasOpened,
    HasPaused,
    HasStopped,
    HasVersions,
    PauseNow,
    Round,
    Start,
    StopAt,
    ToCoordinator,
    ToWorker,
)
from anabranch.protocol.versions import Answer, Version


@dataclass(frozen=True, slots=True)
class Run:
    """Steps go on."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Asked to pause; the version is not open yet, or a step is being finished."""


@dataclass(frozen=True, slots=True)
class Paused:
    """Waits before `step` for the stop step."""

    step: Step


@dataclass(frozen=True, slots=True)
class Stop:
    """Runs up to `step`, commits there, and stops."""

    step: Step


@dataclass(frozen=True, slots=True)
class Stopped:
    """Outside of `start`: not started in this round, or stopped in it."""


State = Run | Pause | Paused | Stop | Stopped

_FIRST = Attempt(0)


# What happened outside.


@dataclass(frozen=True, slots=True)
class VersionsListed:
    round: Round
    answer: Answer


@dataclass(frozen=True, slots=True)
class StateOpened:
    round: Round
    step: Step


@dataclass(frozen=True, slots=True)
class StepBegan:
    round: Round
    step: Step


@dataclass(frozen=True, slots=True)
class StepDone:
    round: Round
    step: Step


@dataclass(frozen=True, slots=True)
class StepFailed:
    """Nothing of the step is visible; it may be run again."""

    round: Round
    step: Step
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Committed:
    round: Round
    step: Step


Event = ToWorker | VersionsListed | StateOpened | StepBegan | StepDone | StepFailed | Committed


# What to do outside.


@dataclass(frozen=True, slots=True)
class ListVersions:
    round: Round


@dataclass(frozen=True, slots=True)
class OpenState:
    round: Round
    version: Version


@dataclass(frozen=True, slots=True)
class RunStep:
    """The step may begin as soon as it has input; say `StepBegan` before anything of it is done."""

    round: Round
    step: Step
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class CancelStep:
    """`RunStep` no longer holds.  A step of an earlier round that has begun is left to its fence."""

    round: Round
    step: Step


@dataclass(frozen=True, slots=True)
class Commit:
    round: Round
    step: Step


@dataclass(frozen=True, slots=True)
class Report:
    message: ToCoordinator


Command = ListVersions | OpenState | RunStep | CancelStep | Commit | Report


@dataclass(slots=True)
class Worker:
    """One worker's machine.  All attributes are immutable values, so that a shallow copy is a copy."""

    id: WorkerId
    round: Round = NO_ROUND
    state: State = Stopped()
    version: Version | None = None
    """What `start` was told in this round; None until then."""
    step: Step | None = None
    """The next step to run, or the one under way; None until the version is open."""
    attempt: Attempt = _FIRST
    """How often `step` has failed in this round."""
    allowed: bool = False
    begun: bool = False
    answered: Step | None = None
    """What this round's pause was answered with; the same again when it is asked again."""

    def handle(self, event: Event) -> list[Command]:
        """Raises `EngineError` when the driver reports a step that this worker never allowed."""
        if isinstance(event, GiveVersions):
            return self._give_versions(event.round)
        if event.round != self.round:
            # Late, or meant for the process that was here before: the coordinator hears of its loss.
            return []
        match event:
            case VersionsListed(_, answer):
                return [Report(HasVersions(self.round, self.id, answer))]
            case Start(_, version):
                return self._start(version)
            case StateOpened(_, step):
                return self._opened(step)
            case PauseNow():
                return self._pause()
            case StopAt(_, step):
                return self._stop(step)
            case StepBegan(_, step):
                self._expect("began", step)
                self.begun = True
                return []
            case StepDone(_, step):
                return self._done(step)
            case StepFailed(_, step, attempt):
                return self._failed(step, attempt)
            case Committed(_, step):
                return self._committed(step)

    def validate(self) -> None:
        if self.begun:
            assert self.allowed, "WRK-1"
        if self.allowed:
            assert self.step is not None, "WRK-1"
        match self.state:
            case Paused(step):
                assert not self.allowed, "WRK-2"
                assert step == self.step, "WRK-2"
            case Stopped():
                assert not self.allowed, "WRK-2"
            case Stop(step):
                assert not self.allowed or (self.step is not None and self.step < step), "WRK-3"

    def _give_versions(self, number: Round) -> list[Command]:
        if number < self.round or (number == self.round and self.version is not None):
            return []
        cancelled = self._withdraw()
        self.round, self.state, self.version = number, Stopped(), None
        self.step, self.attempt, self.answered = None, _FIRST, None
        return [*cancelled, ListVersions(number)]

    def _start(self, version: Version) -> list[Command]:
        if self.version is not None:
            return []
        self.version, self.state = version, Run()
        return [OpenState(self.round, version)]

    def _opened(self, step: Step) -> list[Command]:
        if self.version is None or self.step is not None:
            return []
        self.step = step
        return [Report(HasOpened(self.round, self.id, step)), *self._top()]

    def _pause(self) -> list[Command]:
        if self.answered is not None:
            return [Report(HasPaused(self.round, self.id, self.answered))]
        if self.state != Run():
            return []
        self.state = Pause()
        if self.step is None:
            return []
        if self.begun:
            return self._answer_pause(Step(self.step + 1))
        return [*self._withdraw(), *self._top()]

    def _stop(self, step: Step) -> list[Command]:
        match self.state:
            case Stopped() if self.version is None:
                return []
            case Stopped():
                return self._stopped()
            case Stop(other):
                if other == step:
                    return []
                return self._broken(f"it was told to stop at step {step} after it was told step {other}")
        self.state = Stop(step)
        if self.step is None or self.begun or (self.allowed and self.step < step):
            return []
        return [*self._withdraw(), *self._top()]

    def _done(self, step: Step) -> list[Command]:
        if self._is_past(step):
            return []
        self._expect("is done", step)
        self.allowed = self.begun = False
        self.step, self.attempt = Step(step + 1), _FIRST
        return self._top()

    def _failed(self, step: Step, attempt: Attempt) -> list[Command]:
        if self._is_past(step) or attempt < self.attempt:
            return []
        self._expect("failed", step)
        self.allowed = self.begun = False
        self.attempt = Attempt(attempt + 1)
        return self._top()

    def _committed(self, step: Step) -> list[Command]:
        if self.state != Stop(step) or self.step != step:
            return []
        self.state = Stopped()
        return self._stopped()

    def _top(self) -> list[Command]:
        """The top of the loop: between two steps, the state says what comes next."""
        step = self.step
        assert step is not None
        match self.state:
            case Run():
                return self._allow()
            case Pause():
                self.state = Paused(step)
                return [] if self.answered is not None else self._answer_pause(step)
            case Stop(last) if step < last:
                return self._allow()
            case Stop(last) if step == last:
                return [Commit(self.round, step)]
            case Stop(last):
                return self._broken(
                    f"it was told to stop at step {last}, which it has run; its next is step {step}"
                )
        return []

    def _allow(self) -> list[Command]:
        assert self.step is not None
        self.allowed = True
        return [RunStep(self.round, self.step, self.attempt)]

    def _withdraw(self) -> list[Command]:
        if not self.allowed:
            return []
        assert self.step is not None
        self.allowed = self.begun = False
        return [CancelStep(self.round, self.step)]

    def _answer_pause(self, step: Step) -> list[Command]:
        self.answered = step
        return [Report(HasPaused(self.round, self.id, step))]

    def _stopped(self) -> list[Command]:
        assert self.step is not None
        return [Report(HasStopped(self.round, self.id, self.step))]

    def _broken(self, reason: str) -> list[Command]:
        return [Report(HasBroken(self.round, self.id, f"worker {self.id}: {reason}"))]

    def _is_past(self, step: Step) -> bool:
        return self.step is not None and step < self.step

    def _expect(self, what: str, step: Step) -> None:
        if not self.allowed or self.step != step:
            raise EngineError(
                f"worker {self.id}: step {step} {what}, but it was not allowed to run: in round {self.round} the worker "
                f"is in {self.state}, its next step is {self.step}"
            )
