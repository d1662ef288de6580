"""How many rows the next step takes, so that it lasts about as long as the user wants.

A step's duration is close to `fixed + per_row · rows`.  Both are estimated from recent steps, with
old ones forgotten by and by.  Steps of one size would tell nothing of either, so sizes sway around what is
wanted.  Where a step lasted less than half as long as they said, or two in a row more than twice as long, both
are wrong by as much.  One late step alone was held up by something that has nothing to do with its rows (a new process,
another program, a busy disk), and smaller steps behind it would only keep the flow from catching up: it is not counted.
Estimates can be wrong all the same, and go stale while steps have other work to do.  So where a flow loses ground, its
backlog growing from step to step though steps take all that they may, the next ones take more, by and by: what a
larger step costs those who wait is less than what a growing backlog does.
Estimates that are wrong can also agree with all that is seen: steps of 100 rows that last 0.3 s say the same of 0.3 s and no
cost per row as of 0.15 s and 1.5 ms a row, and if the latter is believed there will be no others.  So where more rows wait
than a step takes, one now and then *tries* twice as many; seldom, as long as that lasts as long as it should.
Pure: it reads no clock.

SIZE-1  The answer never exceeds the row limit, nor twice the largest of recent steps.
SIZE-2  Where the fixed part alone eats the target, a step still gets as much time for rows as
        the fixed part takes: a slow machine must not starve the flow.
SIZE-3  A flow that loses ground gets larger steps until it does not, or until they last twice the target.
SIZE-4  A row is not taken to cost more than a whole recent step did for each of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_FORGET = 0.8
_SWAY = 0.25
"""With steps that were held up by other work, so that the fixed part was most of them, a sway of 0.07 and a longer memory
took the noise for the rows' share, and held steps small for seconds while the backlog grew."""
_HASTE = 1.25
"""By how much a step exceeds the one before it in a flow that loses ground."""
_MOST_HASTE = 8.0
"""An overload that lasts must not be held against the flow for long afterwards."""
_MOST = 1_000.0
"""How many times as long steps may become at once."""
_TRY = 2.0
_TRY_AFTER, _TRY_AFTER_MOST = 4, 256
"""Steps from one try to the next: the fewest, after one that showed rows to be cheaper, and the most."""
_CHEAPER = 0.8
FIRST_ROWS = 10_000
_LEAST = 100
_ALWAYS = 1_000
"""What counts as a recent step's size where all were smaller: a trickle tells nothing of a flood."""


@dataclass(slots=True)
class StepSizer:
    """Estimates from (rows, seconds) of steps that ended."""

    target: float
    max_rows: int
    first: int = FIRST_ROWS
    # The largest recent step, at first `first`; it fades by a twentieth each step, down to _ALWAYS.
    _largest: float = 0.0
    _steps: int = 0
    # Weighted sums over past steps: of weights, rows, seconds, rows², rows·seconds.
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    # How many times as many rows as the estimates say, and what was waiting when the last step began.
    _haste: float = 1.0
    _waiting: int = 0
    # Whether more was waiting than the last step took, which did nothing besides.
    _behind: bool = False
    # Whether the last step lasted far longer than it should have.
    _held_up: bool = False
    # No less than the fixed part, as far as that has not grown by more than a fiftieth each step.
    _shortest: float = float("inf")
    # No less than a row costs, in the same way: seconds of a whole step for each of its rows.
    _cheapest: float = float("inf")
    # Steps until the next try, and how many there were between the last ones.
    _until_try: int = _TRY_AFTER
    _try_after: int = _TRY_AFTER

    def __post_init__(self) -> None:
        self._largest = self.first

    def observe(self, rows: int, seconds: float, waiting: int = 0, *, usual: bool = True) -> None:
        """Take in one step.

        Args:
            rows: How many it took.
            seconds: How long it lasted.
            waiting: The rows that were there when it began.
            usual: Whether it did nothing besides, from which it would say little about how long rows take.
        """
        if self._behind and usual:
            self._judge_try(rows, seconds)
        self._behind = usual and waiting > rows
        self._hurry(rows, seconds, waiting)
        self._largest = max(rows, 0.95 * self._largest, _ALWAYS)
        if usual:
            self._learn(rows, seconds)

    @property
    def _tries(self) -> bool:
        return self._behind and self._until_try <= 0

    def _judge_try(self, rows: int, seconds: float) -> None:
        if not self._tries:
            self._until_try -= 1
            return
        fixed, slope = self.estimate()
        cheaper = seconds < _CHEAPER * (fixed + slope * rows)
        self._try_after = _TRY_AFTER if cheaper else min(2 * self._try_after, _TRY_AFTER_MOST)
        self._until_try = self._try_after

    def _hurry(self, rows: int, seconds: float, waiting: int) -> None:
        if waiting <= rows:
            self._haste = 1.0
        elif seconds > 2 * self.target:
            self._haste = max(1.0, self._haste / _HASTE)
        elif waiting > self._waiting:
            self._haste = min(self._haste * _HASTE, _MOST_HASTE)
        self._waiting = waiting

    def _learn(self, rows: int, seconds: float) -> None:
        fixed, slope = self.estimate()
        expected = fixed + slope * rows
        late = self._steps > 0 and 0 < 2 * expected < seconds
        late_again, self._held_up = late and self._held_up, late
        if late and not late_again:
            return
        if late_again or seconds < 0.5 * expected:
            self._rescale(min(seconds / expected, _MOST))
        values = (1.0, float(rows), seconds, float(rows) * rows, rows * seconds)
        self._sums = [old * _FORGET + new for old, new in zip(self._sums, values, strict=True)]
        self._shortest = min(self._shortest * 1.02, seconds)
        if rows:
            self._cheapest = min(self._cheapest * 1.02, seconds / rows)
        self._steps += 1

    def _rescale(self, factor: float) -> None:
        """As if all steps had lasted so many times as long."""
        weight, rows, seconds, squares, products = self._sums
        self._sums = [weight, rows, factor * seconds, squares, factor * products]
        self._shortest *= factor
        self._cheapest *= factor

    def estimate(self) -> tuple[float, float]:
        """(fixed seconds, seconds per row) as far as they can be told."""
        weight, rows, seconds, squares, products = self._sums
        if rows <= 0 or seconds <= 0:
            return 0.0, 0.0
        spread = weight * squares - rows * rows
        mean = seconds / rows
        if spread <= 1e-6 * weight * squares:
            # Half and half: right where a step lasts as long as it should, and a longer try where it does not.
            return 0.5 * seconds / weight, 0.5 * mean
        slope = min(max((weight * products - rows * seconds) / spread, 0.1 * mean), mean, self._cheapest)
        fixed = max(0.0, (seconds - slope * rows) / weight)
        return min(fixed, self._shortest), slope

    def next_rows(self) -> int:
        """Rows for the next step."""
        fixed, slope = self.estimate()
        if slope <= 0:
            return min(self.first, self.max_rows)
        for_rows = max(self.target - fixed, fixed, 0.1 * self.target)
        sway = 1 + _SWAY if self._steps % 2 else 1 - _SWAY
        more = max(self._haste, _TRY) if self._tries else self._haste
        wanted = min(more * sway * for_rows / slope, 2 * self._largest, self.max_rows)
        return min(max(int(wanted), _LEAST), self.max_rows)
