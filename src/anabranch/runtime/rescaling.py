"""The rescalings of one run: what was asked for, what waits, what is under way, and what became of it.

Theory of operation.  A wish becomes a target layout, and one rescaling at a time is led there by `runtime.migrating`; the
others wait in the order in which they were asked for.  The step loop tells what its steps did, and asks what the next one is
to do.

RSC-1  A coordinator that finds the intent of a rescaling in the placement goes on with it, under the same number.

Must not know: how shards move.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from anabranch.errors import AnabranchError, ConfigError
from anabranch.model.ids import Attempt, HostId, Step
from anabranch.model.layout import Layout
from anabranch.runtime.carrying import Carrier
from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.migrating import Migrator
from anabranch.runtime.rescaled import Rescaling, describe
from anabranch.runtime.settings import Settings
from anabranch.runtime.standing import Moves, Standing
from anabranch.runtime.targets import STOP_START, RescaleRequest, target_layout
from anabranch.runtime.weighing import Scales
from anabranch.spark.spec import Report

log = logging.getLogger(__name__)

_STEPS_REMEMBERED = 50
_ENDED_KEPT = 8
_WEIGHED_EVERY = 4
"""Steps of a rescaling from one weighing to the next, which takes a millisecond or two of each worker's."""


class Waiting(NamedTuple):
    """A wish behind the rescaling under way."""

    request: RescaleRequest
    account: Rescaling
    """Where it was to lead when it was asked for.  It is judged anew when its turn comes."""


