"""Processor time that the host of a virtual machine gave to others while something was measured.

For as long as nothing of ours runs, a step lasts longer without doing more. The kernel counts that time (`steal`), for all
processors together and in hundredths of a second. Who looks for a longest step can so tell those that were held up from
outside, without looking at how long they took. It is shown beside a figure and is no part of it.

Must not know: steps, strategies.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

import numpy as np
import psutil

CALM = 0.05
"""The share of processor time up to which a span counts as undisturbed."""
_LOOK = 0.05


class Weather(threading.Thread):
    """Looks at what was stolen, twenty times a second, until `ended` is set."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, float]] = []
        """Unix time, and seconds stolen from all processors since the machine started."""
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(_LOOK):
            # Only Linux counts it.
            self.samples.append((time.time(), getattr(psutil.cpu_times(), "steal", 0.0)))

    def stolen(self, low: float, high: float) -> float:
        """The share of all processors' time that was stolen between two Unix times."""
        return stolen(self.samples, low, high, os.cpu_count() or 1)


def stolen(samples: Sequence[tuple[float, float]], low: float, high: float, processors: int) -> float:
    """As `Weather.stolen`, of samples in order; evenly between two of them.

    >>> stolen([(10.0, 3.0), (12.0, 4.0)], 10.0, 11.0, processors=2)
    0.25
    """
    if not samples or high <= low:
        return 0.0
    times, seconds = zip(*samples, strict=True)
    before, after = np.interp([low, high], times, seconds)
    return float((after - before) / ((high - low) * processors))
