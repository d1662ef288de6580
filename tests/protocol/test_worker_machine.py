"""The worker, one row of its state table at a time."""

from __future__ import annotations

import pytest

from anabranch.errors import EngineError
from anabranch.model.ids import Attempt, Step, WorkerId
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
)
from anabranch.protocol.versions import LIVE, Answer, Version
from anabranch.protocol.worker import (
    CancelStep,
    Command,
    Commit,
    Committed,
    Event,
    ListVersions,
    OpenState,
    Pause,
    Paused,
    Report,
    Run,
    RunStep,
    StateOpened,
    StepBegan,
    StepDone,
    StepFailed,
    Stop,
    Stopped,
    VersionsListed,
    Worker,
)

R1, R2 = Round(1), Round(2)
ME = WorkerId(4)


def fed(*events: Event) -> tuple[Worker, list[Command]]:
    """A worker after these events, and what it answered to the last one."""
    worker = Worker(ME)
    commands: list[Command] = []
    for event in events:
        commands = worker.handle(event)
        worker.validate()
    return worker, commands


def run_step(step: int, attempt: int = 0) -> RunStep:
    return RunStep(R1, Step(step), Attempt(attempt))


STARTED: tuple[Event, ...] = (GiveVersions(R1), Start(R1, Version(3)))
AT_5: tuple[Event, ...] = (*STARTED, StateOpened(R1, Step(5)))
IN_5: tuple[Event, ...] = (*AT_5, StepBegan(R1, Step(5)))


def test_versions_are_looked_up_and_reported() -> None:
    answer = Answer.of([LIVE, Version(3)])
    assert fed(GiveVersions(R1))[1] == [ListVersions(R1)]
    assert fed(GiveVersions(R1), VersionsListed(R1, answer))[1] == [Report(HasVersions(R1, ME, answer))]


def test_start_opens_the_version_and_runs() -> None:
    worker, commands = fed(*STARTED)
    assert (worker.state, commands) == (Run(), [OpenState(R1, Version(3))])
    assert fed(*AT_5)[1] == [Report(HasOpened(R1, ME, Step(5))), run_step(5)]
    assert fed(*IN_5, StepDone(R1, Step(5)))[1] == [run_step(6)]


def test_a_pause_takes_back_a_step_that_has_not_begun() -> None:
    worker, commands = fed(*AT_5, PauseNow(R1))
    assert worker.state == Paused(Step(5))
    assert commands == [CancelStep(R1, Step(5)), Report(HasPaused(R1, ME, Step(5)))]


def test_a_pause_in_a_step_is_answered_at_once_with_the_next() -> None:
    worker, commands = fed(*IN_5, PauseNow(R1))
    assert (worker.state, commands) == (Pause(), [Report(HasPaused(R1, ME, Step(6)))])
    worker, commands = fed(*IN_5, PauseNow(R1), StepDone(R1, Step(5)))
    assert (worker.state, commands) == (Paused(Step(6)), [])


def test_a_pause_before_the_version_is_open_waits_for_it() -> None:
    assert fed(*STARTED, PauseNow(R1))[1] == []
    worker, commands = fed(*STARTED, PauseNow(R1), StateOpened(R1, Step(5)))
    assert worker.state == Paused(Step(5))
    assert commands == [Report(HasOpened(R1, ME, Step(5))), Report(HasPaused(R1, ME, Step(5)))]


def test_stop_beyond_the_step_runs_up_to_it_and_commits_there() -> None:
    worker, commands = fed(*AT_5, PauseNow(R1), StopAt(R1, Step(6)))
    assert (worker.state, commands) == (Stop(Step(6)), [run_step(5)])
    worker, commands = fed(*AT_5, PauseNow(R1), StopAt(R1, Step(6)), StepDone(R1, Step(5)))
    assert (worker.state, commands) == (Stop(Step(6)), [Commit(R1, Step(6))])


def test_stop_at_the_step_commits_at_once_and_then_reports() -> None:
    assert fed(*AT_5, PauseNow(R1), StopAt(R1, Step(5)))[1] == [Commit(R1, Step(5))]
    worker, commands = fed(*AT_5, PauseNow(R1), StopAt(R1, Step(5)), Committed(R1, Step(5)))
    assert (worker.state, commands) == (Stopped(), [Report(HasStopped(R1, ME, Step(5)))])


def test_stop_during_a_step_waits_for_it() -> None:
    assert fed(*IN_5, PauseNow(R1), StopAt(R1, Step(6)))[1] == []
    assert fed(*IN_5, PauseNow(R1), StopAt(R1, Step(6)), StepDone(R1, Step(5)))[1] == [Commit(R1, Step(6))]


