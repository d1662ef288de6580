"""One rescaling: what it wants, how far it is, and the account that `status` and the layout's history give of it.

Must not know: what happens next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from anabranch.model.ids import ShardId, Step
from anabranch.model.layout import Layout
from anabranch.model.placement import Copy, Intent
from anabranch.protocol import orders
from anabranch.protocol.migration import Migration
from anabranch.runtime.standing import Moves


@dataclass(slots=True)
class Rescaling:
    """A rescaling under way, or the last one: what `status` shows, and what drives it."""

    number: int
    asked: str
    strategy: str
    origin: Layout
    target: Layout
    budget: int | None
    state: str = "preparing"
    began: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.monotonic)
    seconds: float | None = None
    """When it is over: how long it took."""
    steps: list[float] = field(default_factory=list)
    """Seconds of each step since it began."""
    before: float | None = None
    """Seconds of a usual step before it began."""
    bytes_total: int = 0
    bytes_moved: int = 0
    error: str | None = None
    shards_moved: int = 0
    """In legs that are over."""
    failures: int = 0
    """How often it could not be prepared, or shards not copied that were to split or merge."""
    machine: Migration | None = None
    begun: bool = False
    """Whether a step was committed that has the intent in its plan record."""
    shards: int | None = None
    """In the leg under way shards become so many; None: they move."""
    copied: int = 0
    """Of the shards that others split into or merge to, how many are there; set by the thread that copies."""
    copying_since: float = 0.0
    """On the clock."""
    leg_begun: bool = False
    """Whether the leg's first placement is in force; its workers keep their numbers then, even if it is cancelled."""
    leg_over: bool = False
    """Whether the leg is over, and the next one not begun."""
    finishing: bool = False
    """Whether the next step runs in the final layout."""
    cancelled: bool = False
    retry_at: float | None = None
    """When it is to be prepared again, after that failed, on the clock."""
    waits_since: float | None = None
    """Since when it cannot be prepared, on the clock."""
    leaves: bool = False
    """Whether something leaves its place in the step under way, rather than to come back."""
    forward: int = -1
    """The last committed step in which something has."""
    planned: Moves | None = None
    """What the step under way does for it."""
    left: dict[ShardId, list[Copy]] = field(default_factory=dict)
    """The copies that shards have left behind."""
    arriving: dict[ShardId, Copy] = field(default_factory=dict)
    """The copies that shards are moving to, or would have."""

    @property
    def over(self) -> bool:
        return self.state in ("done", "cancelled", "failed")

    @property
    def wants_step(self) -> bool:
        """Whether a step should run even if there is nothing to read."""
        if self.over:
            return False
        return self.finishing or (self.machine is not None and self.machine.phase is orders.Phase.MOVING)

    @property
    def intent(self) -> Intent:
        """What goes into the plan records of its steps."""
        return Intent(
            self.number, self.origin, self.target, self.strategy, self.asked, self.budget, self.cancelled
        )

    def end_leg(self) -> None:
        """What the machine was made for is done, or a recovery has other plans."""
        self.shards_moved, _ = self._shards()
        self.machine, self.leg_over = None, False

    def _shards(self) -> tuple[int, int]:
        """How many shards have moved, and how many will have, as far as is known; a split or a merge is no move."""
        if self.machine is None or self.shards is not None:
            return self.shards_moved, self.shards_moved
        progress = self.machine.progress
        return self.shards_moved + progress.shards_moved, self.shards_moved + progress.shards

    def copying(self, since: Step | None) -> Callable[[int], None]:
        """Copies are begun, or brought further; the result is to be told of each that is there."""
        if since is None:
            self.copied, self.copying_since = 0, time.monotonic()

        def told(copies: int) -> None:
            # What changes meanwhile is copied in a fraction of the time.
            if since is None:
                self.copied += copies

        return told

    def _seconds_left(self, elapsed: float) -> float | None:
        if self.over:
            return None
        if self.shards is not None:
            done, total, elapsed = self.copied, self.shards, time.monotonic() - self.copying_since
        else:
            done, total = self.bytes_moved, self.bytes_total
        return round((total - done) * elapsed / done, 1) if 0 < done < total else None

    def end(self, state: str, error: str | None = None) -> None:
        self.state, self.error = state, error
        self.seconds = time.monotonic() - self.clock

    def why(self) -> dict[str, Any]:
        """For the layout record that it ends with."""
        return {
            "kind": "rescale",
            "number": self.number,
            "strategy": self.strategy,
            "asked": self.asked,
            "bytes": self.bytes_moved,
            "seconds": round(self.seconds if self.seconds is not None else time.monotonic() - self.clock, 3),
            "cancelled": self.cancelled,
            "from": describe(self.origin),
        }

    def to_json(self) -> dict[str, Any]:
        shards_moved, shards_total = self._shards()
        elapsed = self.seconds if self.seconds is not None else time.monotonic() - self.clock
        resharding = self.shards if self.machine is not None and not self.over else None
        return {
            "id": self.number,
            "state": self.state,
            "strategy": self.strategy,
            "asked": self.asked,
            "cancelled": self.cancelled,
            "from": describe(self.origin),
            "to": describe(self.target),
            "resharding": resharding,
            "copied": None if resharding is None else self.copied,
            "shards_total": shards_total,
            "shards_moved": shards_moved,
            "bytes_total": max(self.bytes_total, self.bytes_moved),
            "bytes_moved": self.bytes_moved,
            "began": self.began,
            "seconds": round(elapsed, 3),
            "eta_seconds": self._seconds_left(elapsed),
            "latency_before": None if self.before is None else round(self.before, 4),
            "latency_now": round(self.steps[-1], 4) if self.steps else None,
            "longest_step": round(max(self.steps), 4) if self.steps else None,
            "error": self.error,
            "layout": self.target.version if self.state == "done" else None,
        }


def describe(layout: Layout) -> dict[str, Any]:
    """A layout in a few words."""
    return {
        "workers": len(layout.workers),
        "hosts": sorted(set(layout.workers)),
        "shards": len(layout.shards),
        "layout": layout.version,
    }
