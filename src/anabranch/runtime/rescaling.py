"""Changes the layout of a running flow, as the machine in `protocol.migration` says.

Theory of operation.  A wish becomes a target layout.  The new workers are prepared beside the steps (directories, Spark
handles, processes), and shards are weighed.  Then a step begins that runs in the *joined* placement: the target's workers
are there, shards that stay on their host have their new owners, and as much state as the machine says travels in that step
and the following ones.  When all of it is at its place and what it left behind is dropped, one more step runs in the target
layout alone.

RSC-1  The placement changes only with a committed step: it stands in the step's plan record.
RSC-2  From the first step of a migration on, its intent stands there too: a coordinator that finds it goes on with it.

Must not know: how a step is run.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from anabranch import crash
from anabranch.errors import AnabranchError, ConfigError, EngineError
from anabranch.model.ids import HostId, ShardId, Step
from anabranch.model.layout import Layout
from anabranch.model.placement import Placement, moved, next_version, overlaps, resharded
from anabranch.protocol import migration as machine
from anabranch.runtime.carrying import Carrier, coming_spec
from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.rescaled import Rescaling, describe
from anabranch.runtime.settings import Settings
from anabranch.runtime.standing import Moves, Standing
from anabranch.runtime.targets import (
    STOP_START,
    Journeys,
    RescaleRequest,
    begin_leg,
    choose,
    journeys,
    moves_of,
    reshard_moves,
    resharding,
    target_layout,
)
from anabranch.spark.spec import Report

log = logging.getLogger(__name__)

LAYOUT_COMMITTED = crash.declare(
    "rescale.committed", "a step has changed the layout, nothing was dropped yet"
)
FINISHED = crash.declare(
    "rescale.finished", "the last step of a migration is committed, its layout record not written"
)
_STEPS_REMEMBERED = 50
_TRIES = 3
"""How often a rescaling is prepared before it is given up: a process may die at any time."""
_ENDED_KEPT = 8


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
        self.settings = settings
        self.jobdir = jobdir
        self.sharding = jobdir.sharding()
        self.carrier = carrier
        self.alive = alive
        """The hosts that can be had; None: any number of logical ones."""
        self.note = note
        self.current: Rescaling | None = None
        self.sizes: dict[ShardId, int] = {}
        """Of each shard, as last weighed."""
        self._weighed_at = Step(0)
        self.weigh = False
        """Whether the next step is to weigh shards."""
        self.queue: deque[tuple[int, RescaleRequest]] = deque()
        """What waits, each with its number."""
        self.ended: deque[dict[str, Any]] = deque(maxlen=_ENDED_KEPT)
        """Accounts of the last ones that are over."""
        self._emptied: set[HostId] = set()
        self._usual: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._number = 0
        self._planned: Moves | None = None
        """What the step under way does."""

    # Wishes.

    def ask(self, request: RescaleRequest, standing: Standing) -> dict[str, Any]:
        """Begin a rescaling, or put it behind the one under way.

        Raises:
            ConfigError: it cannot be had.
        """
        if self.active:
            # Judged now as far as can be, so that a wrong wish is refused while somebody listens.
            assert self.current is not None
            before = self.current.target
            after = self._target(request, before)
            self._number += 1
            self.queue.append((self._number, request))
            waiting = Rescaling(
                self._number, request.strategy, request.strategy, before, after, request.budget
            )
            waiting.state = "queued"
            return waiting.to_json()
        self._begin(self._number + 1, request, standing)
        self._number += 1
        assert self.current is not None
        return self.current.to_json()

    def _target(self, request: RescaleRequest, now: Layout) -> Layout:
        return target_layout(request, now, self.sharding, self.alive(), self._emptied)

    def cancel(self) -> dict[str, Any]:
        """Turn back.  Raises ConfigError when nothing is under way."""
        if self.queue:
            self.queue.clear()
            if not self.active:
                return {}
        current = self.current
        if current is None or current.over:
            raise ConfigError("no rescaling is under way")
        if current.finishing and not current.cancelled:
            raise ConfigError("the rescaling is over but for its last step; rescale again to turn back")
        if not current.cancelled:
            current.cancelled = True
            # A leg in which shards have split or merged goes to its end, and the next one turns back.
            if current.machine is not None and not (current.shards and current.begun):
                self._tell(machine.CancelAsked())
        return current.to_json()

    @property
    def active(self) -> bool:
        """Whether a rescaling is under way."""
        return self.current is not None and not self.current.over

    @property
    def wants_step(self) -> bool:
        """Whether a step should run even if there is nothing to read."""
        current = self.current
        if current is None or current.over:
            return False
        return current.finishing or (
            current.machine is not None and current.machine.phase is machine.Phase.MOVING
        )

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
        self._prepare(standing)

    def resume(self, standing: Standing) -> None:
        """After a recovery: go on with what the placement says is under way, or begin anew what had not begun."""
        self.carrier.drain()
        self._planned = None
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
            self._next_leg(current, standing)
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
                self.queue.appendleft((current.number, again))

    # What the step loop asks and tells.

    def poll(self, standing: Standing) -> None:
        """Take what background work has finished, and begin what waits."""
        self.carrier.poll()
        if self.current is not None and self.current.leg_over:
            self._next_leg(self.current, standing)
        if not self.active and self.queue:
            number, request = self.queue.popleft()
            try:
                self._begin(number, request, standing)
            except ConfigError as error:
                self.note(f"a rescaling that waited cannot be had: {error}")
                self._refused(number, request, standing.layout, error)
        if not self.active:
            standing.hold_undo_from = None
        elif self.current is not None and self.current.machine is not None:
            standing.hold_undo_from = self.current.machine.copied or standing.hold_undo_from

    def _refused(self, number: int, request: RescaleRequest, now: Layout, error: ConfigError) -> None:
        """Give an account of a rescaling that waited in vain: whoever asked for it has long been told that it will be."""
        if self.current is not None:
            self.ended.append(self.current.to_json())
        self.current = Rescaling(number, request.strategy, request.strategy, now, now, request.budget)
        self.current.end("failed", str(error))

    def stop_start(self) -> tuple[Layout, dict[str, Any]] | None:
        """The target of a rescaling that wants the flow to stop and start, and why; the step loop does it."""
        current = self.current
        return (
            (current.target, current.why()) if current is not None and current.state == "stopping" else None
        )

    def restarted(self, standing: Standing) -> None:
        """A stop-start rescaling is over."""
        assert self.current is not None
        self.current.target = standing.layout
        self.current.end("done")

    def next_moves(self, standing: Standing, *, snapshot: bool) -> Moves | None:
        """What the next step does besides its work; None: nothing.

        `snapshot` says that a checkpoint is being read: nothing may come back to a copy meanwhile, since what arrives is
        written without undo, and would show in it.
        """
        self._planned = None
        current = self.current
        if current is None or current.over:
            return None
        if current.finishing:
            self._planned = Moves(self._final(current, standing))
        elif current.machine is not None:
            self._planned = self._joined_moves(current, standing, snapshot)
        return self._planned

    def _joined_moves(self, current: Rescaling, standing: Standing, snapshot: bool) -> Moves | None:
        assert current.machine is not None
        pieces: Sequence[machine.Piece] = ()
        held = tuple(map(ShardId, range(len(standing.layout.shards)))) if snapshot else ()
        for command in current.machine.handle(machine.StepAsked(standing.progress.next_step, held)):
            if isinstance(command, machine.MoveInStep):
                pieces = command.pieces
            else:
                self._obey(command, standing)
        current.machine.validate()
        if not pieces and (current.shards or current.machine.phase is machine.Phase.COPYING):
            # Nothing changes before the copies are there.
            return None
        placement = replace(standing.placement, intent=current.intent)
        if not current.leg_begun:
            placement, _ = begin_leg(standing.placement, current.intent)
        if not pieces and placement == standing.placement:
            return None
        if current.shards:
            moves = reshard_moves(placement, current.shards, pieces[0].since, standing.progress.markers)
            current.left = {}
            for copy in placement.copies():
                first = ShardId(copy.shard * current.shards // len(placement.layout.shards))
                current.left.setdefault(first, []).append(copy)
        else:
            moves = moves_of(placement, pieces, standing.progress.markers)
            for piece, moving in zip(pieces, moves.moving, strict=True):
                current.arriving[piece.shard] = moving.source if piece.back else moving.target
                if piece.last and not piece.back:
                    current.left[piece.shard] = [moving.source]
        placement = moves.placement
        if placement.version == standing.placement.version:
            placement = next_version(placement, placement.layout)
        return replace(moves, placement=placement)

    def _next_leg(self, current: Rescaling, standing: Standing) -> None:
        """Go on behind a leg, or behind a recovery; when nothing is left to be done, the next step is the last."""
        current.end_leg()
        placement, shards = begin_leg(standing.placement, current.intent)
        if shards is None and not placement.cuts and not journeys(placement, {}).moves:
            current.finishing = True
            return
        current.finishing = False
        self._prepare(standing)

    def _final(self, current: Rescaling, standing: Standing) -> Placement:
        goal = current.origin if current.cancelled else current.target
        return next_version(standing.placement, goal, intent=None)

    def committed(self, standing: Standing, seconds: float, reports: Sequence[Report]) -> None:
        """A step was committed, whether or not it moved anything."""
        if self.weigh and any(report.sizes for report in reports):
            self.weigh = False
            self._weighed([report.sizes for report in reports], standing)
        planned, self._planned = self._planned, None
        current = self.current
        if current is None or current.over:
            self._usual.append(seconds)
            return
        current.steps.append(seconds)
        if planned is not None:
            crash.point(LAYOUT_COMMITTED)
        if current.finishing and planned is not None:
            self._finish(current, standing)
            return
        if current.machine is not None:
            size = sum(sum(report.collected.values()) for report in reports)
            current.begun = current.begun or planned is not None
            current.leg_begun = current.leg_begun or planned is not None
            current.bytes_moved += 0 if current.shards else size
            step = Step(standing.progress.next_step - 1)
            self._tell(machine.StepCommitted(step, seconds, size), standing)
            self._show(current)

    def aborted(self, step: Step) -> None:
        """The step was given up; a recovery follows."""
        self._planned = None
        if self.current is not None and self.current.machine is not None:
            self._tell(machine.StepAborted(step))

    def _finish(self, current: Rescaling, standing: Standing) -> None:
        crash.point(FINISHED)
        current.target = standing.layout if not current.cancelled else current.target
        current.end("cancelled" if current.cancelled else "done")
        self.jobdir.write_layout(standing.placement, Step(standing.progress.next_step - 1), current.why())
        self.carrier.keep_handles(standing.layout.workers)
        standing.hold_undo_from = None

    def summary(self) -> dict[str, Any]:
        """For `status`: the rescaling under way, or the last one; those before it; and the numbers of those that wait."""
        return {
            "migration": None if self.current is None else self.current.to_json(),
            "rescaled": list(self.ended),
            "queued": [number for number, _ in self.queue],
        }

    def weighed(self) -> dict[str, Any] | None:
        """The bytes of each shard, where they are known, and as of which step."""
        if not self.sizes:
            return None
        return {"bytes": [self.sizes[shard] for shard in sorted(self.sizes)], "step": self._weighed_at}

    def _weighed(self, found: Iterable[Mapping[ShardId, int]], standing: Standing) -> None:
        """Take in the bytes of copies, by slot."""
        shards = len(standing.layout.shards)
        sizes = dict.fromkeys(map(ShardId, range(shards)), 0)
        for one in found:
            for slot, size in one.items():
                sizes[ShardId(slot % shards)] += size
        self.sizes, self._weighed_at = sizes, standing.progress.next_step

    # What the machine orders.

    def _tell(self, event: machine.Event, standing: Standing | None = None) -> None:
        current = self.current
        assert current is not None
        assert current.machine is not None
        commands = current.machine.handle(event)
        current.machine.validate()
        for command in commands:
            self._obey(command, standing)

    def _obey(self, command: machine.Command, standing: Standing | None) -> None:
        current = self.current
        assert current is not None
        match command:
            case machine.StartCopy(shards, since):
                assert standing is not None, "copies start between steps"
                self._copy(current, shards, since, standing)
            case machine.DropSources(shards):
                left = [copy for shard in shards for copy in current.left.pop(shard, ())]
                self.carrier.drop(left, partial(self._dropped, shards))
            case machine.DropCopies(shards):
                made = [current.arriving.pop(shard) for shard in shards if shard in current.arriving]
                self.carrier.drop(made, partial(self._dropped, shards))
            case machine.Finish(cancelled):
                if cancelled and not current.begun:
                    current.end("cancelled")
                else:
                    current.leg_over = True

    def _prepare(self, standing: Standing) -> None:
        """Make ready, beside the steps, what the next leg needs."""
        current = self.current
        assert current is not None
        current.state, current.leg_begun = "preparing", False
        placement, current.shards = begin_leg(standing.placement, current.intent)
        self.carrier.prepare(
            coming_spec(standing, placement),
            current.target.workers,
            partial(self._prepared, placement, standing),
        )

    def _prepared(self, placement: Placement, standing: Standing, future: Future[Any]) -> None:
        current = self.current
        assert current is not None
        try:
            self._weighed(future.result(), standing)
        except AnabranchError as error:
            if current.begun:
                # Only hosts that are there can go on; recovery will find out.
                self.note(f"rescaling {current.number} waits: {error}")
                self._prepare(standing)
                return
            current.failures += 1
            if current.failures < _TRIES and isinstance(error, EngineError) and not current.cancelled:
                self.note(f"rescaling {current.number} is prepared again: {error}")
                self._prepare(standing)
                return
            current.end("failed", str(error))
            self.note(f"rescaling {current.number} failed, nothing has changed: {error}")
            return
        if current.cancelled and not current.begun:
            current.end("cancelled")
            return
        if placement.intent != current.intent:
            # It was cancelled meanwhile, and what was prepared leads to the other end.
            self._next_leg(current, standing)
            return
        sizes = self.sizes
        current.left = {}
        current.arriving = {}
        if current.shards:
            left = Journeys(resharding(placement, current.shards, sizes), {}, frozenset())
            strategy = machine.Strategy.HOT
        else:
            left = journeys(placement, sizes)
            current.bytes_total = current.bytes_moved + sum(_left(move, left.cursors) for move in left.moves)
            current.strategy = choose(current.asked, current.bytes_total)
            strategy = machine.Strategy(current.strategy)
        settings = machine.Settings(strategy, current.budget, target_seconds=self.settings.target_seconds)
        cursors = left.cursors if current.begun else None
        # The moves lead to where the intent says, cancelled or not: to the machine they are what is to be done.
        current.machine = machine.Migration(
            settings, left.moves, cursors, standing.progress.next_step, left.backwards
        )
        self._tell(machine.Prepared(sizes), standing)
        self._show(current)

    def _show(self, current: Rescaling) -> None:
        """Say in which phase it is.  When the machine is done, a step in the final layout is still to come."""
        if not current.over and current.machine is not None:
            phase = current.machine.phase
            current.state = "dropping" if phase is machine.Phase.DONE else phase.value

    def _copy(
        self, current: Rescaling, shards: Sequence[ShardId], since: Step | None, standing: Standing
    ) -> None:
        assert current.machine is not None
        at = standing.progress.next_step
        if standing.hold_undo_from is None:
            standing.hold_undo_from = at
        placement, _ = begin_leg(standing.placement, current.intent)
        if current.shards:
            after = resharded(placement, current.shards)
        else:
            after = placement
            for move in current.machine.moves:
                if move.shard in shards:
                    after = moved(after, move.shard, move.target, move.low, move.end, back=False)
        pairs = [
            pair for pair in overlaps(placement, after) if pair[1].shard in shards and pair[0] != pair[1]
        ]
        current.arriving |= {target.shard: target for _, target, _, _ in pairs}
        self.carrier.copy(standing, pairs, since, partial(self._copied, current, at, standing))

    def _copied(self, current: Rescaling, at: Step, standing: Standing, future: Future[Any]) -> None:
        if current is not self.current or current.machine is None:
            return
        try:
            size = int(future.result())
        except AnabranchError as error:
            self.note(f"a copy beside the steps failed and is tried again: {error}")
            self._tell(machine.CopyFailed(str(error)), standing)
        else:
            current.bytes_moved += 0 if current.shards else size
            self._tell(machine.CopyDone(at, size), standing)
        self._show(current)

    def _dropped(self, shards: tuple[ShardId, ...], future: Future[Any]) -> None:
        try:
            future.result()
        except AnabranchError as error:
            # What could not be deleted is swept by the next recovery; nobody trusts it.
            self.note(f"a copy that was left behind could not be deleted: {error}")
        if self.current is not None and self.current.machine is not None:
            self._tell(machine.Dropped(shards))


def _left(move: machine.Move, cursors: Mapping[ShardId, int]) -> int:
    """The bytes of a move that are still to go, estimated."""
    cursor = cursors.get(move.shard, move.low)
    return move.size * (move.end - cursor) // (move.end - move.low)
