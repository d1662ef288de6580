"""How many rows the next step takes, so that it lasts about as long as the user wants.

A step's duration is close to `fixed + per_row · rows`.  Both are estimated from recent steps, with
old ones forgotten by and by.  Pure: it reads no clock.

SIZE-1  The answer never exceeds the row limit, nor twice the largest step that was seen.
SIZE-2  Where the fixed part alone eats the target, a step still gets as much time for rows as
        the fixed part takes: a slow machine must not starve the flow.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_FORGET = 0.9
_FIRST = 10_000
_LEAST = 1_000


@dataclass(slots=True)
class StepSizer:
    """Estimates from (rows, seconds) of steps that ended."""

    target: float
    max_rows: int
    largest: int = _FIRST
    # Weighted sums over past steps: of weights, rows, seconds, rows², rows·seconds.
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    _shortest: float = float("inf")

    def observe(self, rows: int, seconds: float) -> None:
        """Take in one step."""
        values = (1.0, float(rows), seconds, float(rows) * rows, rows * seconds)
        self._sums = [old * _FORGET + new for old, new in zip(self._sums, values, strict=True)]
        self._shortest = min(self._shortest * 1.02, seconds)
        self.largest = max(self.largest, rows)

    def estimate(self) -> tuple[float, float]:
        """(fixed seconds, seconds per row) as far as they can be told."""
        weight, rows, seconds, squares, products = self._sums
        if weight == 0 or rows == 0:
            return 0.0, 0.0
        spread = weight * squares - rows * rows
        mean = seconds / rows
        if spread <= 1e-6 * weight * squares:
            # Steps of one size tell nothing: blame little on the rows, and so try a larger one.
            return 0.75 * seconds / weight, 0.25 * mean
        slope = min(max((weight * products - rows * seconds) / spread, 0.02 * mean), mean)
        fixed = max(0.0, (seconds - slope * rows) / weight)
        return min(fixed, self._shortest), slope

    def next_rows(self) -> int:
        """Rows for the next step."""
        fixed, slope = self.estimate()
        if slope <= 0:
            return min(_FIRST, self.max_rows)
        for_rows = max(self.target - fixed, fixed, 0.1 * self.target)
        return max(min(_LEAST, self.max_rows), min(int(for_rows / slope), 2 * self.largest, self.max_rows))
