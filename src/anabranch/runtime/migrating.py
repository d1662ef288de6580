"""Leads one rescaling at a time from layout to layout, as the machine in `protocol.migration` says.

Theory of operation.  The new workers are prepared beside the steps (directories, Spark handles, processes), and shards are
weighed.  Then a step begins that runs in the *joined* placement: the target's workers are there, shards that stay on their
host have their new owners, and as much state as the machine says travels in that step and the following ones.  When all of
it is at its place and what it left behind is dropped, one more step runs in the target layout alone.  Where shards split or
merge and move as well, these are *legs* of one rescaling, each with a machine of its own.

MGR-1  The placement changes only with a committed step: it stands in the step's plan record.
MGR-2  From the first step of a migration on, its intent stands there too.

Must not know: how a step is run, or which rescaling is the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from anabranch import crash
from anabranch.errors import AnabranchError, EngineError, StepAborted
from anabranch.model.ids import HostId, ShardId, Step
from anabranch.model.placement import Placement, moved, next_version, overlaps, resharded
from anabranch.protocol import orders
from anabranch.protocol.copies import AGAIN
from anabranch.protocol.migration import Migration
from anabranch.protocol.pieces import Move, Piece
from anabranch.runtime.carrying import Carrier, coming_spec
from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.rescaled import Rescaling
from anabranch.runtime.settings import Settings
from anabranch.runtime.standing import Moves, Standing
from anabranch.runtime.targets import (
    AUTO,
    Journeys,
    begin_leg,
    choose,
    goal_of,
    journeys,
    moves_of,
    reshard_moves,
    resharding,
)
from anabranch.runtime.weighing import Scales
from anabranch.spark.spec import Report

LAYOUT_COMMITTED = crash.declare(
    "rescale.committed", "a step has changed the layout, nothing was dropped yet"
)
FINISHED = crash.declare(
    "rescale.finished", "the last step of a migration is committed, its layout record not written"
)
_TRIES = 3
"""How often a rescaling is prepared before it is given up: a process may die at any time."""
_PATIENCE = 30.0
"""Seconds for which one that has begun is prepared again and again before it turns back: an executor may come again."""
_PAUSE = 1.0


class Migrator:
    """Moves shards of one run.  All methods are for the step loop's thread, and for a rescaling that is not over."""

    def __init__(
        self,
        settings: Settings,
        jobdir: JobDir,
        carrier: Carrier,
        scales: Scales,
        alive: Callable[[], list[HostId] | None],
        note: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self.jobdir = jobdir
        self.carrier = carrier
        self.scales = scales
        self.alive = alive
        """The hosts that can be had; None: any number of logical ones."""
        self.note = note

    # What the rescaler wants.

    def prepare(self, current: Rescaling, standing: Standing) -> None:
        """Make ready, beside the steps, what the next leg needs."""
        current.state, current.leg_begun, current.retry_at = "preparing", False, None
        try:
            self._check_alive(current)
        except StepAborted as error:
            self._unprepared(current, standing, error)
            return
        placement, current.shards = begin_leg(standing.placement, current.intent)
        self.carrier.prepare(
            coming_spec(standing, placement),
            current.target.workers,
            partial(self._prepared, current, placement, standing, standing.progress.next_step),
        )

    def next_leg(self, current: Rescaling, standing: Standing) -> None:
        """Go on behind a leg, or behind a recovery; when nothing is left to be done, the next step is the last."""
        current.end_leg()
        current.retry_at = None
        placement, shards = begin_leg(standing.placement, current.intent)
        if shards is None and not placement.cuts and not journeys(placement, {}).moves:
            current.finishing = True
            return
        current.finishing = False
        self.prepare(current, standing)

    def turn_back(self, current: Rescaling) -> None:
        """Lead back to where it began; once is enough."""
        if current.cancelled:
            return
        current.cancelled = True
        # A leg in which shards have split or merged goes to its end, and the next one turns back.
        if current.machine is not None and not (current.shards and current.begun):
            self._tell(current, orders.CancelAsked())

    def poll(self, current: Rescaling, standing: Standing) -> None:
        """Begin the next leg when one is over, and keep the undo records that a copy beside the steps needs."""
        if current.retry_at is not None and time.monotonic() >= current.retry_at:
            self.prepare(current, standing)
        if current.leg_over:
            self.next_leg(current, standing)
        if current.machine is not None:
            standing.hold_undo_from = current.machine.copied or standing.hold_undo_from
            if current.machine.strategy is not orders.Strategy.HOT and not current.cancelled:
                standing.hold_undo_from = None

    def next_moves(self, current: Rescaling, standing: Standing, *, snapshot: Step | None) -> Moves | None:
        """What the next step does besides its work; None: nothing."""
        current.planned = None
        if current.finishing:
            goal = current.origin if current.cancelled else current.target
            current.planned = Moves(next_version(standing.placement, goal, intent=None))
        elif current.machine is not None:
            current.planned = self._joined_moves(current, standing, snapshot)
        return current.planned

    def _joined_moves(self, current: Rescaling, standing: Standing, snapshot: Step | None) -> Moves | None:
        assert current.machine is not None
        pieces: Sequence[Piece] = ()
        # A checkpoint that was begun since reads of a cut shard what had stayed, and that is not what comes back.  While all
        # of them held it, checkpoints that followed one another let nothing come back at all.
        held: tuple[ShardId, ...] = ()
        if snapshot is not None and snapshot <= current.forward:
            held = tuple(map(ShardId, range(len(standing.layout.shards))))
        for command in current.machine.handle(orders.StepAsked(standing.progress.next_step, held)):
            if isinstance(command, orders.MoveInStep):
                pieces = command.pieces
            else:
                self._obey(current, command, standing)
        current.machine.validate()
        current.leaves = any(not piece.back for piece in pieces)
        if not pieces and (current.shards or current.machine.phase is orders.Phase.COPYING):
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

    def committed(
        self, current: Rescaling, standing: Standing, seconds: float, reports: Sequence[Report]
    ) -> None:
        """A step was committed, whether or not it moved anything."""
        planned, current.planned = current.planned, None
        current.steps.append(seconds)
        step = Step(standing.progress.next_step - 1)
        if planned is not None and current.leaves:
            current.forward = step
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
            self._tell(current, orders.StepCommitted(step, seconds, size), standing)
            if current.shards is None and self.scales.weighed_at > step:
                self._tell(current, orders.Weighed(self.scales.sizes), standing)
            self._show(current)

    def aborted(self, current: Rescaling, step: Step) -> None:
        """The step was given up; a recovery follows."""
        current.planned = None
        if current.machine is not None:
            self._tell(current, orders.StepAborted(step))

    def _finish(self, current: Rescaling, standing: Standing) -> None:
        crash.point(FINISHED)
        current.target = standing.layout if not current.cancelled else current.target
        if current.error is not None:
            current.end("failed", current.error)
        else:
            current.end("cancelled" if current.cancelled else "done")
        self.jobdir.write_layout(standing.placement, Step(standing.progress.next_step - 1), current.why())
        self.carrier.keep_handles(standing.layout.workers)
        standing.hold_undo_from = None

    # What the machine orders.

    def _tell(self, current: Rescaling, event: orders.Event, standing: Standing | None = None) -> None:
        assert current.machine is not None
        before = current.machine.strategy
        commands = current.machine.handle(event)
        current.machine.validate()
        if current.machine.strategy is not before and not current.machine.cancelled:
            why = "copying has failed twice"
            if not isinstance(event, orders.CopyFailed):
                why = f"more than {AGAIN:.0%} of what is copied changes before a step can use it"
            self.note(f"rescaling {current.number} goes on by {current.machine.strategy}: {why}")
        for command in commands:
            self._obey(current, command, standing)

    def _obey(self, current: Rescaling, command: orders.Command, standing: Standing | None) -> None:
        match command:
            case orders.StartCopy(shards, since):
                assert standing is not None, "copies start between steps"
                self._copy(current, shards, since, standing)
            case orders.DropSources(shards):
                left = [copy for shard in shards for copy in current.left.pop(shard, ())]
                self.carrier.drop(left, partial(self._dropped, current, shards))
            case orders.DropCopies(shards):
                made = [current.arriving.pop(shard) for shard in shards if shard in current.arriving]
                self.carrier.drop(made, partial(self._dropped, current, shards))
            case orders.Finish(cancelled):
                if current.begun or not cancelled:
                    current.leg_over = True
                elif current.cancelled:
                    current.end("cancelled")
                elif current.error is not None:
                    current.end("failed", current.error)
                else:
                    # Nobody wants to turn back: copies could not be made.
                    current.leg_over = True

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
        told = current.copying(since)
        self.carrier.copy(standing, pairs, since, told, partial(self._copied, current, at, standing))

    # What was done beside the steps.

    def _prepared(
        self, current: Rescaling, placement: Placement, standing: Standing, at: Step, future: Future[Any]
    ) -> None:
        try:
            self.scales.take(future.result(), standing, at)
            self._check_alive(current)
        except AnabranchError as error:
            self._unprepared(current, standing, error)
            return
        current.waits_since = None
        if current.cancelled and not current.begun:
            current.end("cancelled")
            return
        if placement.intent != current.intent:
            # It was cancelled meanwhile, and what was prepared leads to the other end.
            self.next_leg(current, standing)
            return
        sizes = self.scales.sizes
        current.left = {}
        current.arriving = {}
        if current.shards:
            left = Journeys(resharding(placement, current.shards, sizes), {}, frozenset())
            strategy = orders.Strategy.HOT
            if current.strategy == AUTO:
                # Unless something moves behind it, that is all there is.
                current.strategy = strategy
        else:
            left = journeys(placement, sizes)
            current.bytes_total = current.bytes_moved + sum(_left(move, left.cursors) for move in left.moves)
            current.strategy = choose(current.asked, current.bytes_total, current.budget)
            strategy = orders.Strategy(current.strategy)
        settings = orders.Settings(
            strategy,
            current.budget,
            target_seconds=self.settings.target_seconds,
            at_once=current.shards is not None,
        )
        cursors = left.cursors if current.begun else None
        # The moves lead to where the intent says, cancelled or not: to the machine they are what is to be done.
        current.machine = Migration(
            settings, left.moves, cursors, standing.progress.next_step, left.backwards
        )
        self._tell(current, orders.Prepared(sizes), standing)
        self._show(current)

    def _check_alive(self, current: Rescaling) -> None:
        """Raises StepAborted when a host is not there that it leads to: Spark would run that host's task on another, and
        no step has used it yet that could notice."""
        goal, alive = goal_of(current.intent), self.alive()
        if alive is not None and (gone := sorted(set(goal.hosts) - set(alive))):
            raise StepAborted(f"{', '.join(gone)} {'has' if len(gone) == 1 else 'have'} no executor")

    def _unprepared(self, current: Rescaling, standing: Standing, error: AnabranchError) -> None:
        if current.begun:
            now = time.monotonic()
            if current.waits_since is None:
                current.waits_since = now
                self.note(f"rescaling {current.number} waits: {error}")
            if now - current.waits_since < _PATIENCE or current.cancelled:
                current.retry_at = now + _PAUSE
                return
            current.cancelled, current.error = True, str(error)
            self.note(f"rescaling {current.number} turns back: {error}")
            self.next_leg(current, standing)
            return
        current.failures += 1
        if current.failures < _TRIES and isinstance(error, EngineError) and not current.cancelled:
            self.note(f"rescaling {current.number} is prepared again: {error}")
            self.prepare(current, standing)
            return
        current.end("failed", str(error))
        self.note(f"rescaling {current.number} failed, nothing has changed: {error}")

    def _copied(self, current: Rescaling, at: Step, standing: Standing, future: Future[Any]) -> None:
        if current.over or current.machine is None:
            return
        try:
            size = int(future.result())
        except AnabranchError as error:
            if current.shards:
                self._not_copied(current, standing, error)
            else:
                self.note(f"a copy beside the steps failed and is tried again: {error}")
                self._tell(current, orders.CopyFailed(str(error)), standing)
        else:
            current.bytes_moved += 0 if current.shards else size
            self._tell(current, orders.CopyDone(at, size), standing)
        self._show(current)

    def _not_copied(self, current: Rescaling, standing: Standing, error: AnabranchError) -> None:
        """Shards could not be copied that are to split or merge: when what there is of the copies is dropped, the leg begins
        anew, or is given up.

        Told of it, the machine would go on without copies, piece by piece; but shards split and merge all at once, in copies
        that are there before the step.
        """
        current.failures += 1
        if current.cancelled:
            self.note(f"a copy beside the steps failed; it is not needed any more: {error}")
        elif current.failures < _TRIES or current.begun:
            self.note(f"a copy beside the steps failed and is tried again: {error}")
        else:
            current.error = str(error)
            self.note(f"rescaling {current.number} failed, nothing has changed: {error}")
        self._tell(current, orders.CancelAsked(), standing)

    def _dropped(self, current: Rescaling, shards: tuple[ShardId, ...], future: Future[Any]) -> None:
        try:
            future.result()
        except AnabranchError as error:
            # What could not be deleted is swept by the next recovery; nobody trusts it.
            self.note(f"a copy that was left behind could not be deleted: {error}")
        if current.machine is not None:
            self._tell(current, orders.Dropped(shards))

    def _show(self, current: Rescaling) -> None:
        """Say in which phase it is.  When the machine is done, a step in the final layout is still to come."""
        if not current.over and current.machine is not None:
            phase = current.machine.phase
            current.state = "dropping" if phase is orders.Phase.DONE else phase.value
            if current.shards is None and current.machine.strategy is not orders.Strategy.HOT:
                # Not by hot: what was copied is still to be switched to, and would count twice.
                current.bytes_total = current.bytes_moved + current.machine.progress.bytes_left


def _left(move: Move, cursors: Mapping[ShardId, int]) -> int:
    """The bytes of a move that are still to go, estimated."""
    cursor = cursors.get(move.shard, move.low)
    return move.size * (move.end - cursor) // (move.end - move.low)
