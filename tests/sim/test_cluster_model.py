"""Coordinator and workers through all interleavings of small cases, and broken ones that must be caught."""

from __future__ import annotations

import pytest

from anabranch.model.ids import Step, WorkerId
from anabranch.protocol import coordinator as crd
from anabranch.protocol import worker as wrk
from anabranch.protocol.coordinator import Coordinator
from anabranch.protocol.messages import GiveVersions, HasPaused
from anabranch.protocol.versions import Version
from anabranch.protocol.worker import Worker
from anabranch.sim.cluster import Case, Cluster
from anabranch.sim.explore import Violation, explore, walk

TWO_VERSIONS = {Version(0): Step(0), Version(1): Step(1)}

SMALL = {
    "two workers, nothing goes wrong": Case(workers=2, steps=3, crashes=0),
    "two workers, a crash, a lost disk": Case(
        workers=2, steps=2, crashes=1, disk_losses=1, checkpoints=TWO_VERSIONS
    ),
    "two workers, two crashes": Case(workers=2, steps=1, crashes=2),
    "two workers, a crash, a failed step": Case(workers=2, steps=1, crashes=1, failures=1),
    "two workers, a message twice": Case(workers=2, steps=1, crashes=0, duplicates=1),
    "two workers that run ahead of each other, a crash": Case(workers=2, steps=2, crashes=1, exchange=False),
    "three workers, a crash": Case(workers=3, steps=1, crashes=1),
}

