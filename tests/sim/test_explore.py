"""The explorer finds what is wrong, by the shortest way, and says so when it has not looked everywhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from anabranch.sim.explore import Action, TooLarge, Violation, explore, replay, walk


class Counters:
    """Two counters up to `top`; `bad` must not be reached, and `trap` (x, y) has no way out."""

    def __init__(
        self, top: int = 3, bad: tuple[int, int] | None = None, trap: tuple[int, int] | None = None
    ) -> None:
        self.top, self.bad, self.trap = top, bad, trap

    def initial(self) -> tuple[int, int]:
        return (0, 0)

    def actions(self, state: tuple[int, int]) -> Iterator[Action[tuple[int, int]]]:
        if state == self.trap:
            return
        x, y = state
        if x < self.top:
            yield Action(("x", x), (x + 1, y))
        if y < self.top:
            yield Action(("y", y), (x, y + 1))

    def violation(self, state: tuple[int, int]) -> str | None:
        return "bad" if state == self.bad else None

    def settled(self, state: tuple[int, int]) -> bool:
        return state == (self.top, self.top)


class FaultOnly(Counters):
    """The only way on from (1, 1) is a fault, which nobody may count on."""

    def actions(self, state: tuple[int, int]) -> Iterator[Action[tuple[int, int]]]:
        for action in super().actions(state):
            yield action._replace(fault=state == (1, 1))


def test_every_state_and_every_transition_is_counted_once() -> None:
    found = explore(Counters(top=3))
    assert (found.states, found.transitions, found.settled) == (16, 24, 1)


def test_the_shortest_trace_is_shown() -> None:
    with pytest.raises(Violation) as caught:
        explore(Counters(top=5, bad=(2, 0)))
    assert caught.value.trace == ("x 0", "x 1")
    assert "1. x 0" in str(caught.value)
    assert str(caught.value).startswith("bad")


def test_a_deadlock_is_a_violation() -> None:
    with pytest.raises(Violation, match="settles") as caught:
        explore(Counters(trap=(1, 0)))
    assert caught.value.trace == ("x 0",)


def test_a_state_that_only_a_fault_leads_out_of_is_a_violation() -> None:
    with pytest.raises(Violation, match="settles"):
        explore(FaultOnly())


def test_a_case_beyond_the_limit_is_not_a_success() -> None:
    with pytest.raises(TooLarge):
        explore(Counters(top=100), limit=50)


def test_a_walk_is_the_same_for_the_same_seed() -> None:
    assert walk(Counters(top=4), seed=1) == walk(Counters(top=4), seed=1) == 8


def test_a_walks_trace_is_shortened() -> None:
    class AnyX(Counters):
        def violation(self, state: tuple[int, int]) -> str | None:
            return "bad" if state[0] == 3 else None

    with pytest.raises(Violation, match="seed 5") as caught:
        walk(AnyX(top=50), seed=5)
    assert caught.value.trace == ("x 0", "x 1", "x 2")


def test_a_walk_into_a_dead_end_is_a_violation() -> None:
    with pytest.raises(Violation, match="nothing is possible"):
        walk(Counters(top=2, trap=(2, 0)), seed=next(_seeds_into_the_trap()))


def _seeds_into_the_trap() -> Iterator[int]:
    for seed in range(100):
        try:
            walk(Counters(top=2, trap=(2, 0)), seed)
        except Violation:
            yield seed


def test_replay_leaves_out_what_is_not_possible() -> None:
    state, taken = replay(Counters(top=2), [("x", 0), ("x", 0), ("y", 0)])
    assert state == (1, 1)
    assert taken == [("x", 0), ("y", 0)]
