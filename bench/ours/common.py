"""What our side's scripts share: a listener that keeps every step's size and duration, and the answer line."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from typing import Any

from anabranch.log.steplog import Progress
from anabranch.runtime.observe import Silent, StepDone

MASTER = "local[2]"
"""Two cores, as all peers have."""


@dataclass
class Steps(Silent):
    """(rows, seconds) of every step: from planning it to its commit record."""

    done: list[tuple[int, float]] = field(default_factory=list)

    def step(self, done: StepDone, progress: Progress) -> None:
        self.done.append((done.rows, done.seconds))

    def rate(self, skip: int) -> float:
        """Rows per second of busy time, after the first `skip` steps."""
        kept = self.done[skip:]
        return sum(rows for rows, _ in kept) / sum(seconds for _, seconds in kept)

    def median_ms(self, skip: int) -> float:
        return 1000 * statistics.median(seconds for _, seconds in self.done[skip:])


def answer(**values: Any) -> None:
    """The last line of a script: its result as one JSON object."""
    print(json.dumps(values), flush=True)
