"""Pauses that grow: the longer something fails, the less often it is tried."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds to wait after each failure in a row: `first`, doubled each time, at most `longest`.

    There is no jitter: one coordinator tries, and machines draw no random numbers.

    >>> [Pauses(1.0, 5.0).after(failures) for failures in range(4)]
    [1.0, 2.0, 4.0, 5.0]
    """

    first: float
    longest: float

    def after(self, failures: int) -> float:
        """The pause when there were `failures` in a row before this one."""
        # The exponent is bounded: 2.0 ** 1024 does not fit a float.
        return min(self.longest, self.first * 2.0 ** min(failures, 64))
