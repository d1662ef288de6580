"""The coordinator's and its workers' machines as one, for a runtime with a single thread.

Where all workers' steps are one Spark job and their machines live in the driver, messages need no network:
the fleet delivers them in order, at once, and hands out only what must really be done, for all workers
together.  Each method says what happened and returns what to do next, in order:

    begin, lost            → AskVersions      look what every worker could open; `answered_versions` for each
    answered_versions      → OpenAll | Fail   after the last worker's answer; `opened` for each
    opened, step_done      → RunStep          `step_began` before its first effect, `step_done` after its commit record
    step_failed            → RunStep          the same step under the next attempt
    ask_stop, step_done    → Finished         all stopped before that step; `begin` starts the next round

`ask_stop` while no step has begun finishes at once and the last `RunStep` no longer holds; during a step it
returns nothing, and `step_done` returns `Finished`.  `begin` and `lost` are allowed at any time and start a
new round, in which `lost` has the same workers and `begin` those that it is given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from anabranch.errors import EngineError
from anabranch.model.ids import Attempt, Step, WorkerId
from anabranch.protocol import coordinator as crd
from anabranch.protocol import worker as wrk
from anabranch.protocol.coordinator import Coordinator, Fail, Finished, Phase
from anabranch.protocol.messages import Round, ToCoordinator, ToWorker
from anabranch.protocol.versions import Answer, Version
from anabranch.protocol.worker import Worker


@dataclass(frozen=True, slots=True)
class AskVersions:
    workers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class OpenAll:
    version: Version


@dataclass(frozen=True, slots=True)
class RunStep:
    step: Step
    attempt: Attempt


Command = AskVersions | OpenAll | RunStep | Finished | Fail


class Fleet:
    """One `Coordinator` and one `Worker` machine for each worker.

    >>> fleet = Fleet()
    >>> fleet.begin([WorkerId(0)])
    [AskVersions(workers=(0,))]
    >>> fleet.answered_versions(WorkerId(0), [Version(2), Version(1)])
    [OpenAll(version=Version(number=2))]
    >>> fleet.opened(WorkerId(0), Step(40))
    [RunStep(step=40, attempt=0)]
    >>> fleet.step_done(Step(40))
    [RunStep(step=41, attempt=0)]
    >>> fleet.ask_stop()
    [Finished(step=41)]
    """

    def __init__(self) -> None:
        self._coordinator = Coordinator()
        self._workers: dict[WorkerId, Worker] = {}
        self._mail: deque[crd.Send | ToCoordinator] = deque()
        # What each worker wants done outside and waits for; handed out when all want the same.
        self._wants: dict[WorkerId, AskVersions | OpenAll | RunStep] = {}

    @property
    def phase(self) -> Phase:
        return self._coordinator.phase

    @property
    def round(self) -> Round:
        return self._coordinator.round

    @property
    def version(self) -> Version | None:
        """What the round runs from; None before it is chosen."""
        return self._coordinator.version

    @property
    def workers(self) -> list[WorkerId]:
        """The round's."""
        return list(self._workers)

    @property
    def stop_wanted(self) -> bool:
        return self._coordinator.stop_wanted

    def begin(self, workers: Sequence[WorkerId]) -> list[Command]:
        """Starts a round with exactly these workers."""
        if not workers or len(set(workers)) != len(workers):
            raise EngineError(f"a round needs workers, each once; it was given {list(workers)}")
        self._workers = {worker: self._workers.get(worker, Worker(worker)) for worker in workers}
        return self._tell_coordinator(crd.Begin(tuple(workers)))

    def answered_versions(
        self, worker: WorkerId, versions: Iterable[Version], obstacles: Mapping[Version, str] | None = None
    ) -> list[Command]:
        """`obstacles`: for a version that this worker cannot open, the piece that is in the way."""
        answer = Answer.of(versions, obstacles)
        return self._tell(worker, wrk.VersionsListed(self.round, answer))

    def opened(self, worker: WorkerId, step: Step) -> list[Command]:
        return self._tell(worker, wrk.StateOpened(self.round, step))

    def step_began(self, step: Step) -> list[Command]:
        """From here on a stop waits for the step.  Without this, `ask_stop` takes it back."""
        return self._tell_all(wrk.StepBegan(self.round, step))

    def step_done(self, step: Step) -> list[Command]:
        return self._tell_all(wrk.StepDone(self.round, step))

    def step_failed(self, step: Step, attempt: Attempt) -> list[Command]:
        """Nothing of the step is visible, all state is there: it runs again, unless a stop came in between."""
        return self._tell_all(wrk.StepFailed(self.round, step, attempt))

    def lost(self, workers: Iterable[WorkerId]) -> list[Command]:
        """These workers' processes or state are gone; who takes their place is asked for versions with the rest."""
        gone = frozenset(workers) & frozenset(self._workers)
        for worker in gone:
            self._workers[worker] = Worker(worker)
        return self._tell_coordinator(crd.Lost(gone))

    def ask_stop(self) -> list[Command]:
        return self._tell_coordinator(crd.StopAsked())

    def _tell(self, worker: WorkerId, event: wrk.Event) -> list[Command]:
        if worker not in self._workers:
            raise EngineError(f"worker {worker} is not one of the round's: {sorted(self._workers)}")
        self._obey_worker(worker, self._workers[worker].handle(event))
        return self._settle([])

    def _tell_all(self, event: wrk.Event) -> list[Command]:
        for worker, machine in self._workers.items():
            self._obey_worker(worker, machine.handle(event))
        return self._settle([])

    def _tell_coordinator(self, event: crd.Event) -> list[Command]:
        return self._settle(self._obey_coordinator(event))

    def _settle(self, outside: list[Command]) -> list[Command]:
        """Delivers until no message is left, then adds what all workers wait for."""
        while self._mail:
            letter = self._mail.popleft()
            if isinstance(letter, crd.Send):
                message: ToWorker = letter.message
                self._obey_worker(letter.worker, self._workers[letter.worker].handle(message))
            else:
                outside += self._obey_coordinator(letter)
        wants = [self._wants.get(worker) for worker in self._workers]
        if wants and wants[0] is not None and all(want == wants[0] for want in wants):
            outside.append(wants[0])
            self._wants = {}
        return outside

    def _obey_coordinator(self, event: crd.Event) -> list[Command]:
        outside: list[Command] = []
        for command in self._coordinator.handle(event):
            if isinstance(command, crd.Send):
                self._mail.append(command)
            else:
                outside.append(command)
        self._coordinator.validate()
        return outside

    def _obey_worker(self, worker: WorkerId, commands: list[wrk.Command]) -> None:
        for command in commands:
            match command:
                case wrk.ListVersions():
                    self._wants[worker] = AskVersions(tuple(self._workers))
                case wrk.OpenState(_, version):
                    self._wants[worker] = OpenAll(version)
                case wrk.RunStep(_, step, attempt):
                    self._wants[worker] = RunStep(step, attempt)
                case wrk.CancelStep():
                    self._wants.pop(worker, None)
                case wrk.Commit(number, step):
                    # A step's own commit record has made it durable before `step_done`.
                    self._obey_worker(worker, self._workers[worker].handle(wrk.Committed(number, step)))
                case wrk.Report(message):
                    self._mail.append(message)
        self._workers[worker].validate()
