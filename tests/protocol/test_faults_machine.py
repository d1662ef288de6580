"""What is done about each kind of fault, how often, and when the counters start over."""

from __future__ import annotations

import pytest

from anabranch.model.ids import Attempt, Step
from anabranch.protocol.faults import (
    Command,
    Failed,
    Faults,
    GiveUp,
    Isolate,
    Kind,
    Progressed,
    Recover,
    RetryStep,
    Settings,
)
from anabranch.protocol.pauses import Pauses


def fail(machine: Faults, kind: Kind, step: int = 7, now: float = 0.0, reason: str = "") -> Command:
    (command,) = machine.handle(Failed(Step(step), kind, now, reason))
    machine.validate()
    return command


def until_given_up(machine: Faults, kind: Kind) -> list[Command]:
    commands: list[Command] = []
    while not commands or not isinstance(commands[-1], GiveUp):
        assert len(commands) < 1000
        commands.append(fail(machine, kind, now=float(len(commands))))
    return commands


def test_incomplete_input_is_run_again_with_growing_pauses_then_recovered() -> None:
    machine = Faults(Settings(retries=3, pauses=Pauses(1.0, 3.0)))
    assert [fail(machine, Kind.INCOMPLETE_INPUT) for _ in range(4)] == [
        RetryStep(Attempt(1), 1.0),
        RetryStep(Attempt(2), 2.0),
        RetryStep(Attempt(3), 3.0),
        Recover(1.0),
    ]
    # A new epoch counts attempts from 0 again.
    assert fail(machine, Kind.INCOMPLETE_INPUT) == RetryStep(Attempt(1), 1.0)


def test_the_second_death_in_a_step_isolates_once() -> None:
    machine = Faults(Settings(retries=2, isolated_retries=5, pauses=Pauses(1.0, 60.0)))
    commands = [fail(machine, Kind.DIED) for _ in range(6)]
    assert commands[:5] == [
        RetryStep(Attempt(1), 1.0),
        Isolate(Attempt(2), 2.0),
        RetryStep(Attempt(3), 1.0),
        RetryStep(Attempt(4), 1.0),
        RetryStep(Attempt(5), 1.0),
    ]
    assert isinstance(commands[5], GiveUp)


def test_deaths_in_different_steps_do_not_isolate() -> None:
    machine = Faults()
    assert isinstance(fail(machine, Kind.DIED, step=7), RetryStep)
    machine.handle(Progressed(Step(7)))
    assert isinstance(fail(machine, Kind.DIED, step=8), RetryStep)


def test_a_death_between_other_faults_still_counts() -> None:
    machine = Faults()
    fail(machine, Kind.DIED)
    fail(machine, Kind.INCOMPLETE_INPUT)
    assert fail(machine, Kind.DIED) == Isolate(Attempt(3), 0.8)


@pytest.mark.parametrize("kind", [Kind.STATE_LOST, Kind.HOST_LOST, Kind.CORRUPT])
def test_lost_state_is_recovered_a_bounded_number_of_times(kind: Kind) -> None:
    commands = until_given_up(Faults(Settings(recoveries=3, pauses=Pauses(1.0, 60.0))), kind)
    assert commands[:-1] == [Recover(1.0), Recover(2.0), Recover(4.0)]


@pytest.mark.parametrize("kind", [Kind.USER_ERROR, Kind.FENCED])
def test_what_would_end_the_same_way_is_not_tried_again(kind: Kind) -> None:
    assert fail(Faults(), kind, reason="a name is missing") == GiveUp("step 7: a name is missing")


@pytest.mark.parametrize("kind", Kind)
def test_a_fault_that_stays_ends(kind: Kind) -> None:
    rules = Settings()
    commands = until_given_up(Faults(rules), kind)
    assert len(commands) <= max((rules.recoveries + 1) * (rules.retries + 1), rules.isolated_retries + 1)


def test_the_last_word_says_what_was_seen_and_for_how_long() -> None:
    machine = Faults(Settings(retries=1, recoveries=1))
    last = until_given_up(machine, Kind.FAILED)[-1]
    assert isinstance(last, GiveUp)
    assert "step 7: a task failed" in last.reason
    assert "No progress for 3 s in spite of 1 recoveries" in last.reason
    assert "4 × a task failed" in last.reason


def test_progress_starts_the_counters_over() -> None:
    machine = Faults(Settings(retries=2))
    fail(machine, Kind.INCOMPLETE_INPUT)
    fail(machine, Kind.INCOMPLETE_INPUT)
    assert machine.handle(Progressed(Step(7))) == []
    assert fail(machine, Kind.INCOMPLETE_INPUT, step=8) == RetryStep(Attempt(1), 0.2)


def test_replay_is_no_progress() -> None:
    """A step that always fails after a recovery must not be recovered for ever."""
    machine = Faults(Settings(recoveries=2))
    for _ in range(2):
        assert isinstance(fail(machine, Kind.CORRUPT, step=7), Recover)
        for step in range(3, 7):
            machine.handle(Progressed(Step(step)))
    assert isinstance(fail(machine, Kind.CORRUPT, step=7), GiveUp)
