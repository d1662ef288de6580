"""Migrations through all interleavings of small cases, and broken machines, drivers and tasks that must be caught."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.model.ids import ShardId, Step
from anabranch.model.placement import Copy
from anabranch.protocol import orders
from anabranch.protocol.migration import Migration
from anabranch.protocol.orders import Settings, Strategy
from anabranch.protocol.pieces import Drop, Piece
from anabranch.sim.copies import Cargo, Fence, Store, Tasks, touched, truth
from anabranch.sim.explore import Violation, explore, walk
from anabranch.sim.migration import Rescaling
from anabranch.sim.scene import Case, Garbage, Place, Plan, State

SETTINGS = {
    Strategy.SUDDEN: Settings(Strategy.SUDDEN),
    Strategy.BATCHED: Settings(Strategy.BATCHED, batch=1),
    Strategy.FLUID: Settings(Strategy.FLUID, budget=1),
    # Fluid is what it becomes.
    Strategy.HOT: Settings(Strategy.HOT, budget=1, switch_below=1, most_rounds=3, batch=2),
}
OUT = Case(owners=(0,), goals=(1,))
IN = Case(owners=(0, 1), goals=(0, 0))
SWAP = Case(owners=(0, 1), goals=(1, 0))
AWAY = Case(owners=(0, 1), goals=(2, 2))
APART = Case(owners=(0, 0), goals=(1, 2))

SMALL = {
    "out, nothing goes wrong": replace(OUT, idle=3),
    "out, cancelled, a failure with a straggler": replace(OUT, cancels=1, failures=1, stragglers=1),
    "out, cancelled, two failures": replace(OUT, cancels=1, failures=2),
    "out, cancelled, a crash": replace(OUT, cancels=1, crashes=1),
    "out, a crash with a straggler": replace(OUT, crashes=1, stragglers=1),
    "out, copying fails twice, a task of it goes on": replace(OUT, copy_failures=2, stragglers=1),
    "out, cancelled, copying fails twice": replace(OUT, cancels=1, copy_failures=2),
    "out, cancelled, a checkpoint": replace(OUT, cancels=1, checkpoints=1, idle=2),
    "out, three keys, cancelled, two crashes": replace(OUT, keys=3, cancels=1, crashes=2, idle=0),
    "in, cancelled, a failure": replace(IN, cancels=1, failures=1),
    "in, a crash, a checkpoint": replace(IN, crashes=1, checkpoints=1),
    "swap, cancelled, no idle step": replace(SWAP, cancels=1, idle=0),
    "away, a failure with a straggler": replace(AWAY, failures=1, stragglers=1, idle=0),
    "apart, a crash": replace(APART, crashes=1),
}

LARGER = {
    "out, everything once": replace(
        OUT, cancels=1, failures=1, crashes=1, stragglers=1, checkpoints=1, copy_failures=1, idle=0
    ),
    "out, three keys, two failures with stragglers": replace(
        OUT, keys=3, cancels=1, failures=2, stragglers=2
    ),
    "out, two crashes with a straggler, cancelled": replace(OUT, crashes=2, stragglers=1, cancels=1),
    "in, a crash with a straggler, cancelled, a checkpoint": replace(
        IN, crashes=1, stragglers=1, cancels=1, checkpoints=1, idle=0
    ),
    "swap, a crash with a straggler, a failure, cancelled": replace(
        SWAP, crashes=1, stragglers=1, failures=1, cancels=1, idle=0
    ),
    "swap, a crash, cancelled": replace(SWAP, crashes=1, cancels=1),
    "apart, cancelled, a checkpoint": replace(APART, cancels=1, checkpoints=1),
    "away, a failure with a straggler, cancelled": replace(AWAY, failures=1, stragglers=1, cancels=1, idle=0),
}


def case(strategy: Strategy, base: Case) -> Case:
    return replace(base, settings=SETTINGS[strategy])


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("name", SMALL)
def test_all_interleavings_of_a_migration(name: str, strategy: Strategy) -> None:
    assert explore(Rescaling(case(strategy, SMALL[name]))).settled > 0


@pytest.mark.parametrize(
    "base",
    [replace(APART, crashes=1, idle=0), replace(APART, cancels=1, idle=0), replace(IN, copy_failures=1)],
)
@pytest.mark.parametrize("batch", [1, None], ids=["each by a copy", "as long as copies pay"])
def test_hot_copies_one_shard_after_the_other(base: Case, batch: int | None) -> None:
    settings = replace(SETTINGS[Strategy.HOT], batch=batch)
    assert explore(Rescaling(replace(base, settings=settings))).settled > 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("name", LARGER)
def test_all_interleavings_of_a_larger_migration(name: str, strategy: Strategy) -> None:
    assert explore(Rescaling(case(strategy, LARGER[name])), limit=2_000_000).settled > 0


def test_a_sudden_one_in_several_steps() -> None:
    settings = Settings(Strategy.SUDDEN, most_per_step=3)
    base = replace(SWAP, settings=settings, cancels=1, idle=0)
    assert explore(Rescaling(base)).settled > 0


def many(strategy: Strategy) -> Case:
    return Case(
        SETTINGS[strategy],
        owners=(0, 0, 1, 1, 2),
        goals=(3, 1, 2, 0, 2),
        keys=4,
        idle=3,
        failures=3,
        crashes=3,
        stragglers=3,
        cancels=1,
        copy_failures=2,
        checkpoints=2,
    )


@pytest.mark.parametrize("strategy", Strategy)
def test_random_ways_of_five_shards(strategy: Strategy) -> None:
    model = Rescaling(many(strategy))
    for seed in range(25):
        walk(model, seed)


def test_random_ways_of_hot_as_long_as_copies_pay() -> None:
    many_by_hot = many(Strategy.HOT)
    model = Rescaling(replace(many_by_hot, settings=replace(many_by_hot.settings, batch=None)))
    for seed in range(25):
        walk(model, seed)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", Strategy)
def test_many_random_ways_of_five_shards(strategy: Strategy) -> None:
    model = Rescaling(many(strategy))
    for seed in range(1000, 1500):
        walk(model, seed)


def test_the_truth_is_counted() -> None:
    """Even keys are touched in even steps, and every third step deletes."""
    assert [truth(0, steps) for steps in range(8)] == [None, 1, 1, None, None, 1, 1, 2]
    assert [truth(1, steps) for steps in range(7)] == [None, None, 1, 1, 2, 2, None]
    assert touched(0, 2)


# Machines that are wrong.  They need not know it: what they do is left to the model.


class Unchecked(Migration):
    def validate(self) -> None:
        """Left to the model."""


class DropsWhenItMoves(Unchecked):
    """Does not wait for the commit."""

    def handle(self, event: orders.Event) -> list[orders.Command]:
        commands = super().handle(event)
        match commands:
            case [orders.MoveInStep(_, pieces)] if any(piece.last for piece in pieces):
                return [*commands, orders.DropSources(tuple(piece.shard for piece in pieces if piece.last))]
        return commands


class TakesAFailureForACommit(Unchecked):
    def handle(self, event: orders.Event) -> list[orders.Command]:
        match event:
            case orders.StepAborted(step):
                commands = super().handle(orders.StepCommitted(step, 0.1, 0))
                self._next_step = step
                return commands
        return super().handle(event)


class CancelsInTheMiddleOfAStep(Unchecked):
    def handle(self, event: orders.Event) -> list[orders.Command]:
        if isinstance(event, orders.CancelAsked) and not self.cancelled:
            self._cancel()
        return super().handle(event)


class MovesOtherThingsAfterAFailure(Unchecked):
    def handle(self, event: orders.Event) -> list[orders.Command]:
        commands = super().handle(event)
        if isinstance(event, orders.StepAborted):
            self._under_way = None
            commands += super()._next_commands()
        return commands


class TurnsRoundAtOnce(Unchecked):
    """Sends a shard back to where its old copy still lies."""

    def _turn_round(self) -> None:
        self._mark([s for s, t in self._tracks.items() if t.turns], drop=Drop.GONE)
        super()._turn_round()


class DoesNotWaitForDrops(Unchecked):
    def _next_commands(self) -> list[orders.Command]:
        commands = super()._next_commands()
        self._dropped(self._tracks)
        return [*commands, *super()._next_commands()]


class LeavesHalfCopies(Unchecked):
    """Forgets that an attempt that failed may have written."""

    def handle(self, event: orders.Event) -> list[orders.Command]:
        commands = super().handle(event)
        if isinstance(event, orders.StepAborted):
            self._mark(self._tracks, arrived=False)
        return commands


class LeavesOutTooMuch(Unchecked):
    """Sends only what changed in the last step, not since the copy."""

    def _pieces(self, held: object) -> tuple[Piece, ...]:
        pieces = super()._pieces(held)  # type: ignore[arg-type]
        return tuple(p if p.since is None else replace(p, since=self._next_step) for p in pieces)


class LetsUndoGo(Unchecked):
    """Does not say from which step on undo is needed."""

    @property
    def copied(self) -> Step | None:
        return None


class SwitchesToAnOldCopy(Unchecked):
    """Takes the copy of before for good after copying has failed."""

    def _copy_again(self) -> list[orders.Command]:
        copies = self._copies
        commands = super()._copy_again()
        if copies.as_of is not None:
            self._copies, self._copying, self.phase = copies, False, orders.Phase.MOVING
            return []
        return commands


class MovesBackForwards(Unchecked):
    """Thinks that what is cut goes on from its cursor when it is cancelled."""

    def _cancel(self) -> None:
        super()._cancel()
        self._mark([s for s, t in self._tracks.items() if not t.whole], back=False)


# Drivers that are wrong.


class LooksAtKeysOnly(Rescaling):
    """Wrong only in what it does not see: a broken machine has to do harm to be caught."""

    expects_the_same = False


class DropsWhatIsRead(Rescaling):
    def is_read(self, state: State, garbage: Garbage) -> bool:
        return False


class HoldsNothing(Rescaling):
    def held(self, state: State) -> tuple[ShardId, ...]:
        return ()


class KeepsTheEpoch(Rescaling):
    def next_epoch(self, state: State) -> int:
        return state.epoch


class SweepsNothing(Rescaling):
    def swept(self, state: State) -> tuple[tuple[Place, Store], ...]:
        return state.stores


class ForgetsWhatIsDone(Rescaling):
    lists_what_is_done = False


class RoutesByTheOldCursor(Rescaling):
    def routed(self, plan: Plan, one: Copy) -> tuple[int, int]:
        before = {(old.shard, old.worker): old for old in plan.before.copies()}
        old = before.get((one.shard, one.worker))
        return (one.low, one.low) if old is None else (old.low, old.end)


# Tasks that are wrong.


class WriteWithoutAFence(Tasks):
    def check_fence(self, store: Store, fence: Fence) -> None:
        """Anybody may."""


class CollectWithoutAFence(Tasks):
    def fence_source(self, store: Store, fence: Fence) -> Store:
        return store


class DoNotTakeBack(Tasks):
    def taken_back(self, store: Store, step: int, expected: int | None) -> Store:
        return store


class DoNotDelete(Tasks):
    def put(self, store: Store, cargo: Cargo) -> Store:
        return super().put(store, Cargo(cargo.before, tuple(row for row in cargo.rows if row[1] is not None)))


SUDDEN, FLUID, HOT = Strategy.SUDDEN, Strategy.FLUID, Strategy.HOT


@pytest.mark.parametrize(
    ("machine", "strategy", "base", "what"),
    [
        (DropsWhenItMoves, SUDDEN, OUT, "lost"),
        (TakesAFailureForACommit, SUDDEN, replace(OUT, failures=1), "lost"),
        (TakesAFailureForACommit, FLUID, replace(OUT, failures=1), "cannot go on"),
        (CancelsInTheMiddleOfAStep, FLUID, replace(OUT, cancels=1), "lost"),
        (MovesOtherThingsAfterAFailure, FLUID, replace(SWAP, cancels=1, failures=1), "it is at step"),
        (TurnsRoundAtOnce, SUDDEN, replace(OUT, cancels=1), "refused"),
        (DoesNotWaitForDrops, SUDDEN, OUT, "still"),
        (LeavesHalfCopies, SUDDEN, replace(OUT, failures=1, cancels=1, crashes=1), "still"),
        (LeavesOutTooMuch, HOT, replace(OUT, idle=2), "refused"),
        (LetsUndoGo, HOT, replace(OUT, idle=2), "refused"),
        (SwitchesToAnOldCopy, HOT, replace(APART, idle=2, copy_failures=1), "refused"),
        (MovesBackForwards, FLUID, replace(OUT, cancels=1), "over"),
    ],
)
def test_a_broken_migration_is_caught(
    machine: type[Migration], strategy: Strategy, base: Case, what: str
) -> None:
    explore(Rescaling(case(strategy, base)))
    with pytest.raises(Violation, match=what):
        explore(LooksAtKeysOnly(case(strategy, base), machine))


def test_pieces_that_change_after_a_failure_are_noticed_before_they_do_harm() -> None:
    base = case(FLUID, replace(OUT, cancels=1, failures=1))
    with pytest.raises(Violation, match="MIG-8"):
        explore(Rescaling(base, MovesOtherThingsAfterAFailure))


@pytest.mark.parametrize(
    ("driver", "strategy", "base", "what"),
    [
        (DropsWhatIsRead, SUDDEN, replace(OUT, checkpoints=1), "checkpoint"),
        (HoldsNothing, FLUID, replace(OUT, checkpoints=1, cancels=1), "checkpoint"),
        (KeepsTheEpoch, SUDDEN, replace(OUT, crashes=1, stragglers=1), "key"),
        (SweepsNothing, SUDDEN, replace(OUT, crashes=1, cancels=1), "still"),
        (ForgetsWhatIsDone, SUDDEN, replace(OUT, crashes=1, cancels=1), "over"),
        (RoutesByTheOldCursor, SUDDEN, OUT, "key"),
        (RoutesByTheOldCursor, FLUID, OUT, "key"),
    ],
)
def test_a_broken_driver_is_caught(
    driver: type[Rescaling], strategy: Strategy, base: Case, what: str
) -> None:
    with pytest.raises(Violation, match=what):
        explore(driver(case(strategy, base)))


@pytest.mark.parametrize(
    ("tasks", "strategy", "base", "what"),
    [
        (WriteWithoutAFence(), SUDDEN, replace(OUT, failures=1, stragglers=1), "key"),
        (CollectWithoutAFence(), FLUID, replace(OUT, crashes=1, stragglers=1), "key"),
        (DoNotTakeBack(), SUDDEN, replace(OUT, failures=1), "key"),
        (DoNotDelete(), HOT, replace(OUT, idle=2), "key"),
        (DoNotDelete(), FLUID, replace(OUT, cancels=1, idle=2), "key"),
    ],
)
def test_broken_tasks_are_caught(tasks: Tasks, strategy: Strategy, base: Case, what: str) -> None:
    with pytest.raises(Violation, match=what):
        explore(Rescaling(case(strategy, base), tasks=tasks))
