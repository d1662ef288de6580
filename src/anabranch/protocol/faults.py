"""What to do about a fault inside a run: again, back to a version, record by record, or no further.

The rule
--------
- **A task failed, its process died, or its input was incomplete** (a process was killed, a shuffle file was lost):
  nothing of the step is visible and the state is there.  Run it again after a pause that doubles each time.
- **A process died again in the same step**: perhaps one record kills it.  From `Isolate` on the step is run naming
  records one by one, at once and up to `isolated_retries` times: a record must kill twice to be blamed, and a step may
  have several.  When that does not help, give up.
- **`retries` failures of a step in one epoch**, or state that is **lost** (a shard that is not the expected one, a wrong
  or lost host) or **corrupt**: `Recover` from the newest version that all can open, under a new epoch.
  Attempts count from 0 again, as the fence does.
- **The user's error, full storage included, fenced** (another coordinator has taken over), **or Spark itself is gone**:
  give up at once.  Again would end the same way.
- **`recoveries` without progress**: give up, and say what was seen.

Progress is a committed step at or beyond the furthest one that failed.  Replay after a recovery is none:
otherwise a step that always fails would be recovered for ever.

Safety: **between two moments of progress there are at most `recoveries` + 1 epochs, and in each of them a step is
run again at most `retries` times, or `isolated_retries` in isolation, so that a fault that stays ends in `GiveUp`.**

Invariants that `validate` asserts:

- FLT-1  no step has failed more often in this epoch than its limit says;
- FLT-2  there were at most `recoveries` since the last progress.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from anabranch.model.ids import Attempt, Step
from anabranch.protocol.pauses import Pauses


class Kind(Enum):
    """What a fault was, as far as it matters for what to do."""

    FAILED = "a task failed"
    DIED = "the process of a task died"
    INCOMPLETE_INPUT = "a stage did not get all that was sent to it"
    STATE_LOST = "a shard was not where or what it should be"
    HOST_LOST = "a host was lost"
    CORRUPT = "stored bytes were damaged"
    USER_ERROR = "an error that the user can mend"
    FENCED = "a newer coordinator has taken over"
    SPARK_LOST = "Spark is gone"


_AGAIN = (Kind.FAILED, Kind.DIED, Kind.INCOMPLETE_INPUT)
_NEVER = (Kind.USER_ERROR, Kind.FENCED, Kind.SPARK_LOST)
_PAUSES = Pauses(first=0.2, longest=10.0)


@dataclass(frozen=True, slots=True)
class Settings:
    retries: int = 4
    """How often a step may fail in one epoch and be run again."""
    recoveries: int = 3
    """How often without progress."""
    deaths_before_isolation: int = 2
    isolated_retries: int = 50
    """How often a step may fail in one epoch once it runs in isolation."""
    pauses: Pauses = _PAUSES


@dataclass(frozen=True, slots=True)
class Failed:
    step: Step
    kind: Kind
    now: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Progressed:
    """The step is committed."""

    step: Step


Event = Failed | Progressed


@dataclass(frozen=True, slots=True)
class RetryStep:
    """Run the same step again; all state is there.  `attempt` goes into the fence."""

    attempt: Attempt
    pause_seconds: float


@dataclass(frozen=True, slots=True)
class Isolate:
    """Run the same step again, naming records one by one."""

    attempt: Attempt
    pause_seconds: float


@dataclass(frozen=True, slots=True)
class Recover:
    """Ask all workers what they can open, under a new epoch."""

    pause_seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    reason: str


Command = RetryStep | Isolate | Recover | GiveUp


class Faults:
    """The machine.

    >>> faults = Faults()
    >>> faults.handle(Failed(Step(7), Kind.DIED, now=0.0))
    [RetryStep(attempt=1, pause_seconds=0.2)]
    >>> faults.handle(Failed(Step(7), Kind.DIED, now=1.0))
    [Isolate(attempt=2, pause_seconds=0.4)]
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or Settings()
        self._forget()

    def handle(self, event: Event) -> list[Command]:
        match event:
            case Progressed(step):
                if step >= self._furthest:
                    self._forget()
                return []
            case Failed():
                return [self._decide(event)]

    def validate(self) -> None:
        assert all(count <= self._limit(step) for step, count in self._attempts.items()), "FLT-1"
        assert self._recovered <= self._settings.recoveries, "FLT-2"

    def _forget(self) -> None:
        self._furthest = Step(-1)  # of the steps that failed since the last progress
        self._first: float | None = None  # when the first of them failed
        self._seen: Counter[Kind] = Counter()
        self._attempts: Counter[Step] = Counter()  # failures in this epoch
        self._deaths: Counter[Step] = Counter()  # over all epochs: a new one does not mend a record
        self._isolated: set[Step] = set()
        self._recovered = 0

    def _decide(self, fault: Failed) -> Command:
        rules, step = self._settings, fault.step
        self._first = fault.now if self._first is None else self._first
        self._furthest = max(self._furthest, step)
        self._seen[fault.kind] += 1
        self._deaths[step] += fault.kind is Kind.DIED
        if fault.kind in _NEVER:
            return self._give_up(fault)
        if fault.kind in _AGAIN and self._attempts[step] < self._limit(step):
            return self._again(fault)
        # A new epoch does not mend a record either.
        died_out = fault.kind is Kind.DIED and step in self._isolated
        if died_out or self._recovered == rules.recoveries:
            return self._give_up(fault)
        pause = rules.pauses.after(self._recovered)
        self._recovered += 1
        self._attempts.clear()
        return Recover(pause)

    def _limit(self, step: Step) -> int:
        rules = self._settings
        return rules.isolated_retries if step in self._isolated else rules.retries

    def _again(self, fault: Failed) -> Command:
        rules, step = self._settings, fault.step
        # In isolation it is the record that is waited for, and time does not mend it.
        pause = rules.pauses.after(0 if step in self._isolated else self._attempts[step])
        self._attempts[step] += 1
        attempt = Attempt(self._attempts[step])
        if self._deaths[step] >= rules.deaths_before_isolation and step not in self._isolated:
            self._isolated.add(step)
            return Isolate(attempt, pause)
        return RetryStep(attempt, pause)

    def _give_up(self, fault: Failed) -> GiveUp:
        reason = f"step {fault.step}: {fault.reason or fault.kind.value}"
        if fault.kind in _NEVER:
            return GiveUp(reason)
        seen = ", ".join(f"{count} × {kind.value}" for kind, count in self._seen.items())
        lasted = fault.now - (fault.now if self._first is None else self._first)
        return GiveUp(
            f"{reason}. No progress for {lasted:.0f} s in spite of {self._recovered} recoveries; seen since then: "
            f"{seen}. When the cause is mended, run again: nothing that was committed is lost."
        )