def test_stop_without_a_pause() -> None:
    assert fed(*AT_5, StopAt(R1, Step(7)))[1] == []
    assert fed(*AT_5, StopAt(R1, Step(5)))[1] == [CancelStep(R1, Step(5)), Commit(R1, Step(5))]


def test_stop_below_the_step_is_a_fatal_error() -> None:
    _, commands = fed(*AT_5, PauseNow(R1), StopAt(R1, Step(4)))
    reason = "worker 4: it was told to stop at step 4, which it has run; its next is step 5"
    assert commands == [Report(HasBroken(R1, ME, reason))]


def test_two_stop_steps_in_a_round_are_a_fatal_error() -> None:
    _, (report,) = fed(*AT_5, StopAt(R1, Step(7)), StopAt(R1, Step(8)))
    assert isinstance(report, Report)
    assert isinstance(report.message, HasBroken)


def test_a_failed_step_runs_again_under_the_next_attempt() -> None:
    assert fed(*IN_5, StepFailed(R1, Step(5), Attempt(0)))[1] == [run_step(5, attempt=1)]
    late = StepFailed(R1, Step(5), Attempt(0))
    assert fed(*IN_5, StepFailed(R1, Step(5), Attempt(0)), late)[1] == []


def test_a_step_that_failed_after_the_pause_was_answered_runs_when_the_stop_wants_it() -> None:
    events: tuple[Event, ...] = (*IN_5, PauseNow(R1), StepFailed(R1, Step(5), Attempt(0)))
    worker, commands = fed(*events)
    assert (worker.state, commands) == (Paused(Step(5)), [])
    assert fed(*events, StopAt(R1, Step(6)))[1] == [run_step(5, attempt=1)]


@pytest.mark.parametrize(
    ("before", "again", "answer"),
    [
        (AT_5, Start(R1, Version(3)), []),
        (AT_5, GiveVersions(R1), []),
        (AT_5, StateOpened(R1, Step(5)), []),
        ((*IN_5, StepDone(R1, Step(5))), StepDone(R1, Step(5)), []),
        ((*AT_5, PauseNow(R1)), PauseNow(R1), [Report(HasPaused(R1, ME, Step(5)))]),
        ((*IN_5, PauseNow(R1)), PauseNow(R1), [Report(HasPaused(R1, ME, Step(6)))]),
        ((*AT_5, StopAt(R1, Step(5))), StopAt(R1, Step(5)), []),
        (
            (*AT_5, StopAt(R1, Step(5)), Committed(R1, Step(5))),
            StopAt(R1, Step(5)),
            [Report(HasStopped(R1, ME, Step(5)))],
        ),
        ((*AT_5, StopAt(R1, Step(5)), Committed(R1, Step(5))), Committed(R1, Step(5)), []),
    ],
)
def test_what_comes_twice_changes_nothing(
    before: tuple[Event, ...], again: Event, answer: list[Command]
) -> None:
    once, _ = fed(*before)
    twice, commands = fed(*before, again)
    assert twice == once
    assert commands == answer


def test_the_next_round_ends_whatever_went_on() -> None:
    worker, commands = fed(*IN_5, GiveVersions(R2))
    assert commands == [CancelStep(R1, Step(5)), ListVersions(R2)]
    assert worker == Worker(ME, round=R2)


@pytest.mark.parametrize(
    "late", [GiveVersions(R1), Start(R1, LIVE), PauseNow(R1), StopAt(R1, Step(5)), StateOpened(R1, Step(5))]
)
def test_what_is_late_from_an_earlier_round_changes_nothing(late: Event) -> None:
    assert fed(*AT_5, GiveVersions(R2), late) == (Worker(ME, round=R2), [])


@pytest.mark.parametrize("early", [Start(R1, LIVE), PauseNow(R1), StopAt(R1, Step(5))])
def test_a_worker_that_came_back_ignores_what_was_meant_for_the_one_before(early: Event) -> None:
    assert fed(early) == (Worker(ME), [])
    assert fed(GiveVersions(R1), PauseNow(R1), StopAt(R1, Step(0))) == (Worker(ME, round=R1), [])


def test_a_step_that_was_not_allowed_is_the_drivers_fault() -> None:
    with pytest.raises(EngineError, match="step 5 is done, but it was not allowed"):
        fed(*AT_5, PauseNow(R1), StepDone(R1, Step(5)))
    with pytest.raises(EngineError, match="step 9 began"):
        fed(*AT_5, StepBegan(R1, Step(9)))
