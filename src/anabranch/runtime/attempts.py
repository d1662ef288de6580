"""Run a step until an attempt succeeds, or it is clear that another attempt would not help."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anabranch import crash
from anabranch.errors import (
    AnabranchError,
    CorruptError,
    EngineError,
    Fenced,
    IncompleteInput,
    ShardMismatch,
    SparkLost,
    UserError,
    WrongHost,
)
from anabranch.model.ids import Attempt, ShardId, Step
from anabranch.model.layout import Layout
from anabranch.protocol.faults import Failed, Faults, GiveUp, Isolate, Kind, Progressed, Recover, RetryStep
from anabranch.protocol.faults import Settings as FaultSettings
from anabranch.runtime.hosts import RollCall, wait_for_hosts
from anabranch.runtime.settings import Settings
from anabranch.runtime.standing import Moves, Standing
from anabranch.spark.crumbs import clear_crumbs
from anabranch.spark.failure import worker_died
from anabranch.spark.job import StepRunner
from anabranch.spark.spec import Assigned, Lost, Report

REPLAYED = crash.declare("replay.step", "when a committed step was run again")

OnFault = Callable[[int, int, AnabranchError], None]
"""Told of (step, attempt, error)."""


class MustRecover(Exception):
    """State was lost, or attempts do not help: go back to a version, in a new epoch."""


class Attempts:
    """Runs steps of one run, and obeys the machine that knows what to do about faults."""

    def __init__(self, runner: StepRunner, roll: RollCall, settings: Settings, on_fault: OnFault) -> None:
        self.runner = runner
        self.roll = roll
        self.settings = settings
        self.on_fault = on_fault
        self.repeated = False
        """Whether the last step took more than one attempt."""
        self.faults = Faults(FaultSettings(retries=settings.max_attempts - 1))

    def run(
        self,
        standing: Standing,
        work: Sequence[Sequence[Assigned]],
        replayed: Mapping[str, Any] | None = None,
        moves: Moves | None = None,
        *,
        weigh: bool = False,
        write_back: tuple[ShardId, ...] = (),
    ) -> list[Report]:
        """The reports of the attempt that succeeded.

        `replayed` is the commit record of a step that was committed before; `moves` is the same for every attempt, since it
        stands in the step's plan record.

        Raises:
            MustRecover: see there.
            UserError: what the user can mend; running it again would end the same way.
            EngineError: all that can be done was done.
        """
        step = standing.progress.next_step
        lost = [] if replayed is None else [Lost.from_json(one) for one in replayed["lost"]]
        replay = replayed is not None
        attempt, isolate = Attempt(0), False
        self.repeated = False
        while True:
            try:
                spec = standing.spec(
                    attempt, work, moves=moves, replay=replay, lost=lost, isolate=isolate, weigh=weigh,
                    write_back=write_back,
                )  # fmt: skip
                reports = self.runner.run(spec)
                if isolate:
                    self.runner.on_workers(spec, clear_crumbs)
                if replay:
                    crash.point(REPLAYED)
                return reports
            except AnabranchError as error:
                self.on_fault(step, attempt, error)
                self.repeated = True
                attempt, isolate = self._after(error, standing, moves, isolate)

    def progressed(self, step: Step) -> None:
        """A step was committed that never was before."""
        self.faults.handle(Progressed(step))

    def failed(self, error: AnabranchError, step: Step) -> None:
        """Something outside of a step's own job failed: wait as long as is due, then the caller recovers; or give up."""
        for command in self._ask(error, step):
            match command:
                case GiveUp(reason):
                    raise _final(error, reason) from error
                case RetryStep(_, pause) | Isolate(_, pause) | Recover(pause):
                    time.sleep(pause)

    def _after(
        self, error: AnabranchError, standing: Standing, moves: Moves | None, isolate: bool
    ) -> tuple[Attempt, bool]:
        layout = standing.layout if moves is None else moves.placement.layout
        for command in self._ask(error, standing.progress.next_step):
            match command:
                case RetryStep(attempt, pause):
                    self._pause(pause, layout)
                    return attempt, isolate
                case Isolate(attempt, pause):
                    self._pause(pause, layout)
                    return attempt, True
                case Recover(pause):
                    time.sleep(pause)
                    raise MustRecover from error
                case GiveUp(reason):
                    raise _final(error, reason) from error
        raise AssertionError("the machine always answers a failure")

    def _ask(self, error: AnabranchError, step: Step) -> list[RetryStep | Isolate | Recover | GiveUp]:
        commands = self.faults.handle(Failed(step, kind_of(error), time.monotonic(), str(error)))
        self.faults.validate()
        return commands

    def _pause(self, seconds: float, layout: Layout) -> None:
        time.sleep(seconds)
        if not wait_for_hosts(self.roll, self.settings, layout):
            raise MustRecover
        self.runner.forget_handles()


def kind_of(error: AnabranchError) -> Kind:
    """What a fault was, as far as it matters for what to do."""
    match error:
        case UserError():
            return Kind.USER_ERROR
        case Fenced():
            return Kind.FENCED
        case SparkLost():
            return Kind.SPARK_LOST
        case IncompleteInput():
            return Kind.INCOMPLETE_INPUT
        case ShardMismatch() | WrongHost():
            return Kind.STATE_LOST
        case CorruptError():
            return Kind.CORRUPT
    return Kind.DIED if worker_died(error) else Kind.FAILED


def _final(error: AnabranchError, reason: str) -> AnabranchError:
    return error if isinstance(error, UserError | Fenced | SparkLost) else EngineError(reason)
