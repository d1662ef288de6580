"""When a checkpoint is due, when it commits, what is forgotten, and what a stop waits for."""

from __future__ import annotations

import random

import pytest

from anabranch.model.ids import Step
from anabranch.protocol.checkpointing import (
    Asked,
    Checkpointer,
    Command,
    CommitManifest,
    Event,
    Kept,
    ManifestCommitted,
    MayStop,
    Published,
    Recovered,
    Served,
    Settings,
    SnapshotDone,
    SnapshotFailed,
    StartSnapshot,
    StepCommitted,
    StopAsked,
    Tick,
    TrimTo,
    WaitFor,
)
from anabranch.protocol.pauses import Pauses

NEVER = Settings(every_seconds=None, every_steps=None, undo_limit_bytes=None)


def feed(machine: Checkpointer, *events: Event) -> list[Command]:
    """All commands that these events led to."""
    commands: list[Command] = []
    for event in events:
        commands += machine.handle(event)
        machine.validate()
    return commands


def steps(first: int, last: int, undo: int = 0) -> list[Event]:
    return [e for n in range(first, last) for e in (StepCommitted(Step(n), undo), Published(Step(n)))]


def snapshot(version: int, at: int, since: int | None) -> StartSnapshot:
    return StartSnapshot(version, Step(at), None if since is None else Step(since))


def test_every_so_many_steps() -> None:
    machine = Checkpointer(Settings(every_seconds=None, every_steps=3))
    assert feed(machine, *steps(0, 2)) == []
    assert feed(machine, *steps(2, 3)) == [snapshot(1, 3, None)]


def test_every_so_many_seconds_and_only_when_there_is_something_new() -> None:
    machine = Checkpointer(Settings(every_seconds=10.0))
    assert feed(machine, Tick(30.0)) == []
    assert feed(machine, *steps(0, 1)) == [snapshot(1, 1, None)]
    feed(machine, SnapshotDone(1, Step(1)), ManifestCommitted(1))
    assert feed(machine, Tick(39.0), *steps(1, 2)) == []
    assert feed(machine, Tick(40.0)) == [snapshot(2, 2, 1)]


def test_the_undo_ring_is_cut_in_time() -> None:
    machine = Checkpointer(Settings(every_seconds=None, undo_limit_bytes=100))
    assert feed(machine, *steps(0, 2, undo=50)) == []
    assert feed(machine, *steps(2, 3, undo=1)) == [snapshot(1, 3, None)]
    # What was written since the snapshot began is still in the ring after it.
    feed(machine, *steps(3, 5, undo=50), SnapshotDone(1, Step(3)), ManifestCommitted(1))
    assert feed(machine, *steps(5, 6, undo=1)) == [snapshot(2, 6, 3)]


def test_the_manifest_waits_for_the_outputs() -> None:
    machine = Checkpointer(NEVER)
    feed(machine, *steps(0, 2), StepCommitted(Step(2), 0))
    assert feed(machine, Asked()) == [snapshot(1, 3, None)]
    assert feed(machine, SnapshotDone(1, Step(3))) == []
    assert feed(machine, Published(Step(2))) == [CommitManifest(1)]
    assert feed(machine, StepCommitted(Step(3), 0), Published(Step(3))) == []
    assert feed(machine, ManifestCommitted(1)) == [Served(1)]


def test_two_versions_are_kept_and_what_is_before_them_is_forgotten() -> None:
    machine = Checkpointer(Settings(every_seconds=None, every_steps=10))
    trimmed = []
    for version in (1, 2, 3):
        at = Step(10 * version)
        feed(machine, *steps(at - 10, at), SnapshotDone(version, at))
        trimmed += feed(machine, ManifestCommitted(version))
    assert trimmed == [TrimTo(Step(10)), TrimTo(Step(20))]
    assert machine.newest == Kept(3, Step(30))