LARGER = {
    "two workers, a crash, a failed step, a message twice": Case(
        workers=2, steps=1, crashes=1, failures=1, duplicates=1
    ),
    "three workers, a message twice": Case(workers=3, steps=1, crashes=0, duplicates=1),
    "two workers, two crashes, two lost disks": Case(
        workers=2, steps=2, crashes=2, disk_losses=2, checkpoints=TWO_VERSIONS
    ),
    "three workers, two crashes": Case(workers=3, steps=1, crashes=2),
    "three workers, a crash, a lost disk, a failed step": Case(
        workers=3, steps=1, crashes=1, disk_losses=1, failures=1
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_all_interleavings(name: str) -> None:
    found = explore(Cluster(SMALL[name]))
    assert found.settled > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGER)
def test_all_interleavings_of_larger_cases(name: str) -> None:
    assert explore(Cluster(LARGER[name]), limit=5_000_000).settled > 0


def test_random_ways_of_five_workers() -> None:
    case = Case(
        workers=5, steps=4, crashes=4, disk_losses=2, failures=3, duplicates=3, checkpoints=TWO_VERSIONS
    )
    model = Cluster(case)
    for seed in range(40):
        walk(model, seed)


@pytest.mark.slow
def test_many_random_ways() -> None:
    for workers in (3, 4, 7):
        model = Cluster(Case(workers=workers, steps=6, crashes=6, disk_losses=3, failures=3, duplicates=6))
        for seed in range(100):
            walk(model, seed)


def test_nothing_common_fails_and_never_starts() -> None:
    case = Case(
        workers=2,
        steps=1,
        crashes=1,
        exchange=False,
        checkpoints=TWO_VERSIONS,
        broken={WorkerId(0): frozenset({Version(0)}), WorkerId(1): frozenset({Version(1)})},
    )
    with pytest.raises(Violation, match="No version of the state"):
        explore(Cluster(case))
    allowed = Case(**{**{name: getattr(case, name) for name in Case.__slots__}, "may_fail": True})
    assert explore(Cluster(allowed)).settled > 0


class StopsAtTheMinimum(Coordinator):
    def _choose_stop_step(self) -> Step:
        return min(self.paused.values())

    def validate(self) -> None:
        """Left to the model: a machine that is wrong need not know it."""


class TakesTheNewestOfAll(Coordinator):
    """Takes the union of versions instead of their intersection."""

    def _start(self) -> list[crd.Command]:
        commands = super()._start()
        newest = max(version for answer in self.versions.values() for version in answer.versions)
        self.version = newest
        return [
            crd.Send(command.worker, type(command.message)(self.round, newest))  # type: ignore[call-arg, arg-type]
            for command in commands
            if isinstance(command, crd.Send)
        ]


class KeepsTheRound(Coordinator):
    """Asks again after a loss, but under the same number."""

    def _ask(self) -> list[crd.Command]:
        number = self.round
        super()._ask()
        self.round = number or self.round
        return self._send_all(GiveVersions(self.round))


class IgnoresLosses(Coordinator):
    def handle(self, event: crd.Event) -> list[crd.Command]:
        return [] if isinstance(event, crd.Lost) else super().handle(event)


class ForgetsTheWishToStop(Coordinator):
    def _ask(self) -> list[crd.Command]:
        self.stop_wanted = False
        return super()._ask()


class DoesNotWaitForAll(Coordinator):
    """Takes the first answer to the pause for everybody's."""

    def handle(self, event: crd.Event) -> list[crd.Command]:
        if isinstance(event, HasPaused) and event.round == self.round and self.phase is crd.Phase.PAUSING:
            self.paused = {event.worker: event.step}
            return self._stop()
        return super().handle(event)


class AnswersAtTheTopOnly(Worker):
    """Answers a pause between two steps only, as a worker that blocks until it is paused would."""

    def _pause(self) -> list[wrk.Command]:
        if self.begun and self.answered is None and self.state == wrk.Run():
            self.state = wrk.Pause()
            return []
        return super()._pause()


class TakesBackABegunStep(Worker):
    def _answer_pause(self, step: Step) -> list[wrk.Command]:
        return super()._answer_pause(Step(step - 1) if self.begun else step)


class ListensToAnyRound(Worker):
    """Obeys what was meant for the process that was here before it crashed."""

    def handle(self, event: wrk.Event) -> list[wrk.Command]:
        if not isinstance(event, GiveVersions) and event.round > self.round:
            self.round = event.round
        return super().handle(event)


class RunsOneMore(Worker):
    def _top(self) -> list[wrk.Command]:
        match self.state:
            case wrk.Stop(last) if self.step == last:
                return self._allow()
        return super()._top()

    def validate(self) -> None:
        """Left to the model."""


def broken_machine_cases() -> list[tuple[type[Coordinator], type[Worker], Case, str]]:
    plain = Case(workers=2, steps=2, crashes=0)
    crash = Case(workers=2, steps=2, crashes=1)
    disk = Case(workers=2, steps=2, crashes=1, disk_losses=1)
    return [
        (StopsAtTheMinimum, Worker, plain, "beyond the stop step"),
        (
            StopsAtTheMinimum,
            Worker,
            Case(workers=2, steps=2, crashes=0, exchange=False),
            "beyond the stop step",
        ),
        (TakesTheNewestOfAll, Worker, disk, "which it cannot"),
        (KeepsTheRound, Worker, crash, "settles"),
        (IgnoresLosses, Worker, crash, "settles"),
        (ForgetsTheWishToStop, Worker, crash, "settles"),
        (DoesNotWaitForAll, Worker, plain, "beyond the stop step"),
        (Coordinator, AnswersAtTheTopOnly, plain, "settles"),
        (Coordinator, TakesBackABegunStep, plain, "beyond the stop step"),
        (Coordinator, ListensToAnyRound, disk, "which it cannot"),
        (Coordinator, RunsOneMore, plain, "beyond the stop step"),
    ]


@pytest.mark.parametrize(("coordinator", "worker", "case", "what"), broken_machine_cases())
def test_a_broken_machine_is_caught(
    coordinator: type[Coordinator], worker: type[Worker], case: Case, what: str
) -> None:
    with pytest.raises(Violation, match=what):
        explore(Cluster(case, worker, coordinator))


def test_the_trace_of_a_pause_that_is_answered_too_late() -> None:
    """One worker has begun a step, the other is paused before it: each waits for the other."""
    with pytest.raises(Violation) as caught:
        explore(Cluster(Case(workers=2, steps=1, crashes=0), worker=AnswersAtTheTopOnly))
    trace = caught.value.trace
    assert sum("begins step 0" in line for line in trace) == 1
    assert not any("finishes" in line for line in trace)
