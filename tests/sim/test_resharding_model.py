"""Shards split and merge through all interleavings of small cases; broken drivers and tasks must be caught."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.protocol import orders
from anabranch.protocol.orders import Settings
from anabranch.sim.copies import Cargo, Fence, Store, Tasks
from anabranch.sim.explore import Violation, explore, walk
from anabranch.sim.resharding import Case, Place, Resharding, State

SPLIT, MERGE = Case(1, 2), Case(2, 1)


def name_of(case: Case) -> str:
    return f"{case.before} to {case.after}"


SMALL = {
    "nothing goes wrong": {"idle": 3, "most_rounds": 3},
    "a failure with a straggler": {"failures": 1, "stragglers": 1},
    "cancelled, a failure": {"cancels": 1, "failures": 1},
    "cancelled, a crash": {"cancels": 1, "crashes": 1},
    "a crash with a straggler": {"crashes": 1, "stragglers": 1},
    "copying fails, a task of it goes on": {"copy_failures": 1, "stragglers": 1},
    "copying fails three times": {"copy_failures": 3},
    "cancelled, copying fails twice": {"cancels": 1, "copy_failures": 2},
    "a checkpoint, a failure": {"checkpoints": 1, "failures": 1},
    "cancelled, a checkpoint": {"cancels": 1, "checkpoints": 1},
    "copying fails, a crash": {"copy_failures": 1, "crashes": 1},
}


@pytest.mark.parametrize("base", [SPLIT, MERGE, Case(1, 4, idle=0), Case(4, 2, idle=0)], ids=name_of)
@pytest.mark.parametrize("name", SMALL)
def test_all_interleavings(name: str, base: Case) -> None:
    chances = {kind: count for kind, count in SMALL[name].items() if kind != "idle" or base.idle}
    assert explore(Resharding(replace(base, **chances))).settled > 0


@pytest.mark.slow
@pytest.mark.parametrize("base", [SPLIT, MERGE], ids=name_of)
@pytest.mark.parametrize("spared", ["failures", "crashes", "cancels", "copy_failures", "checkpoints"])
def test_all_interleavings_of_everything_but_one(spared: str, base: Case) -> None:
    once = replace(
        base, idle=1, failures=1, crashes=1, stragglers=1, cancels=1, copy_failures=1, checkpoints=1
    )
    assert explore(Resharding(replace(once, **{spared: 0})), limit=2_000_000).settled > 0


@pytest.mark.parametrize("base", [Case(2, 8, keys=16), Case(8, 2, keys=16), Case(6, 3, keys=12)], ids=name_of)
def test_random_ways(base: Case) -> None:
    many = replace(
        base, idle=4, failures=3, crashes=3, stragglers=3, cancels=1, copy_failures=3, checkpoints=2
    )
    for seed in range(25):
        walk(Resharding(many), seed)


class GoesOnWithoutCopies(Resharding):
    """Leaves it to the machine what to do without copies: to move piece by piece."""

    def copies_failed(self, state: State) -> State:
        return self._tell(state, orders.CopyFailed(""))


class SwitchesOneByOne(Resharding):
    def settings(self) -> Settings:
        return replace(super().settings(), at_once=False, budget=1)


class DropsWhatIsRead(Resharding):
    def is_read(self, state: State, places: list[Place]) -> bool:
        return False


class SweepsNothing(Resharding):
    def swept(self, state: State) -> tuple[tuple[Place, Store], ...]:
        return state.stores


class WriteWithoutAFence(Tasks):
    def check_fence(self, store: Store, fence: Fence) -> None:
        """Anybody may."""


class DoNotTakeBack(Tasks):
    def taken_back(self, store: Store, step: int, expected: int | None) -> Store:
        return store


class DoNotDelete(Tasks):
    def put(self, store: Store, cargo: Cargo) -> Store:
        return super().put(store, Cargo(cargo.before, tuple(row for row in cargo.rows if row[1] is not None)))


@pytest.mark.parametrize("base", [SPLIT, MERGE], ids=name_of)
@pytest.mark.parametrize(
    ("driver", "chances", "what"),
    [
        (GoesOnWithoutCopies, {"copy_failures": 2}, "refused|not all shards"),
        (DropsWhatIsRead, {"checkpoints": 1}, "checkpoint"),
        (SweepsNothing, {"crashes": 1}, "still|refused"),
    ],
)
def test_a_broken_driver_is_caught(
    driver: type[Resharding], chances: dict[str, int], what: str, base: Case
) -> None:
    explore(Resharding(replace(base, **chances)))
    with pytest.raises(Violation, match=what):
        explore(driver(replace(base, **chances)))


def test_all_shards_change_over_at_once() -> None:
    with pytest.raises(Violation, match="not all shards change over"):
        explore(SwitchesOneByOne(SPLIT))


@pytest.mark.parametrize("base", [SPLIT, MERGE], ids=name_of)
@pytest.mark.parametrize(
    ("tasks", "chances"),
    [
        (WriteWithoutAFence(), {"failures": 1, "stragglers": 1}),
        (DoNotTakeBack(), {"failures": 1}),
        (DoNotDelete(), {"idle": 2}),
    ],
)
def test_broken_tasks_are_caught(tasks: Tasks, chances: dict[str, int], base: Case) -> None:
    with pytest.raises(Violation):
        explore(Resharding(replace(base, **chances), tasks=tasks))
