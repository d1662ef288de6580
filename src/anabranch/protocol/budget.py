"""How many bytes of state may move in a step, so that a step with state lasts about as long as one without.

Theory of operation
-------------------
Nobody knows beforehand what a byte costs: reading, shipping and writing it depend on the keys, the disks and on what
else the machines do.  So the budget is found as TCP finds its window: a step that moved state and stayed within the
*limit* lets it grow by half, and the first one that did not takes it back to where it was; from then on it is *careful*:
it loses a quarter, and grows by a fifth only behind a step that had half of the way to the limit left.  While it went on
by halves and thirds, every second step was beyond the limit, some by half of it; while it grew up to the limit, every third
was.  The more steps a migration took, the longer was its longest.  The limit comes from the *baseline*, the median of the
last steps without state, since what users notice is the difference:

    limit = min(1.25 · baseline + slack, max(target, 1.25 · baseline))

so that short steps may become a little longer, and long ones (above `target_seconds` already) by a quarter at most.  With
half as much more, at half of the load that a flow can take, rows waited longer from step to step.  Steps without state
differ by as much among themselves on a busy machine, so a budget that seems too large shrinks by a quarter only: where
it halved, it sank to its least for no fault of the state.
The baseline goes stale while state moves, as load changes; so one step in eight is left without state (`rests`).
The median, because one collection of garbage in a step without state must not raise the limit for the next ones.  It takes
three steps to be one (`knows`), and nobody knows how long they last with other workers; where the first one counted
alone, and was held up, the budget grew to 7.5 MB, and a step lasted 404 ms instead of 150.  Steps beside a background copy
are no quiet ones, so behind it three others are looked at (`anew`).

A *fixed* budget is what the user said: it neither adapts nor rests.

Safety: **an adapting budget is never below `LEAST`, so that every migration ends.**
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

K = TypeVar("K")

LEAST = 64 << 10
"""Below it, what every move costs whatever its size outweighs the bytes."""
START = 128 << 10
"""Four times as much made the first steps of a small flow three times as long."""
REST_EVERY = 8
_REMEMBERED = 9
_ENOUGH = 3
_FIRST_GROWTH, _FIRST_SHRINKAGE = 3 / 2, 2 / 3
_GROWTH, _SHRINKAGE = 6 / 5, 3 / 4
_STRETCH = 1.25
_SLACK_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Budget:
    """A value: `told` returns the next one.

    >>> budget = Budget().told(0, 0.10)
    >>> budget.told(100_000, 0.11).bytes, budget.told(100_000, 0.50).bytes
    (196608, 87381)
    """

    bytes: int = START
    fixed: bool = False
    target_seconds: float = 0.2
    baseline: tuple[float, ...] = ()
    """Seconds of the last steps without state, oldest first."""
    moves: int = 0
    """Steps with state since the last one without."""
    careful: bool = False
    """Whether a step was beyond the limit."""

    @property
    def rests(self) -> bool:
        """Whether the next step should be left without state, to see how long that lasts."""
        return not self.fixed and self.moves >= REST_EVERY - 1

    @property
    def knows(self) -> bool:
        """Whether enough steps without state were seen to compare with."""
        return self.fixed or len(self.baseline) >= _ENOUGH

    @property
    def limit_seconds(self) -> float:
        """What a step with state may last."""
        if not self.baseline:
            return self.target_seconds
        usual = _STRETCH * median(self.baseline)
        return min(usual + _SLACK_SECONDS, max(self.target_seconds, usual))

    @property
    def _short_seconds(self) -> float:
        """Up to what a step with state lets it grow."""
        if not self.careful or not self.baseline:
            return self.limit_seconds
        return (median(self.baseline) + self.limit_seconds) / 2

    def anew(self) -> Budget:
        """Steps without state were not quiet ones, and from now on they will be: look again how long they last."""
        return replace(self, baseline=())

    def told(self, planned: int, seconds: float) -> Budget:
        """After a step that was to move `planned` bytes (0: none) and lasted so long.

        What was planned, not what was measured, is compared with the budget: it is in the unit of the budget.
        """
        if self.fixed:
            return self
        if planned == 0:
            return replace(self, baseline=(*self.baseline, seconds)[-_REMEMBERED:], moves=0)
        size, careful = self.bytes, self.careful
        if seconds > self.limit_seconds:
            size = max(LEAST, int(size * (_SHRINKAGE if careful else _FIRST_SHRINKAGE)))
            careful = True
        elif seconds <= self._short_seconds and 2 * planned >= size:
            # A step that hardly used its budget says nothing about a larger one.
            size = int(size * (_GROWTH if careful else _FIRST_GROWTH))
        return replace(self, bytes=size, moves=self.moves + 1, careful=careful)


def shares(budget: int, needs: Mapping[K, int]) -> dict[K, int]:
    """The budget divided evenly, where nobody gets more than he needs and what he leaves goes to the others.

    >>> shares(100, {"a": 10, "b": 500, "c": 80})
    {'a': 10, 'c': 45, 'b': 45}
    """
    given: dict[K, int] = {}
    left = budget
    ascending = sorted(needs, key=lambda name: needs[name])
    for place, name in enumerate(ascending):
        given[name] = min(needs[name], left // (len(ascending) - place))
        left -= given[name]
    return given
