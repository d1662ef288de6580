"""A coordinator, its workers, the network between them and the workers' disks, as a model to explore.

Each pair has a channel in each direction that keeps order; between channels anything may overtake anything.
What a machine asks of the outside (list versions, open, run a step, commit) is done some time later, or never:
a crash takes the machine, what it had under way and everything in its channels, and leaves the news of the
loss in them.  The process that comes back has what its disk has, or, when the disk is lost too, only the
checkpoints.

With `exchange`, a step is done in a worker only when every worker has begun it, as it is with a shuffle
inside; without, workers run ahead of each other as far as they like, and no disk counts as live.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from anabranch.model.ids import Step, WorkerId
from anabranch.protocol import coordinator as crd
from anabranch.protocol import worker as wrk
from anabranch.protocol.coordinator import Coordinator, Fail, Finished
from anabranch.protocol.messages import HasBroken, Round, StopAt
from anabranch.protocol.versions import LIVE, Answer, Version
from anabranch.protocol.worker import Worker
from anabranch.sim.explore import Action


@dataclass(frozen=True, slots=True)
class Case:
    """What may happen, and how often."""

    workers: int = 2
    steps: int = 2
    """Input ends after this many steps; a worker then waits for more."""
    crashes: int = 1
    disk_losses: int = 0
    """How many of the crashes may take the disk along."""
    failures: int = 0
    """How often a step may fail in one worker without a crash."""
    duplicates: int = 0
    """How often the network may deliver a message twice."""
    exchange: bool = True
    checkpoints: Mapping[Version, Step] = field(default_factory=lambda: {Version(0): Step(0)})
    broken: Mapping[WorkerId, frozenset[Version]] = field(default_factory=dict)
    """Checkpoints that a worker cannot open."""
    may_fail: bool = False
    """Whether `Fail` is an answer that this case allows."""


class State(NamedTuple):
    """Numbers stand for machines and queues that `Cluster` has interned: hashing stays cheap."""

    coordinator: int
    workers: tuple[int, ...]
    down: tuple[int, ...]
    up: tuple[int, ...]
    todo: tuple[int, ...]
    disks: tuple[int | None, ...]
    committed: int
    crashes: int
    disk_losses: int
    failures: int
    duplicates: int
    stop_asked: bool
    stop: tuple[Round, Step] | None
    """The stop step of the newest round that has one."""
    outcome: Finished | Fail | None
    wrong: str | None


_Machine = Worker | Coordinator
_Queue = tuple[Any, ...]


class Cluster:
    """The `Model` of one `Case`; other machine types may be put in, to see that broken ones are caught."""

    def __init__(
        self, case: Case, worker: type[Worker] = Worker, coordinator: type[Coordinator] = Coordinator
    ) -> None:
        self._case = case
        self._worker, self._coordinator = worker, coordinator
        self._numbers: dict[Any, int] = {}
        self._values: list[Any] = []
        # A worker has few states of its own: nearly every reaction has been seen before.
        self._reactions: dict[tuple[int, int, int, Any], tuple[int, int, int, str | None]] = {}

    def initial(self) -> State:
        workers = tuple(WorkerId(i) for i in range(self._case.workers))
        empty = self._intern(())
        none = (empty,) * len(workers)
        machines = tuple(self._intern_machine(self._worker(worker)) for worker in workers)
        idle = self._intern_machine(self._coordinator())
        case = self._case
        state = State(
            coordinator=idle,
            workers=machines,
            down=none,
            up=none,
            todo=none,
            disks=(0 if case.exchange else None,) * len(workers),
            committed=0,
            crashes=case.crashes,
            disk_losses=case.disk_losses,
            failures=case.failures,
            duplicates=case.duplicates,
            stop_asked=False,
            stop=None,
            outcome=None,
            wrong=None,
        )
        return self._to_coordinator(state, crd.Begin(workers))

    def settled(self, state: State) -> bool:
        return state.outcome is not None

    def violation(self, state: State) -> str | None:
        if state.wrong is not None:
            return state.wrong
        if isinstance(state.outcome, Fail) and not self._case.may_fail:
            return f"it failed: {state.outcome.reason}"
        return self._disagreement([self._values[number] for number in state.workers], state)

    def actions(self, state: State) -> Iterator[Action[State]]:
        if state.outcome is not None or state.wrong is not None:
            return
        if not state.stop_asked:
            after = self._to_coordinator(state._replace(stop_asked=True), crd.StopAsked())
            yield Action(("somebody asks to stop",), after)
        for i in range(self._case.workers):
            yield from self._deliveries(state, i)
            yield from self._work(state, i)
            if state.crashes:
                yield Action(("worker", i, "crashes"), self._crash(state, i, state.disks[i]), fault=True)
            if state.crashes and state.disk_losses and state.disks[i] is not None:
                after = self._crash(state, i, None)._replace(disk_losses=state.disk_losses - 1)
                yield Action(("worker", i, "crashes and its disk is lost"), after, fault=True)

    def _deliveries(self, state: State, i: int) -> Iterator[Action[State]]:
        down: _Queue = self._values[state.down[i]]
        if down:
            taken = self._to_worker(self._put(state, "down", i, down[1:]), i, down[0])
            yield Action(("worker", i, "gets", down[0]), taken)
            if state.duplicates:
                twice = self._to_worker(state._replace(duplicates=state.duplicates - 1), i, down[0])
                yield Action(("worker", i, "gets, not for the last time,", down[0]), twice, fault=True)
        up: _Queue = self._values[state.up[i]]
        if up:
            taken = self._to_coordinator(self._put(state, "up", i, up[1:]), up[0])
            yield Action(("coordinator gets", up[0]), taken)
            if state.duplicates:
                twice = self._to_coordinator(state._replace(duplicates=state.duplicates - 1), up[0])
                yield Action(("coordinator gets, not for the last time,", up[0]), twice, fault=True)

    def _work(self, state: State, i: int) -> Iterator[Action[State]]:
        """What worker i's process does next, in the order in which its machine asked for it."""
        todo: _Queue = self._values[state.todo[i]]
        if not todo:
            return
        rest = self._put(state, "todo", i, todo[1:])
        machine: Worker = self._values[state.workers[i]]
        match todo[0]:
            case wrk.ListVersions(number):
                answer = self._versions(state, i)
                yield Action(
                    ("worker", i, "looks at its disk"),
                    self._to_worker(rest, i, wrk.VersionsListed(number, answer)),
                )
            case wrk.OpenState(number, version):
                if version not in self._versions(state, i).versions:
                    yield Action(
                        ("worker", i, "opens", version),
                        state._replace(wrong=f"worker {i} was told to open {version}, which it cannot"),
                    )
                    return
                step = Step(state.committed) if version == LIVE else self._case.checkpoints[version]
                rest = rest._replace(disks=_with(rest.disks, i, step if self._case.exchange else None))
                yield Action(
                    ("worker", i, "opens", version), self._to_worker(rest, i, wrk.StateOpened(number, step))
                )
            case wrk.RunStep(number, step, attempt) if not machine.begun:
                if step < self._case.steps:
                    yield Action(
                        ("worker", i, "begins step", step),
                        self._to_worker(state, i, wrk.StepBegan(number, step)),
                    )
            case wrk.RunStep(number, step, attempt):
                if self._exchanged(state, i, step):
                    after = self._to_worker(rest, i, wrk.StepDone(number, step))
                    yield Action(("worker", i, "finishes step", step), self._progress(after, i, step))
                if state.failures:
                    failed = rest._replace(failures=state.failures - 1)
                    after = self._to_worker(failed, i, wrk.StepFailed(number, step, attempt))
                    yield Action(("step", step, "fails in worker", i), after, fault=True)
            case wrk.Commit(number, step):
                yield Action(("worker", i, "commits"), self._to_worker(rest, i, wrk.Committed(number, step)))

    def _crash(self, state: State, i: int, disk: int | None) -> State:
        empty = self._intern(())
        return state._replace(
            workers=_with(state.workers, i, self._intern_machine(self._worker(WorkerId(i)))),
            down=_with(state.down, i, empty),
            todo=_with(state.todo, i, empty),
            up=_with(state.up, i, self._intern((crd.Lost(frozenset({WorkerId(i)})),))),
            disks=_with(state.disks, i, disk),
            crashes=state.crashes - 1,
        )

    def _versions(self, state: State, i: int) -> Answer:
        usable = set(self._case.checkpoints) - self._case.broken.get(WorkerId(i), frozenset())
        disk = state.disks[i]
        # One step ahead of the commit record is rolled back by one undo record.
        if disk is not None and disk in (state.committed, state.committed + 1):
            usable.add(LIVE)
        return Answer.of(usable)

    def _exchanged(self, state: State, i: int, step: Step) -> bool:
        if not self._case.exchange:
            return True
        machines: list[Worker] = [self._values[number] for number in state.workers]
        return all(
            m.round == machines[i].round
            and m.step is not None
            and (m.step > step or (m.step == step and m.begun))
            for m in machines
        )

    def _progress(self, state: State, i: int, step: Step) -> State:
        machines: list[Worker] = [self._values[number] for number in state.workers]
        if self._case.exchange:
            state = state._replace(disks=_with(state.disks, i, step + 1))
        if all(m.round == machines[i].round and m.step is not None and m.step > step for m in machines):
            state = state._replace(committed=max(state.committed, step + 1))
        return state

    def _to_worker(self, state: State, i: int, event: Any) -> State:
        key = (state.workers[i], state.todo[i], state.up[i], event)
        known = self._reactions.get(key)
        if known is None:
            known = self._reactions[key] = self._react(*key)
        machine, todo, up, wrong = known
        return state._replace(
            workers=_with(state.workers, i, machine),
            todo=_with(state.todo, i, todo),
            up=_with(state.up, i, up),
            wrong=state.wrong if wrong is None else wrong,
        )

    def _react(
        self, machine: int, todo_number: int, up_number: int, event: Any
    ) -> tuple[int, int, int, str | None]:
        machine, commands = self._handle(machine, event)
        todo: _Queue = self._values[todo_number]
        up: _Queue = self._values[up_number]
        wrong = None
        for command in commands:
            match command:
                case wrk.Report(message):
                    up = (*up, message)
                    if isinstance(message, HasBroken):
                        wrong = message.reason
                case wrk.CancelStep():
                    todo = tuple(work for work in todo if not isinstance(work, wrk.RunStep))
                case str(problem):
                    wrong = problem
                case _:
                    todo = (*todo, command)
        return machine, self._intern(todo), self._intern(up), wrong

    def _to_coordinator(self, state: State, event: Any) -> State:
        number, commands = self._handle(state.coordinator, event)
        state = state._replace(coordinator=number)
        for command in commands:
            match command:
                case crd.Send(worker, message):
                    state = self._put(state, "down", worker, (*self._values[state.down[worker]], message))
                    if isinstance(message, StopAt):
                        state = state._replace(stop=(message.round, message.step))
                case str(problem):
                    state = state._replace(wrong=problem)
                case _:
                    state = state._replace(outcome=command)
        return state

    def _disagreement(self, machines: list[Worker], state: State) -> str | None:
        """The safety sentences of both machines, as far as they speak of more than one machine."""
        newest: Coordinator = self._values[state.coordinator]
        finish = state.outcome.step if isinstance(state.outcome, Finished) else None
        for i, one in enumerate(machines):
            if state.stop is not None and one.round == state.stop[0] and one.step is not None:
                last = state.stop[1]
                if one.step > last or (one.step == last and one.begun):
                    return f"worker {i} is beyond the stop step {last}: {one}"
            for j, other in enumerate(machines[:i]):
                if one.round != other.round or one.version is None or other.version is None:
                    continue
                if one.version != other.version:
                    return f"workers {j} and {i} run from {other.version} and {one.version} in one round"
                if one.state == other.state == wrk.Stopped() and one.step != other.step:
                    return f"workers {j} and {i} stopped at steps {other.step} and {one.step} in one round"
            ended = isinstance(one.state, wrk.Stopped) and one.step == finish
            if finish is not None and one.round == newest.round and not ended:
                return f"finished before step {finish}, but worker {i} is not: {one}"
        return None

    def _handle(self, number: int, event: Any) -> tuple[int, tuple[Any, ...]]:
        machine = copy.copy(self._values[number])
        commands: tuple[Any, ...] = tuple(machine.handle(event))
        try:
            machine.validate()
        except AssertionError as broken:
            commands = (*commands, f"{broken}: {machine}")
        return self._intern_machine(machine), commands

    def _intern(self, value: Any) -> int:
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self._values)
            self._values.append(value)
        return number

    def _intern_machine(self, machine: _Machine) -> int:
        key = (type(machine), *(_frozen(getattr(machine, f.name)) for f in fields(machine)))
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._values)
            self._values.append(machine)
        return number

    def _put(self, state: State, name: str, i: int, queue: _Queue) -> State:
        changed: dict[str, Any] = {name: _with(getattr(state, name), i, self._intern(queue))}
        return state._replace(**changed)


def _with(values: tuple[Any, ...], i: int, value: Any) -> tuple[Any, ...]:
    return (*values[:i], value, *values[i + 1 :])


def _frozen(value: Any) -> Any:
    return tuple(sorted(value.items(), key=lambda item: item[0])) if isinstance(value, Mapping) else value
