"""The fleet as a runtime with one thread uses it."""

from __future__ import annotations

import pytest

from anabranch.errors import EngineError
from anabranch.model.ids import Attempt, Step, WorkerId
from anabranch.protocol.coordinator import Fail, Finished, Phase
from anabranch.protocol.fleet import AskVersions, Command, Fleet, OpenAll, RunStep
from anabranch.protocol.versions import LIVE, Version

W = tuple(WorkerId(i) for i in range(3))


def run_step(step: int, attempt: int = 0) -> RunStep:
    return RunStep(Step(step), Attempt(attempt))


def opened(fleet: Fleet, step: int, workers: tuple[WorkerId, ...] = W) -> list[Command]:
    said = [fleet.opened(worker, Step(step)) for worker in workers]
    assert all(commands == [] for commands in said[:-1])
    return said[-1]


def answered(fleet: Fleet, *versions: Version, workers: tuple[WorkerId, ...] = W) -> list[Command]:
    said = [fleet.answered_versions(worker, versions) for worker in workers]
    assert all(commands == [] for commands in said[:-1])
    return said[-1]


def running(step: int = 5) -> Fleet:
    fleet = Fleet()
    fleet.begin(W)
    answered(fleet, LIVE)
    assert opened(fleet, step) == [run_step(step)]
    return fleet


def test_a_run_from_begin_to_finish() -> None:
    fleet = Fleet()
    assert fleet.begin(W) == [AskVersions(W)]
    assert answered(fleet, Version(3), Version(4)) == [OpenAll(Version(4))]
    assert opened(fleet, 40) == [run_step(40)]
    assert fleet.step_began(Step(40)) == []
    assert fleet.step_done(Step(40)) == [run_step(41)]
    assert fleet.step_began(Step(41)) == []
    assert fleet.ask_stop() == []
    assert fleet.step_done(Step(41)) == [Finished(Step(42))]
    assert fleet.phase is Phase.FINISHED


def test_a_stop_while_no_step_has_begun_is_at_once() -> None:
    fleet = running(5)
    assert fleet.ask_stop() == [Finished(Step(5))]
    with pytest.raises(EngineError, match="not allowed"):
        fleet.step_began(Step(5))


def test_a_stop_before_anything_is_open_waits_for_that() -> None:
    fleet = Fleet()
    fleet.begin(W)
    assert fleet.ask_stop() == []
    assert answered(fleet, LIVE) == [OpenAll(LIVE)]
    assert opened(fleet, 7) == [Finished(Step(7))]


def test_a_failed_step_runs_again() -> None:
    fleet = running(5)
    fleet.step_began(Step(5))
    assert fleet.step_failed(Step(5), Attempt(0)) == [run_step(5, 1)]
    fleet.step_began(Step(5))
    assert fleet.step_failed(Step(5), Attempt(1)) == [run_step(5, 2)]
    assert fleet.step_done(Step(5)) == [run_step(6)]


def test_a_stop_during_a_step_that_then_fails_still_runs_it() -> None:
    fleet = running(5)
    fleet.step_began(Step(5))
    assert fleet.ask_stop() == []
    assert fleet.step_failed(Step(5), Attempt(0)) == [run_step(5, 1)]
    assert fleet.step_done(Step(5)) == [Finished(Step(6))]


@pytest.mark.parametrize("gone", [W[:1], W[1:], W])
def test_a_loss_asks_everybody_once(gone: tuple[WorkerId, ...]) -> None:
    fleet = running(5)
    fleet.step_began(Step(5))
    assert fleet.lost(gone) == [AskVersions(W)]
    for worker in W[:-1]:
        has = [Version(4)] if worker in gone else [LIVE, Version(4)]
        assert fleet.answered_versions(worker, has) == []
    assert fleet.answered_versions(W[-1], [Version(4)]) == [OpenAll(Version(4))]
    assert fleet.version == Version(4)
    assert opened(fleet, 2) == [run_step(2)]


def test_a_stop_outlives_a_loss() -> None:
    fleet = running(5)
    fleet.step_began(Step(5))
    fleet.ask_stop()
    assert fleet.lost([W[0]]) == [AskVersions(W)]
    assert fleet.stop_wanted
    answered(fleet, LIVE)
    assert opened(fleet, 5) == [Finished(Step(5))]


def test_the_loss_of_nobody_changes_nothing() -> None:
    fleet = running(5)
    assert fleet.lost([WorkerId(77)]) == []
    assert fleet.step_done(Step(5)) == [run_step(6)]


def test_a_loss_while_versions_are_asked_asks_again() -> None:
    fleet = Fleet()
    fleet.begin(W)
    fleet.answered_versions(W[0], [LIVE])
    assert fleet.lost([W[1]]) == [AskVersions(W)]
    assert answered(fleet, LIVE) == [OpenAll(LIVE)]


def test_a_round_may_have_other_workers() -> None:
    fleet = running(5)
    assert fleet.ask_stop() == [Finished(Step(5))]
    fewer = (WorkerId(0), WorkerId(7))
    assert fleet.begin(fewer) == [AskVersions(fewer)]
    assert answered(fleet, Version(9), workers=fewer) == [OpenAll(Version(9))]
    assert opened(fleet, 5, fewer) == [run_step(5)]
    assert fleet.round == 2


def test_begin_in_the_middle_of_a_step_starts_over() -> None:
    fleet = running(5)
    fleet.step_began(Step(5))
    assert fleet.begin(W[:2]) == [AskVersions(W[:2])]
    answered(fleet, Version(1), workers=W[:2])
    assert opened(fleet, 3, W[:2]) == [run_step(3)]


def test_nothing_common_fails_with_the_obstacle() -> None:
    fleet = Fleet()
    fleet.begin(W[:2])
    fleet.answered_versions(W[0], [Version(4)])
    (fail,) = fleet.answered_versions(W[1], [], {Version(4): "part-00003.parquet is missing"})
    assert isinstance(fail, Fail)
    assert "in the way of version 4: worker 1: part-00003.parquet is missing" in fail.reason


def test_opening_at_different_steps_fails_and_runs_nothing() -> None:
    fleet = Fleet()
    fleet.begin(W[:2])
    answered(fleet, LIVE, workers=W[:2])
    fleet.opened(W[0], Step(3))
    (fail,) = fleet.opened(W[1], Step(4))
    assert isinstance(fail, Fail)


def test_misuse() -> None:
    with pytest.raises(EngineError, match="needs workers"):
        Fleet().begin([])
    with pytest.raises(EngineError, match="each once"):
        Fleet().begin([W[0], W[0]])
    with pytest.raises(EngineError, match="worker 9 is not one"):
        running().opened(WorkerId(9), Step(0))
    with pytest.raises(EngineError, match="step 9 is done"):
        running(5).step_done(Step(9))