def test_one_at_a_time_and_a_later_ask_is_served_by_the_next() -> None:
    machine = Checkpointer(NEVER)
    assert feed(machine, *steps(0, 5), Asked()) == [snapshot(1, 5, None)]
    assert feed(machine, Asked()) == []
    assert feed(machine, *steps(5, 6), Asked()) == []
    assert feed(machine, SnapshotDone(1, Step(5)), ManifestCommitted(1)) == [
        CommitManifest(1),
        snapshot(2, 6, 5),
    ]
    done = feed(machine, SnapshotDone(2, Step(6)), ManifestCommitted(2))
    assert done == [CommitManifest(2), TrimTo(Step(5)), Served(2)]


def test_an_ask_that_the_running_one_covers_needs_no_other() -> None:
    machine = Checkpointer(NEVER)
    feed(machine, *steps(0, 5), Asked(), Asked())
    assert feed(machine, SnapshotDone(1, Step(5)), *steps(5, 9)) == [CommitManifest(1)]
    assert feed(machine, ManifestCommitted(1)) == [Served(1)]


def test_an_ask_when_nothing_is_new_is_served_at_once() -> None:
    assert feed(Checkpointer(NEVER), Asked()) == [Served(None)]
    machine = Checkpointer(
        NEVER, kept=(Kept(4, Step(9)),), next_version=5, next_step=Step(9), published=Step(9)
    )
    assert feed(machine, Asked()) == [Served(4)]


def test_a_failed_one_is_tried_again_later_and_later_under_a_new_number() -> None:
    machine = Checkpointer(Settings(every_steps=1, retry=Pauses(first=1.0, longest=3.0)))
    feed(machine, *steps(0, 1))
    now, begun = 0.0, []
    for version in (1, 2, 3, 4):
        assert feed(machine, SnapshotFailed(version, "disk"), *steps(version, version + 1)) == []
        before = now
        while machine.running is None:
            now += 0.5
            begun += [(now - before, command) for command in feed(machine, Tick(now))]
    assert [pause for pause, _ in begun] == [1.0, 2.0, 3.0, 3.0]
    assert begun[-1][1] == snapshot(5, 5, None)


def test_a_success_forgets_the_failures() -> None:
    machine = Checkpointer(Settings(every_seconds=None, every_steps=1, retry=Pauses(1.0, 60.0)))
    feed(machine, *steps(0, 1), SnapshotFailed(1, "disk"), Tick(1.0))
    feed(machine, SnapshotDone(2, Step(1)), ManifestCommitted(2), *steps(1, 2))
    assert feed(machine, SnapshotFailed(3, "disk"), Tick(1.9)) == []
    assert feed(machine, Tick(2.0)) == [snapshot(4, 2, 1)]


def test_whoever_asks_cuts_the_pause_short() -> None:
    machine = Checkpointer(NEVER)
    feed(machine, *steps(0, 1), Asked(), SnapshotFailed(1, "disk"))
    assert feed(machine, Asked()) == [snapshot(2, 1, None)]


def test_a_manifest_that_could_not_be_committed_is_no_base() -> None:
    machine = Checkpointer(NEVER)
    feed(machine, *steps(0, 1), Asked(), SnapshotDone(1, Step(1)), SnapshotFailed(1, "no room"))
    assert machine.newest is None
    assert feed(machine, *steps(1, 3), Asked()) == [snapshot(2, 3, None)]


def test_late_news_of_an_earlier_one_changes_nothing() -> None:
    machine = Checkpointer(NEVER)
    feed(machine, *steps(0, 1), Asked(), SnapshotFailed(1, "disk"), Asked())
    assert machine.running == 2
    late = [SnapshotDone(1, Step(1)), SnapshotFailed(1, "disk"), ManifestCommitted(1)]
    assert feed(machine, *late) == []
    assert machine.running == 2


def test_a_recovery_voids_what_is_under_way_and_versions_beyond_it() -> None:
    kept = (Kept(6, Step(60)), Kept(7, Step(70)))
    machine = Checkpointer(NEVER, kept, next_version=8, next_step=Step(75), published=Step(75))
    assert feed(machine, Asked()) == [snapshot(8, 75, 70)]
    # Version 7 turned out to be damaged; the ask stays open until replay is where it was.
    assert feed(machine, Recovered(Step(60)), SnapshotDone(8, Step(75))) == []
    assert machine.newest == Kept(6, Step(60))
    assert feed(machine, *steps(60, 74)) == []
    assert feed(machine, *steps(74, 75)) == [snapshot(9, 75, 60)]


