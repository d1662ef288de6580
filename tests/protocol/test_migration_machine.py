"""Which pieces move in which step, what is dropped when, and what a cancel turns back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from anabranch.errors import EngineError
from anabranch.model.ids import ShardId, Step, WorkerId
from anabranch.protocol.migration import Migration
from anabranch.protocol.orders import (
    CancelAsked,
    Command,
    CopyDone,
    CopyFailed,
    DropCopies,
    Dropped,
    DropSources,
    Event,
    Finish,
    MoveInStep,
    Phase,
    Prepared,
    Settings,
    StartCopy,
    StepAborted,
    StepAsked,
    StepCommitted,
    Strategy,
    Weighed,
)
from anabranch.protocol.pieces import Move, Piece

SUDDEN = Settings(Strategy.SUDDEN)
FLUID = Settings(Strategy.FLUID, budget=40)
HOT = Settings(Strategy.HOT, switch_below=10, batch=2)


def move(shard: int, source: int = 0, target: int = 9, size: int = 100) -> Move:
    return Move(ShardId(shard), shard * 100, shard * 100 + 100, WorkerId(source), WorkerId(target), size)


def shards(*numbers: int) -> tuple[ShardId, ...]:
    return tuple(map(ShardId, numbers))


class Driver:
    """Talks to a machine as the runtime does, and validates it after every event."""

    def __init__(self, machine: Migration, step: int = 0) -> None:
        self.machine = machine
        self.step = Step(step)
        self.commands: list[Command] = []

    def tell(self, event: Event) -> list[Command]:
        said = self.machine.handle(event)
        self.machine.validate()
        self.commands += said
        return said

    def ask(self) -> tuple[Piece, ...]:
        (answer,) = self.tell(StepAsked(self.step))
        assert isinstance(answer, MoveInStep)
        assert answer.step == self.step
        return answer.pieces

    def commit(self, seconds: float = 0.1, moved: int = 0) -> list[Command]:
        said = self.tell(StepCommitted(self.step, seconds, moved))
        self.step = Step(self.step + 1)
        return said

    def run(self) -> list[list[tuple[int, int, int]]]:
        """Steps until it is over, drops at once; shard, lowest hash and end of every piece."""
        seen = []
        todo = []
        while self.machine.phase is not Phase.DONE:
            seen.append([(p.shard, p.low, p.end) for p in self.ask()])
            todo += self.commit()
            while todo:
                match todo.pop(0):
                    case DropSources(gone) | DropCopies(gone):
                        todo += self.tell(Dropped(gone))
                    case StartCopy():
                        todo += self.tell(CopyDone(self.step, 0))
            assert len(seen) < 1000
        return seen


def prepared(
    settings: Settings,
    moves: Sequence[Move],
    cursors: Mapping[ShardId, int] | None = None,
    **more: object,
) -> Driver:
    driver = Driver(Migration(settings, moves, cursors, **more))  # type: ignore[arg-type]
    driver.tell(Prepared({}))
    return driver


# Strategies


def test_sudden_moves_all_in_the_first_step_after_it_is_prepared() -> None:
    driver = Driver(Migration(SUDDEN, [move(0), move(1), move(2, source=1)]))
    assert driver.ask() == ()
    driver.commit()
    driver.tell(Prepared({}))
    assert driver.run() == [[(0, 0, 100), (1, 100, 200), (2, 200, 300)]]
    assert driver.commands[-2:] == [DropSources(shards(0, 1, 2)), Finish(cancelled=False)]


def test_sudden_takes_several_steps_for_more_than_fits_one() -> None:
    settings = Settings(Strategy.SUDDEN, most_per_step=150)
    assert prepared(settings, [move(0), move(1), move(2, source=1)]).run() == [
        [(0, 0, 75), (2, 200, 275)],
        [(0, 75, 100), (1, 100, 200), (2, 275, 300)],
    ]


def test_batched_moves_whole_shards_and_takes_sources_in_turn() -> None:
    settings = Settings(Strategy.BATCHED, batch=2)
    moves = [move(0), move(1), move(2), move(3, source=1), move(4, source=1)]
    assert prepared(settings, moves).run() == [
        [(0, 0, 100), (3, 300, 400)],
        [(1, 100, 200), (4, 400, 500)],
        [(2, 200, 300)],
    ]


@pytest.mark.parametrize(("count", "steps"), [(1, 1), (8, 8), (9, 5), (64, 8)])
def test_batched_takes_about_eight_steps(count: int, steps: int) -> None:
    assert len(prepared(Settings(Strategy.BATCHED), [move(s) for s in range(count)]).run()) == steps


def test_fluid_cuts_a_large_shard() -> None:
    assert prepared(FLUID, [move(0)]).run() == [[(0, 0, 40)], [(0, 40, 80)], [(0, 80, 100)]]


def test_fluid_moves_sources_side_by_side_and_small_shards_together() -> None:
    moves = [move(0, size=10), move(1, size=10), move(2, size=15), move(3, source=1, size=30)]
    assert prepared(FLUID, moves).run() == [
        [(0, 0, 100), (1, 100, 200), (3, 300, 366)],
        [(3, 366, 400), (2, 200, 300)],
    ]


def test_fluid_goes_on_however_small_its_budget() -> None:
    driver = prepared(
        Settings(Strategy.FLUID, budget=1), [move(0, size=10**6), move(1, source=1, size=10**6)]
    )
    assert [(p.low, p.end) for p in driver.ask()] == [(0, 1)]


def test_fluid_leaves_a_step_without_state_now_and_then() -> None:
    driver = prepared(Settings(Strategy.FLUID, first_budget=1000), [move(0, size=10**8)])
    moved = []
    for _ in range(19):
        moved.append(bool(driver.ask()))
        driver.commit(seconds=9.0)
    assert moved == [False] * 3 + ([True] * 7 + [False]) * 2


def test_sizes_are_those_of_the_weighing() -> None:
    driver = Driver(Migration(FLUID, [move(0)]))
    driver.tell(Prepared({ShardId(0): 40}))
    assert driver.run() == [[(0, 0, 100)]]


def test_sizes_are_those_of_the_last_weighing() -> None:
    driver = prepared(FLUID, [move(0, size=0), move(1, size=0), move(2, size=0)])
    driver.tell(Weighed({ShardId(0): 40, ShardId(1): 100, ShardId(2): 20}))
    assert [(p.shard, p.low, p.end) for p in driver.ask()] == [(0, 0, 100)]
    # Not of pieces that are under way: the next attempt has the same.
    driver.tell(Weighed({ShardId(0): 1000}))
    driver.commit(moved=40)
    assert driver.machine.progress.bytes_left == 120
    driver.tell(Weighed({ShardId(1): 80}))
    assert [(p.shard, p.low, p.end) for p in driver.ask()] == [(1, 100, 150)]


def test_shards_that_must_come_back_are_not_where_they_shall_be() -> None:
    driver = prepared(Settings(Strategy.BATCHED, batch=1), [move(0), move(1)])
    driver.ask()
    driver.commit()
    assert (driver.machine.progress.shards_moved, driver.machine.progress.bytes_left) == (1, 100)
    driver.tell(CancelAsked())
    assert (driver.machine.progress.shards_moved, driver.machine.progress.bytes_left) == (1, 100)
    driver.tell(Dropped(shards(0)))
    assert (driver.machine.progress.shards_moved, driver.machine.progress.bytes_left) == (1, 100)
    driver.ask()
    driver.commit()
    assert (driver.machine.progress.shards_moved, driver.machine.progress.bytes_left) == (2, 0)


def test_hot_copies_until_little_is_left_and_then_switches() -> None:
    driver = Driver(Migration(HOT, [move(0), move(1)]))
    assert driver.tell(Prepared({})) == [StartCopy(shards(0, 1), None)]
    assert driver.machine.phase is Phase.COPYING
    assert driver.ask() == ()
    driver.commit()
    assert driver.tell(CopyDone(Step(1), 200)) == [StartCopy(shards(0, 1), Step(1))]
    assert driver.ask() == ()
    # It switches in the next step, not in the one that is under way.
    assert driver.tell(CopyDone(Step(1), 5)) == []
    driver.commit()
    pieces = driver.ask()
    assert [(p.shard, p.since, p.last) for p in pieces] == [(0, Step(1), True), (1, Step(1), True)]
    assert driver.commit() == [DropSources(shards(0, 1))]


@pytest.mark.parametrize(
    ("sizes", "rounds"),
    [
        ([10], 1),  # little enough
        ([100, 40, 10], 3),
        ([100, 50], 2),  # it does not shrink fast enough to be worth another round
        ([100, 49, 24, 11], 4),  # the most
    ],
)
def test_rounds_of_hot(sizes: list[int], rounds: int) -> None:
    driver = Driver(Migration(HOT, [move(0)]))
    driver.tell(Prepared({}))
    for number, size in enumerate(sizes, 1):
        driver.tell(CopyDone(Step(0), size))
        assert driver.machine.phase is (Phase.MOVING if number == rounds else Phase.COPYING)


def test_hot_copies_anew_once_and_then_goes_on_as_fluid() -> None:
    driver = Driver(Migration(Settings(Strategy.HOT, budget=40, batch=2), [move(0), move(1)]))
    driver.tell(Prepared({}))
    driver.tell(CopyDone(Step(0), 10**9))
    assert driver.tell(CopyFailed("disk")) == [StartCopy(shards(0, 1), None)]
    assert driver.tell(CopyFailed("disk")) == [DropCopies(shards(0, 1))]
    assert driver.machine.strategy is Strategy.FLUID
    # What is being dropped is in the way.
    assert driver.ask() == ()
    driver.tell(Dropped(shards(1)))
    driver.commit()
    assert [(p.shard, p.low, p.end, p.since) for p in driver.ask()] == [(1, 100, 140, None)]


# Faults


def test_what_was_not_committed_does_not_count() -> None:
    driver = prepared(FLUID, [move(0)])
    first = driver.ask()
    assert driver.tell(StepAborted(Step(0))) == []
    assert driver.ask() == first
    driver.commit()
    assert [p.low for p in driver.ask()] == [40]


def test_a_step_that_failed_moves_the_same_again_though_it_is_cancelled() -> None:
    """Else a copy that only the failed attempt wrote to would stay as that one left it."""
    driver = prepared(FLUID, [move(0)])
    first = driver.ask()
    driver.tell(CancelAsked())
    assert driver.tell(StepAborted(Step(0))) == []
    assert driver.ask() == first
    driver.commit()
    assert [(p.low, p.end, p.back) for p in driver.ask()] == [(0, 40, True)]


def test_a_step_that_failed_without_state_gets_none_when_the_copies_are_ready() -> None:
    driver = Driver(Migration(HOT, [move(0)]))
    driver.tell(Prepared({}))
    assert driver.ask() == ()
    driver.tell(StepAborted(Step(0)))
    driver.tell(CopyDone(Step(0), 1))
    assert driver.ask() == ()
    driver.commit()
    assert [p.since for p in driver.ask()] == [Step(0)]


def test_goes_on_after_a_crash() -> None:
    cursors = {ShardId(0): 100, ShardId(1): 150}
    driver = Driver(Migration(FLUID, [move(0), move(1), move(2)], cursors, Step(7)), step=7)
    assert driver.tell(Prepared({})) == [DropSources(shards(0))]
    driver.tell(Dropped(shards(0)))
    assert driver.run() == [
        [(1, 150, 190)],
        [(1, 190, 200)],
        [(2, 200, 240)],
        [(2, 240, 280)],
        [(2, 280, 300)],
    ]


def test_hot_that_finds_cut_shards_is_fluid() -> None:
    driver = prepared(Settings(Strategy.HOT, budget=60), [move(0), move(1)], {ShardId(0): 50})
    assert driver.commands == []
    assert driver.run()[0] == [(0, 50, 100)]


def test_nothing_to_do_is_over_when_it_is_prepared() -> None:
    assert Migration(SUDDEN, []).handle(Prepared({})) == [Finish(cancelled=False)]


# Cancelling


@pytest.mark.parametrize("strategy", Strategy)
def test_cancelled_before_anything_moved(strategy: Strategy) -> None:
    driver = Driver(Migration(Settings(strategy), [move(0)]))
    assert driver.tell(CancelAsked()) == [Finish(cancelled=True)]
    assert driver.tell(Prepared({})) == []
    assert driver.ask() == ()


def test_cancelled_after_a_crash_before_anything_moved() -> None:
    """Copies of the life before may be anywhere."""
    driver = Driver(Migration(FLUID, [move(0)], cursors={}))
    assert driver.tell(CancelAsked()) == [DropCopies(shards(0))]
    assert driver.tell(Dropped(shards(0))) == [Finish(cancelled=True)]


def test_cancelled_after_a_crash_when_something_is_cut() -> None:
    driver = Driver(Migration(FLUID, [move(0), move(1)], {ShardId(0): 20}))
    assert driver.tell(CancelAsked()) == [DropCopies(shards(1))]
    assert driver.tell(Dropped(shards(1))) == []
    assert driver.machine.phase is Phase.PREPARING
    driver.tell(Prepared({}))
    assert [(p.shard, p.low, p.end, p.back) for p in driver.ask()] == [(0, 0, 20, True)]


def test_one_that_was_cancelled_before_a_crash_waits_for_the_sweep() -> None:
    driver = Driver(Migration(FLUID, [], {}, cancelled=True))
    driver.ask()
    assert driver.commit() == []
    assert driver.tell(Prepared({})) == [Finish(cancelled=True)]


def test_nothing_comes_back_into_a_copy_that_a_checkpoint_reads() -> None:
    driver = prepared(FLUID, [move(0)])
    driver.ask()
    driver.commit()
    driver.tell(CancelAsked())
    assert driver.machine.handle(StepAsked(Step(1), held=shards(0))) == [MoveInStep(Step(1), ())]
    driver.commit()
    assert [(p.low, p.end, p.back) for p in driver.ask()] == [(0, 40, True)]


def test_a_checkpoint_does_not_hold_what_goes_forward() -> None:
    driver = prepared(FLUID, [move(0)])
    (answer,) = driver.tell(StepAsked(Step(0), held=shards(0)))
    assert isinstance(answer, MoveInStep)
    assert answer.pieces


def test_hot_cancelled_while_it_copies() -> None:
    driver = Driver(Migration(HOT, [move(0), move(1)]))
    driver.tell(Prepared({}))
    assert driver.tell(CancelAsked()) == [DropCopies(shards(0, 1))]
    assert driver.tell(CopyDone(Step(0), 1)) == []
    assert driver.ask() == ()
    assert driver.tell(Dropped(shards(0))) == []
    assert driver.tell(Dropped(shards(1))) == [Finish(cancelled=True)]


def test_a_cut_shard_comes_back_the_way_it_went() -> None:
    driver = prepared(FLUID, [move(0)])
    for _ in range(2):
        driver.ask()
        driver.commit()
    assert driver.tell(CancelAsked()) == []
    (piece,) = driver.ask()
    assert piece == Piece(ShardId(0), 40, 80, WorkerId(9), WorkerId(0), last=False, back=True)
    driver.commit()
    assert driver.ask() == (Piece(ShardId(0), 0, 40, WorkerId(9), WorkerId(0), last=True, back=True),)
    assert driver.commit() == [DropCopies(shards(0))]
    assert driver.machine.phase is Phase.DROPPING
    assert driver.tell(Dropped(shards(0))) == [Finish(cancelled=True)]


def test_a_shard_that_is_done_moves_the_other_way_when_its_old_copy_is_gone() -> None:
    driver = prepared(FLUID, [move(0, size=40), move(1)])
    driver.ask()
    assert driver.commit() == [DropSources(shards(0))]
    assert driver.tell(CancelAsked()) == []
    assert driver.ask() == ()
    driver.tell(Dropped(shards(0)))
    driver.commit()
    assert driver.ask() == (Piece(ShardId(0), 0, 100, WorkerId(9), WorkerId(0), last=True),)
    assert driver.commit() == [DropSources(shards(0))]
    assert driver.tell(Dropped(shards(0))) == [Finish(cancelled=True)]


@pytest.mark.parametrize("strategy", Strategy)
def test_everything_comes_back_after_the_switch(strategy: Strategy) -> None:
    driver = prepared(Settings(strategy, batch=2, budget=1000), [move(0), move(1), move(2)])
    while driver.machine.phase is not Phase.DROPPING:
        if driver.machine.phase is Phase.COPYING:
            driver.tell(CopyDone(driver.step, 0))
        driver.ask()
        driver.commit()
    driver.tell(CancelAsked())
    assert driver.machine.phase is Phase.MOVING
    driver.tell(Dropped(shards(0, 1, 2)))
    steps = driver.run()
    assert [piece for step in steps for piece in step] == [(0, 0, 100), (1, 100, 200), (2, 200, 300)]
    assert len(steps) == (2 if strategy is Strategy.BATCHED else 1)
    assert driver.commands[-1] == Finish(cancelled=True)
    assert {m.target for m in driver.machine.moves} == {0}


def test_a_cancel_waits_for_the_step_under_way() -> None:
    driver = prepared(FLUID, [move(0)])
    driver.ask()
    driver.tell(CancelAsked())
    assert not driver.machine.cancelled
    driver.commit()
    assert [(p.low, p.end, p.back) for p in driver.ask()] == [(0, 40, True)]


def test_comes_back_after_a_crash_of_a_cancelled_one() -> None:
    turned = Move(ShardId(1), 100, 200, WorkerId(9), WorkerId(0), 100)
    cursors = {ShardId(0): 30, ShardId(1): 180}
    driver = prepared(
        Settings(Strategy.SUDDEN), [move(0), turned], cursors, backwards=shards(0), cancelled=True
    )
    assert sorted((p.shard, p.low, p.end, p.target, p.back) for p in driver.ask()) == [
        (0, 0, 30, 0, True),
        (1, 180, 200, 0, False),
    ]
    assert driver.commit() == [DropSources(shards(1)), DropCopies(shards(0))]
    assert driver.tell(Dropped(shards(0, 1))) == [Finish(cancelled=True)]


def test_a_move_may_stay_with_its_worker() -> None:
    """A shard that is split or merged is copied where it is, under another number."""
    driver = Driver(Migration(HOT, [move(0, source=1, target=1)]))
    assert driver.tell(Prepared({})) == [StartCopy(shards(0), None)]
    driver.tell(CopyDone(Step(0), 1))
    assert [(p.source, p.target, p.last, p.since) for p in driver.ask()] == [(1, 1, True, Step(0))]
    assert driver.commit() == [DropSources(shards(0))]


# What cannot be


def test_one_step_at_a_time() -> None:
    driver = prepared(FLUID, [move(0)])
    driver.ask()
    with pytest.raises(EngineError, match="step 1"):
        driver.machine.handle(StepAsked(Step(1)))
    with pytest.raises(EngineError, match="step 3"):
        driver.machine.handle(StepCommitted(Step(3), 0.1, 0))
    driver.tell(StepAborted(Step(0)))
    with pytest.raises(EngineError, match="step 0"):
        driver.machine.handle(StepCommitted(Step(0), 0.1, 0))
    with pytest.raises(EngineError, match="step 1"):
        driver.machine.handle(StepAsked(Step(1)))


@pytest.mark.parametrize(
    ("moves", "cursors"),
    [
        ([move(0), move(0, source=1)], {}),
        ([move(0)], {ShardId(1): 100}),
        ([move(0)], {ShardId(0): 101}),
        ([Move(ShardId(0), 5, 5, WorkerId(0), WorkerId(1), 0)], {}),
    ],
)
def test_contradictions_are_refused(moves: list[Move], cursors: dict[ShardId, int]) -> None:
    with pytest.raises(EngineError):
        Migration(SUDDEN, moves, cursors)


def copied(settings: Settings, moves: list[Move], size: int) -> Driver:
    """A hot migration whose last round has brought so many bytes."""
    driver = Driver(Migration(settings, moves))
    driver.tell(Prepared({}))
    driver.tell(CopyDone(Step(0), size))
    assert driver.machine.phase is Phase.MOVING
    return driver


def test_hot_switches_no_more_shards_in_a_step_than_the_budget_allows() -> None:
    settings = Settings(Strategy.HOT, budget=50, switch_below=1000, batch=6)
    # 20 bytes each, from two workers that give side by side.
    driver = copied(settings, [move(shard, source=shard % 2, target=2) for shard in range(6)], 120)
    switched = []
    while driver.machine.phase is Phase.MOVING:
        pieces = driver.ask()
        assert all(piece.last and piece.since == Step(0) for piece in pieces)
        switched.append([piece.shard for piece in pieces])
        driver.commit()
    assert switched == [[0, 1], [2, 3], [4, 5]]


def test_hot_copies_some_shards_and_switches_to_them_before_it_copies_the_next() -> None:
    settings = Settings(Strategy.HOT, budget=1000, switch_below=1000, batch=2)
    driver = copied(settings, [move(shard, source=shard % 2) for shard in range(3)], 120)
    assert [(piece.shard, piece.since) for piece in driver.ask()] == [(0, Step(0)), (1, Step(0))]
    assert driver.commit() == [DropSources(shards(0, 1)), StartCopy(shards(2), None)]
    assert driver.machine.copied is None
    assert driver.ask() == (), "it is being copied"
    driver.commit()
    driver.tell(CopyDone(Step(2), 60))
    assert [(piece.shard, piece.since) for piece in driver.ask()] == [(2, Step(2))]
    assert driver.commit() == [DropSources(shards(2))]


def grouped(rounds: int, again: int) -> Driver:
    """Sixteen shards go hot; so many groups are copied, a thousand bytes a shard, and of each shard so many come again."""
    driver = prepared(
        Settings(Strategy.HOT, budget=10**6, switch_below=10**6), [move(n, n % 2) for n in range(16)]
    )
    for _ in range(rounds):
        start = driver.commands[-1]
        assert isinstance(start, StartCopy)
        driver.tell(CopyDone(driver.step, 1000 * len(start.shards)))
        assert [piece.shard for piece in driver.ask()] == list(start.shards)
        driver.commit(moved=again * len(start.shards))
    return driver


def test_hot_begins_with_one_shard_and_then_takes_more_up_to_an_eighth() -> None:
    driver = grouped(rounds=4, again=50)
    copies = [command.shards for command in driver.commands if isinstance(command, StartCopy)]
    assert copies == [shards(0), shards(1, 2), shards(3, 4), shards(5, 6), shards(7, 8)]
    assert driver.machine.strategy is Strategy.HOT


def test_hot_goes_on_as_fluid_where_what_it_copies_changes_too_fast() -> None:
    driver = grouped(rounds=1, again=51)
    assert driver.commands[-1] == DropSources(shards(0)), "nothing else is copied"
    assert driver.machine.strategy is Strategy.FLUID
    assert driver.machine.copied is None
    assert {piece.since for piece in driver.ask()} == {None}


def test_fluid_behind_hot_does_not_take_steps_beside_a_copy_for_quiet_ones() -> None:
    driver = prepared(Settings(Strategy.HOT), [move(0, size=10**6), move(1, size=10**6)])
    for _ in range(5):
        assert driver.ask() == ()
        driver.commit(seconds=0.4)
    driver.tell(CopyDone(driver.step, 10**6))
    assert [(piece.shard, piece.since) for piece in driver.ask()] == [(0, driver.step)]
    driver.commit(seconds=0.4, moved=10**5)
    assert driver.machine.strategy is Strategy.FLUID
    for _ in range(3):
        assert driver.ask() == (), "it looks how long a step without state lasts"
        driver.commit(seconds=0.1)
    before = driver.machine.budget
    assert driver.ask()
    driver.commit(seconds=0.4, moved=before)
    assert driver.machine.budget < before, "0.4 s is too long where others last 0.1"


def test_hot_copies_fewer_shards_at_a_time_before_it_gives_up() -> None:
    driver = grouped(rounds=2, again=50)
    for copied_shards, again in ((shards(3, 4), 101), (shards(5), 51)):
        assert driver.commands[-1] == StartCopy(copied_shards, None)
        driver.tell(CopyDone(driver.step, 1000 * len(copied_shards)))
        driver.ask()
        driver.commit(moved=again)
    assert driver.machine.strategy is Strategy.FLUID


def test_rounds_count_as_sent_again() -> None:
    settings = Settings(Strategy.HOT, switch_below=10)
    driver = Driver(Migration(settings, [move(0), move(1)]))
    driver.tell(Prepared({}))
    driver.tell(CopyDone(Step(0), 1000))
    driver.tell(CopyDone(Step(0), 51))
    driver.tell(CopyDone(Step(0), 0))
    driver.ask()
    driver.commit()
    assert driver.machine.strategy is Strategy.FLUID


def test_hot_switches_at_least_one_shard() -> None:
    driver = copied(Settings(Strategy.HOT, budget=1, switch_below=1000, batch=2), [move(0), move(1)], 100)
    assert [piece.shard for piece in driver.ask()] == [0]


def test_shards_that_split_switch_at_once() -> None:
    settings = Settings(Strategy.HOT, budget=1, switch_below=1000, at_once=True)
    driver = copied(settings, [move(0), move(1)], 100)
    assert [piece.shard for piece in driver.ask()] == [0, 1]