class Rescaler:
    """Live rescalings of one run, one after the other.  All methods are for the step loop's thread."""

    def __init__(
        self,
        settings: Settings,
        jobdir: JobDir,
        carrier: Carrier,
        alive: Callable[[], list[HostId] | None],
        note: Callable[[str], None],
    ) -> None:
        self.sharding = jobdir.sharding()
        self.carrier = carrier
        self.alive = alive
        """The hosts that can be had; None: any number of logical ones."""
        self.note = note
        self.scales = Scales()
        self.migrator = Migrator(settings, jobdir, carrier, self.scales, alive, note)
        self.current: Rescaling | None = None
        self.queue: deque[Waiting] = deque()
        self.ended: deque[dict[str, Any]] = deque(maxlen=_ENDED_KEPT)
        """Accounts of the last ones that are over."""
        self._emptied: set[HostId] = set()
        self._usual: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._number = 0

    # Wishes.

    def ask(self, request: RescaleRequest, standing: Standing) -> dict[str, Any]:
        """Begin a rescaling, or put it behind the one under way.

        Raises:
            ConfigError: it cannot be had.
        """
        if self.active:
            # Judged now as far as can be, so that a wrong wish is refused while somebody listens.
            before = self._last_target()
            after = self._target(request, before)
            self._number += 1
            self.queue.append(_waiting(self._number, request, before, after))
            return self.queue[-1].account.to_json()
        self._begin(self._number + 1, request, standing)
        self._number += 1
        assert self.current is not None
        return self.current.to_json()

    def _last_target(self) -> Layout:
        """Where all that was asked for so far leads."""
        assert self.current is not None
        if self.queue:
            return self.queue[-1].account.target
        return self.current.origin if self.current.cancelled else self.current.target

    def _target(self, request: RescaleRequest, now: Layout) -> Layout:
        return target_layout(request, now, self.sharding, self.alive(), self._emptied)

    def cancel(self) -> dict[str, Any]:
        """Turn back.  Raises ConfigError when nothing is under way."""
        current = self.current
        if current is None or current.over:
            if not self.queue:
                raise ConfigError("no rescaling is under way")
            self.queue.clear()
            return {}
        if current.finishing and not current.cancelled:
            raise ConfigError("the rescaling is over but for its last step; rescale again to turn back")
        self.queue.clear()
        self.migrator.turn_back(current)
        return current.to_json()

    @property
    def active(self) -> bool:
        """Whether a rescaling is under way."""
        return self.current is not None and not self.current.over

    @property
    def wants_step(self) -> bool:
        """Whether a step should run even if there is nothing to read."""
        return self.current is not None and self.current.wants_step

    def _begin(self, number: int, request: RescaleRequest, standing: Standing) -> None:
        now = standing.layout
        target = self._target(request, now)
        self._emptied |= set(request.remove_hosts)
        self._emptied -= set(target.hosts)
        if self.current is not None:
            self.ended.append(self.current.to_json())
        current = Rescaling(number, request.strategy, request.strategy, now, target, request.budget)
        current.before = median(self._usual) if self._usual else None
        self.current = current
        if target.shards == now.shards and target.workers == now.workers:
            current.target = now
            current.end("done")
            return
        if request.strategy == STOP_START:
            current.state = "stopping"
            return
        log.info("rescaling from=%s to=%s", describe(now), describe(target))
        self.migrator.prepare(current, standing)

    def resume(self, standing: Standing) -> None:
        """After a recovery: go on with what the placement says is under way, or begin anew what had not begun."""
        self.carrier.drain()
        standing.hold_undo_from = None
        intent, current = standing.placement.intent, self.current
        if intent is not None:
            self._number = max(self._number, intent.number)
            if current is None or current.number != intent.number or current.over:
                current = self.current = Rescaling(
                    intent.number, intent.asked, intent.strategy, intent.origin, intent.target, intent.budget
                )
            # A cancel that was accepted may not have come to a step yet.
            current.begun, current.cancelled = True, current.cancelled or intent.cancelled
            self.migrator.next_leg(current, standing)
        elif current is not None and not current.over:
            if current.begun:
                there = standing.layout.hosts
                gone = {*current.origin.hosts, *current.target.hosts} - {*there}
                current.end(
                    "failed",
                    f"lost {', '.join(sorted(gone))}; the flow goes on with {', '.join(sorted(there))}",
                )
                self.note(f"rescaling {current.number} was given up: {current.error}")
            elif current.cancelled:
                current.end("cancelled")
            elif current.state != "stopping":
                self.current = None
                hosts = tuple(dict.fromkeys(current.target.workers))
                again = RescaleRequest(len(current.target.workers), hosts, current.asked, current.budget)
                self.queue.appendleft(_waiting(current.number, again, standing.layout, current.target))

    # What the step loop asks and tells.

    def poll(self, standing: Standing) -> None:
        """Take what background work has finished, and begin what waits."""
        self.carrier.poll()
        if self.current is not None and not self.current.over:
            self.migrator.poll(self.current, standing)
        if not self.active and self.queue:
            waiting = self.queue.popleft()
            try:
                self._begin(waiting.account.number, waiting.request, standing)
            except ConfigError as error:
                self.note(f"a rescaling that waited cannot be had: {error}")
                self._refused(waiting.account, standing.layout, error)
        if not self.active:
            standing.hold_undo_from = None

    def _refused(self, account: Rescaling, now: Layout, error: ConfigError) -> None:
        """Give an account of a rescaling that waited in vain: whoever asked for it has long been told that it will be."""
        if self.current is not None:
            self.ended.append(self.current.to_json())
        account.origin = now
        account.end("failed", str(error))
        self.current = account

    def stop_start(self) -> tuple[Layout, dict[str, Any]] | None:
        """The target of a rescaling that wants the flow to stop and start, and why; the step loop does it."""
        current = self.current
        if current is None or current.state != "stopping":
            return None
        if current.cancelled:
            current.end("cancelled")
            return None
        return current.target, current.why()

    def not_stopped(self, why: str) -> None:
        """The flow could not stop in order to start again, and goes on as it is."""
        assert self.current is not None
        self.current.end("failed", why)
        self.note(f"rescaling {self.current.number} failed, nothing has changed: {why}")

    def restarted(self, standing: Standing) -> None:
        """A stop-start rescaling is over."""
        current = self.current
        assert current is not None
        current.target = standing.layout
        current.end("done")
        there = set(standing.layout.hosts if (alive := self.alive()) is None else alive)
        left = [host for host in current.origin.hosts if host in there - {*standing.layout.hosts}]
        self.carrier.clear(standing.spec(Attempt(0)), left, self._cleared)

    def _cleared(self, future: Future[Any]) -> None:
        try:
            future.result()
        except AnabranchError as error:
            self.note(f"a host that was left could not be emptied: {error}")

    def next_moves(self, standing: Standing, *, snapshot: Step | None) -> Moves | None:
        """What the next step does besides its work; None: nothing.

        `snapshot` is the step as of which a checkpoint is being read: what has left since may not come back meanwhile,
        as what arrives is written without undo, and would show in it.
        """
        if self.current is None or self.current.over:
            return None
        return self.migrator.next_moves(self.current, standing, snapshot=snapshot)

    def committed(self, standing: Standing, seconds: float, reports: Sequence[Report]) -> None:
        """A step was committed, whether or not it moved anything."""
        if self.scales.wanted and any(report.sizes for report in reports):
            self.scales.wanted = False
            self.scales.take([report.sizes for report in reports], standing)
        if self.current is None or self.current.over:
            self._usual.append(seconds)
        else:
            self.migrator.committed(self.current, standing, seconds, reports)
            # State grows while it moves, and what is weighed before it is prepared may be long ago when it begins.
            age = standing.progress.next_step - self.scales.weighed_at
            self.scales.wanted |= age >= _WEIGHED_EVERY or self.current.state == "preparing"

    def idle(self, standing: Standing) -> None:
        """No step comes that could weigh what somebody wants to know."""
        if self.scales.wanted:
            self.scales.wanted = False
            self.carrier.weigh(
                standing.spec(Attempt(0)), partial(self._weighed, standing, standing.progress.next_step)
            )

    def _weighed(self, standing: Standing, at: Step, future: Future[Any]) -> None:
        try:
            self.scales.take(future.result(), standing, at)
        except AnabranchError as error:
            log.info("could not weigh error=%s", error)

    def aborted(self, step: Step) -> None:
        """The step was given up; a recovery follows."""
        if self.current is not None and not self.current.over:
            self.migrator.aborted(self.current, step)

    def summary(self) -> dict[str, Any]:
        """For `status`: the rescaling under way, or the last one; those before it; and those that wait."""
        return {
            "migration": None if self.current is None else self.current.to_json(),
            "rescaled": list(self.ended),
            "queued": [waiting.account.to_json() for waiting in self.queue],
        }


def _waiting(number: int, request: RescaleRequest, before: Layout, after: Layout) -> Waiting:
    account = Rescaling(number, request.strategy, request.strategy, before, after, request.budget)
    account.state = "queued"
    return Waiting(request, account)