def test_a_stop_says_what_it_waits_for() -> None:
    machine = Checkpointer(NEVER)
    feed(machine, *steps(0, 5), Asked(), StepCommitted(Step(5), 0))
    (first,) = feed(machine, StopAsked())
    assert first == WaitFor(
        "a checkpoint that comes before the final one (version 1, before step 5) to be written"
    )
    assert feed(machine, Tick(1.0)) == []
    told = feed(machine, SnapshotDone(1, Step(5)), ManifestCommitted(1), SnapshotDone(2, Step(6)))
    assert told == [
        CommitManifest(1),
        WaitFor("the manifest of a checkpoint that comes before the final one (version 1, before step 5)"),
        Served(1),
        snapshot(2, 6, 5),
        WaitFor("the final checkpoint (version 2, before step 6) to be written"),
        WaitFor(
            "the outputs of step 5 to be published, to commit the final checkpoint (version 2, before step 6)"
        ),
    ]
    feed(machine, Published(Step(5)))
    assert feed(machine, ManifestCommitted(2)) == [TrimTo(Step(5)), MayStop(2)]
    assert feed(machine, Tick(99.0)) == []


def test_a_stop_with_nothing_new_may_go_at_once() -> None:
    assert feed(Checkpointer(NEVER), StopAsked()) == [MayStop(None)]


def test_a_stop_whose_checkpoint_fails_says_so_and_goes_on_trying() -> None:
    machine = Checkpointer(NEVER)
    feed(machine, *steps(0, 1), StopAsked())
    (wait,) = feed(machine, SnapshotFailed(1, "no space left"))
    assert isinstance(wait, WaitFor)
    assert "failed (no space left) and is tried again in 1 s" in wait.reason
    assert "stop --force" in wait.reason
    assert snapshot(2, 1, None) in feed(machine, Tick(1.0))


@pytest.mark.parametrize("seed", range(30))
def test_random_histories_keep_the_rules(seed: int) -> None:
    """Against an oracle that only remembers what was commanded, published and committed."""
    chance = random.Random(seed)
    machine = Checkpointer(Settings(every_seconds=3.0, every_steps=4, undo_limit_bytes=500))
    now, step, published = 0.0, 0, 0
    running: StartSnapshot | None = None
    versions: dict[int, int] = {}
    base: int | None = None
    for _ in range(400):
        choices: list[Event] = [Tick(now + chance.random()), StepCommitted(Step(step), chance.randrange(200))]
        if published < step:
            choices.append(Published(Step(chance.randrange(published, step))))
        if running is not None:
            choices.append(SnapshotDone(running.version, running.at_step))
            if chance.random() < 0.2:
                choices.append(SnapshotFailed(running.version, "why"))
        if chance.random() < 0.1:
            choices = [Asked()]
        event = chance.choice(choices)
        commands = feed(machine, event)
        match event:
            case Tick(at):
                now = at
            case StepCommitted():
                step += 1
            case Published(upto):
                published = upto + 1
            case SnapshotFailed():
                running = None
        while commands:
            command = commands.pop(0)
            match command:
                case StartSnapshot(version, at_step, since):
                    assert running is None
                    assert since == base
                    assert version not in versions
                    assert at_step == step
                    running = command
                case CommitManifest(version):
                    assert running is not None
                    assert (version, running.at_step <= published) == (running.version, True)
                    versions[version] = base = running.at_step
                    running = None
                    commands += feed(machine, ManifestCommitted(version))
                case TrimTo(oldest):
                    assert oldest == sorted(versions.values())[-2]
                case Served(version):
                    assert version is None or version == max(versions)
                case _:
                    raise AssertionError(command)
    assert versions
