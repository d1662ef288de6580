"""The coordinator, phase by phase: answers counted once, losses in any phase, late messages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from anabranch.model.ids import Step, WorkerId
from anabranch.protocol.coordinator import (
    Begin,
    Command,
    Coordinator,
    Event,
    Fail,
    Finished,
    Lost,
    Phase,
    Send,
    StopAsked,
)
from anabranch.protocol.messages import (
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
    ToWorker,
)
from anabranch.protocol.versions import LIVE, Answer, Version

W = (WorkerId(0), WorkerId(1))
R1, R2 = Round(1), Round(2)


def fed(*events: Event) -> tuple[Coordinator, list[Command]]:
    coordinator = Coordinator()
    commands: list[Command] = []
    for event in events:
        commands = coordinator.handle(event)
        coordinator.validate()
    return coordinator, commands


def to_all(message: ToWorker) -> list[Command]:
    return [Send(worker, message) for worker in W]


def has(worker: WorkerId, *versions: Version) -> HasVersions:
    return HasVersions(R1, worker, Answer.of(versions))


ASKED: tuple[Event, ...] = (Begin(W),)
STARTED: tuple[Event, ...] = (*ASKED, has(W[0], LIVE, Version(2)), has(W[1], Version(2)))
RUNNING: tuple[Event, ...] = (*STARTED, HasOpened(R1, W[0], Step(5)), HasOpened(R1, W[1], Step(5)))
PAUSING: tuple[Event, ...] = (*RUNNING, StopAsked())
STOPPING: tuple[Event, ...] = (*PAUSING, HasPaused(R1, W[0], Step(8)), HasPaused(R1, W[1], Step(9)))
FINISHED: tuple[Event, ...] = (*STOPPING, HasStopped(R1, W[0], Step(9)), HasStopped(R1, W[1], Step(9)))

PHASES = {
    Phase.ASKING: ASKED,
    Phase.STARTING: STARTED,
    Phase.RUNNING: RUNNING,
    Phase.PAUSING: PAUSING,
    Phase.STOPPING: STOPPING,
    Phase.FINISHED: FINISHED,
}


def test_a_round_from_begin_to_finish() -> None:
    assert fed(*ASKED)[1] == to_all(GiveVersions(R1))
    assert fed(*STARTED)[1] == to_all(Start(R1, Version(2)))
    assert fed(*RUNNING)[1] == []
    assert fed(*PAUSING)[1] == to_all(PauseNow(R1))
    assert fed(*STOPPING)[1] == to_all(StopAt(R1, Step(9)))
    assert fed(*FINISHED)[1] == [Finished(Step(9))]
    for phase, events in PHASES.items():
        assert fed(*events)[0].phase is phase


@pytest.mark.parametrize(
    "phase", [Phase.ASKING, Phase.STARTING, Phase.RUNNING, Phase.PAUSING, Phase.STOPPING]
)
def test_a_loss_in_any_phase_asks_all_again(phase: Phase) -> None:
    coordinator, commands = fed(*PHASES[phase], Lost(frozenset({W[1]})))
    assert commands == to_all(GiveVersions(R2))
    assert coordinator.phase is Phase.ASKING
    assert coordinator.stop_wanted == (phase in (Phase.PAUSING, Phase.STOPPING))


def test_a_loss_before_and_after_a_round_and_of_a_stranger_changes_nothing() -> None:
    for events in ((), FINISHED):
        assert fed(*events, Lost(frozenset(W))) == (fed(*events)[0], [])
    assert fed(*RUNNING, Lost(frozenset({WorkerId(9)}))) == (fed(*RUNNING)[0], [])


@pytest.mark.parametrize(
    ("events", "again"),
    [
        (ASKED, has(W[0], LIVE)),
        (STARTED, HasOpened(R1, W[0], Step(5))),
        (PAUSING, HasPaused(R1, W[0], Step(8))),
        (STOPPING, HasStopped(R1, W[0], Step(9))),
    ],
)
def test_a_worker_that_answers_twice_counts_once(events: tuple[Event, ...], again: Event) -> None:
    once, _ = fed(*events, again)
    twice, commands = fed(*events, again, again)
    assert (twice, commands) == (once, [])


def test_the_first_of_two_answers_counts() -> None:
    events = (
        *PAUSING,
        HasPaused(R1, W[0], Step(8)),
        HasPaused(R1, W[0], Step(99)),
        HasPaused(R1, W[1], Step(7)),
    )
    assert fed(*events)[1] == to_all(StopAt(R1, Step(8)))


@pytest.mark.parametrize("events", PHASES.values())
@pytest.mark.parametrize(
    "late",
    [
        has(W[0], Version(1)),
        HasOpened(R1, W[0], Step(5)),
        HasPaused(R1, W[0], Step(5)),
        HasStopped(R1, W[0], Step(5)),
        HasBroken(R1, W[0], "late"),
    ],
)
def test_messages_of_an_earlier_round_change_nothing(events: tuple[Event, ...], late: Event) -> None:
    before = fed(*events, Begin(W))[0]
    assert fed(*events, Begin(W), late) == (before, [])


@pytest.mark.parametrize("events", [ASKED, STARTED[:2], STARTED])
def test_a_wish_to_stop_before_all_have_opened_waits_for_them(events: tuple[Event, ...]) -> None:
    assert fed(*events, StopAsked())[1] == []
    rest = RUNNING[len(events) :]
    assert fed(*events, StopAsked(), *rest)[1] == to_all(PauseNow(R1))


def test_a_wish_to_stop_is_fulfilled_once() -> None:
    assert fed(*FINISHED, StopAsked())[1] == []
    assert fed(*FINISHED, StopAsked(), Begin(W))[0].stop_wanted is False
    assert fed(*PAUSING, StopAsked())[1] == []


def test_nothing_common_is_a_failure_that_explains() -> None:
    coordinator, (fail,) = fed(*ASKED, has(W[0], LIVE, Version(2)), has(W[1], Version(1)))
    assert isinstance(fail, Fail)
    assert "worker 0 can open: the live state, version 2" in fail.reason
    assert coordinator.phase is Phase.FAILED


def test_the_same_version_at_different_steps_is_a_failure() -> None:
    _, (fail,) = fed(*STARTED, HasOpened(R1, W[0], Step(5)), HasOpened(R1, W[1], Step(6)))
    assert isinstance(fail, Fail)
    assert "worker 0 at step 5, worker 1 at step 6" in fail.reason


def test_a_broken_worker_fails_the_round_once() -> None:
    events = (*STOPPING, HasBroken(R1, W[0], "why"))
    assert fed(*events)[1] == [Fail("why")]
    assert fed(*events, HasBroken(R1, W[1], "too"))[1] == []


@pytest.mark.parametrize("order", [lambda r: r, lambda r: list(reversed(r))])
def test_the_order_of_answers_does_not_matter(order: Callable[[list[Event]], list[Event]]) -> None:
    answers = order([HasPaused(R1, W[0], Step(9)), HasPaused(R1, W[1], Step(3))])
    assert fed(*PAUSING, *answers)[1] == to_all(StopAt(R1, Step(9)))
