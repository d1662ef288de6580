"""Search through everything that a system can do: all of it for small cases, at random for larger ones.

A system is a `Model`: an initial state and, for a state, every action that is possible in it with the
state after it.  States are hashable values, so that two ways to the same state are one.  `explore` goes
breadth-first through all of them, so that the trace of the first violation is the shortest there is;
`walk` follows one seeded random way and shortens the trace that it found by leaving actions out.

Safety is checked in every state.  Liveness is: from every state that can be reached, a settled one can be
reached without any further fault.  A deadlock and a livelock that nothing leads out of both violate it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

S = TypeVar("S")


Label = tuple[object, ...]
"""The words of what happened; put together only when a trace is shown, since most never are."""


class Action(NamedTuple, Generic[S]):
    """`label` is unique among the actions of a state.  `fault`: the system could do without it."""

    label: Label
    after: S
    fault: bool = False


class Model(Protocol[S]):
    def initial(self) -> S: ...

    def actions(self, state: S) -> Iterable[Action[S]]: ...

    def violation(self, state: S) -> str | None:
        """What is wrong with this state; None when every invariant holds."""

    def settled(self, state: S) -> bool:
        """True where the system has done what it is for."""


class Violation(AssertionError):
    """An invariant does not hold; the message is the trace that leads there."""

    def __init__(self, what: str, trace: Sequence[Label]) -> None:
        told = [" ".join(str(word) for word in label) for label in trace]
        steps = "\n".join(f"  {number:3d}. {line}" for number, line in enumerate(told, 1))
        super().__init__(f"{what}\nafter {len(trace)} actions:\n{steps}")
        self.what = what
        self.trace = tuple(told)


class TooLarge(Exception):
    """The case has more states than the limit: it was not explored, which must not look like success."""


@dataclass(frozen=True, slots=True)
class Explored:
    states: int
    transitions: int
    settled: int


def explore(model: Model[S], limit: int = 1_000_000) -> Explored:
    """Every reachable state once.

    Costs time and memory in the number of transitions: some ten thousand of them a second.

    Raises:
        Violation: with the shortest trace to it.
        TooLarge: there are more than `limit` states.
    """
    first = model.initial()
    numbers: dict[S, int] = {first: 0}
    parents: list[tuple[int, Label]] = [(-1, ())]
    before: list[list[int]] = [[]]  # by state, the states that lead to it without a fault
    settled: list[int] = []
    transitions = 0
    queue: deque[tuple[int, S]] = deque([(0, first)])
    while queue:
        number, state = queue.popleft()
        wrong = model.violation(state)
        if wrong is not None:
            raise Violation(wrong, _trace(parents, number))
        if model.settled(state):
            settled.append(number)
        for action in model.actions(state):
            transitions += 1
            after = numbers.get(action.after)
            if after is None:
                after = len(parents)
                if after >= limit:
                    raise TooLarge(f"more than {limit} states; {len(queue)} are waiting to be explored")
                numbers[action.after] = after
                parents.append((number, action.label))
                before.append([])
                queue.append((after, action.after))
            if not action.fault:
                before[after].append(number)
    stuck = _cannot_reach(settled, before)
    if stuck is not None:
        raise Violation("nothing that can still happen settles it", _trace(parents, stuck))
    return Explored(len(parents), transitions, len(settled))


def _cannot_reach(goals: Iterable[int], before: Sequence[Sequence[int]]) -> int | None:
    """The earliest state from which no goal can be reached."""
    reaches = bytearray(len(before))
    stack = list(goals)
    while stack:
        number = stack.pop()
        if not reaches[number]:
            reaches[number] = 1
            stack.extend(before[number])
    stuck = reaches.find(0)
    return None if stuck < 0 else stuck


def _trace(parents: Sequence[tuple[int, Label]], number: int) -> list[Label]:
    labels: list[Label] = []
    while number > 0:
        number, label = parents[number]
        labels.append(label)
    return labels[::-1]


def walk(model: Model[S], seed: int, length: int = 10_000) -> int:
    """One random way, until nothing is possible or the system is settled; returns how many actions it took.

    A way that is not settled after `length` actions counts as a violation: random choices are fair, so a
    system that can settle does.

    Raises:
        Violation: with a trace out of which no single action can be left.
    """
    chance = random.Random(seed)
    state = model.initial()
    trace: list[Label] = []
    while True:
        wrong = model.violation(state)
        if wrong is not None:
            raise _shortest_of(model, wrong, trace, seed)
        if model.settled(state):
            return len(trace)
        actions = list(model.actions(state))
        if not actions:
            raise _shortest_of(model, "nothing is possible, and it is not settled", trace, seed)
        if len(trace) == length:
            raise Violation(f"not settled after {length} actions (seed {seed})", trace[-50:])
        action = chance.choice(actions)
        trace.append(action.label)
        state = action.after


def replay(model: Model[S], labels: Iterable[Label]) -> tuple[S, list[Label]]:
    """Follows the labels as far as they are possible, leaving out those that are not; stops at a violation."""
    state = model.initial()
    taken: list[Label] = []
    for label in labels:
        if model.violation(state) is not None:
            break
        after = next((action.after for action in model.actions(state) if action.label == label), None)
        if after is not None:
            state = after
            taken.append(label)
    return state, taken


def _shortest_of(model: Model[S], wrong: str, trace: list[Label], seed: int) -> Violation:
    def fails(labels: list[Label]) -> tuple[str, list[Label]] | None:
        state, taken = replay(model, labels)
        found = model.violation(state)
        if found is None and not model.settled(state) and not list(model.actions(state)):
            found = wrong
        return None if found is None else (found, taken)

    size = max(1, len(trace) // 2)
    while True:
        at = 0
        shorter = False
        while at < len(trace):
            found = fails(trace[:at] + trace[at + size :])
            if found is None:
                at += size
            else:
                wrong, trace = found
                shorter = True
        if size == 1 and not shorter:
            return Violation(f"{wrong} (seed {seed})", trace)
        size = max(1, size // 2)
