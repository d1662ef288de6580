"""The coordinator: one version for all workers, one step at which all of them stop.

Theory of operation
-------------------
A round goes through five phases; every worker must have answered before the next begins:

    ASKING     versions() of every worker; their intersection's maximum is the round's version
    STARTING   start(version) on every worker; all must open it at the same step
    RUNNING    steps go on until somebody wishes to stop: an orderly stop, a change of layout, a barrier
    PAUSING    pause() on every worker; the maximum of the answers is the stop step
    STOPPING   stop(step) on every worker; then `Finished(step)`

The maximum, because a step that one worker has begun cannot be taken back, while one that a worker has not
begun can still be run.  A lost worker, in any phase, ends the round: what was open may be gone, so versions
are asked again under the next round's number.  A wish to stop outlives rounds: only `Finished` or `Fail`
fulfils it.

Safety: **all workers of a round run from the same version, and those that stop in it stop at the same step.**

Invariants that `validate` asserts:

- CRD-1  only workers of the round are counted, each once;
- CRD-2  the version is known in, and only in, the phases after ASKING; the stop step after PAUSING;
- CRD-3  the stop step is at or beyond every step that a worker of the round answered the pause with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from anabranch.model.ids import Step, WorkerId
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
from anabranch.protocol.versions import Answer, Version, explain_nothing_common, newest_common


class Phase(Enum):
    IDLE = "idle"
    ASKING = "asking for versions"
    STARTING = "starting"
    RUNNING = "running"
    PAUSING = "pausing"
    STOPPING = "stopping"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Begin:
    """Start a round with these workers, whatever was going on."""

    workers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """These workers died.  Others, or the same with what their disks kept, answer under their ids."""

    workers: frozenset[WorkerId]


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Somebody wishes that all workers stop at one step."""


Event = ToCoordinator | Begin | Lost | StopAsked


@dataclass(frozen=True, slots=True)
class Send:
    worker: WorkerId
    message: ToWorker


@dataclass(frozen=True, slots=True)
class Finished:
    """All workers have stopped before `step`."""

    step: Step


@dataclass(frozen=True, slots=True)
class Fail:
    reason: str


Command = Send | Finished | Fail

_AFTER_ASKING = (Phase.STARTING, Phase.RUNNING, Phase.PAUSING, Phase.STOPPING, Phase.FINISHED)


@dataclass(slots=True)
class Coordinator:
    """The coordinator's machine.  Mappings are replaced, never changed, so that a shallow copy is a copy."""

    round: Round = NO_ROUND
    phase: Phase = Phase.IDLE
    workers: tuple[WorkerId, ...] = ()
    stop_wanted: bool = False
    version: Version | None = None
    stop_step: Step | None = None
    versions: Mapping[WorkerId, Answer] = field(default_factory=dict)
    opened: Mapping[WorkerId, Step] = field(default_factory=dict)
    paused: Mapping[WorkerId, Step] = field(default_factory=dict)
    stopped: Mapping[WorkerId, Step] = field(default_factory=dict)

    def handle(self, event: Event) -> list[Command]:
        match event:
            case Begin(workers):
                self.workers = workers
                return self._ask()
            case Lost(workers):
                over = self.phase in (Phase.IDLE, Phase.FINISHED, Phase.FAILED)
                return [] if over or workers.isdisjoint(self.workers) else self._ask()
            case StopAsked():
                if self.phase in (Phase.FINISHED, Phase.FAILED):
                    return []
                self.stop_wanted = True
                return self._pause() if self.phase is Phase.RUNNING else []
        if event.round != self.round or event.worker not in self.workers:
            return []
        match event:
            case HasVersions(_, worker, answer) if self.phase is Phase.ASKING:
                self.versions = {worker: answer, **self.versions}
                return self._start() if len(self.versions) == len(self.workers) else []
            case HasOpened(_, worker, step) if self.phase is Phase.STARTING:
                self.opened = {worker: step, **self.opened}
                return self._all_opened() if len(self.opened) == len(self.workers) else []
            case HasPaused(_, worker, step) if self.phase is Phase.PAUSING:
                self.paused = {worker: step, **self.paused}
                return self._stop() if len(self.paused) == len(self.workers) else []
            case HasStopped(_, worker, step) if self.phase is Phase.STOPPING:
                self.stopped = {worker: step, **self.stopped}
                return self._all_stopped() if len(self.stopped) == len(self.workers) else []
            case HasBroken(_, _, reason):
                return self._fail(reason)
        return []

    def validate(self) -> None:
        for counted in (self.versions, self.opened, self.paused, self.stopped):
            assert set(counted) <= set(self.workers), "CRD-1"
        if self.phase is not Phase.FAILED:
            assert (self.version is not None) == (self.phase in _AFTER_ASKING), "CRD-2"
            assert (self.stop_step is not None) == (self.phase in (Phase.STOPPING, Phase.FINISHED)), "CRD-2"
        if self.stop_step is not None:
            assert all(step <= self.stop_step for step in self.paused.values()), "CRD-3"

    def _ask(self) -> list[Command]:
        self.round = Round(self.round + 1)
        self.phase, self.version, self.stop_step = Phase.ASKING, None, None
        self.versions, self.opened, self.paused, self.stopped = {}, {}, {}, {}
        return self._send_all(GiveVersions(self.round))

    def _start(self) -> list[Command]:
        self.version = newest_common(self.versions)
        if self.version is None:
            return self._fail(explain_nothing_common(self.versions))
        self.phase = Phase.STARTING
        return self._send_all(Start(self.round, self.version))

    def _all_opened(self) -> list[Command]:
        if len(set(self.opened.values())) > 1:
            at = ", ".join(f"worker {worker} at step {step}" for worker, step in sorted(self.opened.items()))
            return self._fail(
                f"The workers opened {self.version} at different steps: {at}. Their state does not belong together; "
                "nothing was run. Remove the state directory of the workers that differ from the step log, then run again."
            )
        self.phase = Phase.RUNNING
        return self._pause() if self.stop_wanted else []

    def _pause(self) -> list[Command]:
        self.phase = Phase.PAUSING
        return self._send_all(PauseNow(self.round))

    def _stop(self) -> list[Command]:
        self.stop_step = self._choose_stop_step()
        self.phase = Phase.STOPPING
        return self._send_all(StopAt(self.round, self.stop_step))

    def _choose_stop_step(self) -> Step:
        return max(self.paused.values())

    def _all_stopped(self) -> list[Command]:
        assert self.stop_step is not None
        if set(self.stopped.values()) != {self.stop_step}:
            at = ", ".join(f"worker {worker} at step {step}" for worker, step in sorted(self.stopped.items()))
            return self._fail(
                f"The workers were told to stop at step {self.stop_step} and stopped elsewhere: {at}."
            )
        self.phase, self.stop_wanted = Phase.FINISHED, False
        return [Finished(self.stop_step)]

    def _fail(self, reason: str) -> list[Command]:
        if self.phase is Phase.FAILED:
            return []
        self.phase, self.stop_wanted = Phase.FAILED, False
        return [Fail(reason)]

    def _send_all(self, message: ToWorker) -> list[Command]:
        return [Send(worker, message) for worker in self.workers]
