"""Which state moves in which step, when the copies left behind may go, and how to turn back.

Theory of operation
-------------------
A migration is a set of moves: shards that change their host.  State moves inside steps, and a step is the unit of
everything: whoever runs step n asks first (`StepAsked`) and is told the pieces that change over in it
(`MoveInStep`); `StepCommitted` makes them true, `StepAborted` makes them never have been.  The next attempt at the
step gets the same pieces, whatever was wished for meanwhile: with others, a copy that only the failed attempt wrote to would
be opened by nobody and stay as that one left it.  For each shard a *cursor*
says how far it has come: hashes below it are with the arriving copy at the move's target, the others with the one
at its source.  The cursor goes up; when a migration is cancelled, it comes down again.

How the pieces of a step are chosen is all that strategies differ in:

    SUDDEN    everything at once, in several steps only if it is above `most_per_step`
    BATCHED   some whole shards a step
    FLUID     as many bytes a step as the budget allows, nothing before it knows; sources side by side, shard after shard,
              large ones cut
    HOT       nothing while some shards are copied in the background, round after round of what changed since the last;
              then these shards with what changed since the last round, whole, in one step if the budget allows it;
              then the next ones; FLUID where too much changes between a copy and its switch (see `copies`)

What a shard leaves behind is dropped as soon as it is whole elsewhere; the driver puts the drop off as long as a
checkpoint reads the copy, and reports it with `Dropped`.  The migration ends when all are whole and all is dropped.

Cancelling turns every shard round, after the step under way.  One that has not begun stays.  A cut one comes
back piece by piece (`back`), but not while a checkpoint reads the copy that stayed as of a step before the cut: what
arrives is written without undo, and would show in it (`StepAsked.held`).  One that is whole at its target is a new
move in the opposite direction; since its old copy lies where the new one will be, it waits until that is dropped.

After a crash, or when state had to be recovered, the driver takes every copy back to what the last commit record says, under
a new fence, and builds a machine anew from that record: the moves, the `cursors`, and the shards that were coming
back.  Before `Prepared` it removes from all hosts what the placement does not name: half copies, and copies of
attempts that failed.

Safety: **for every key and every step, exactly one copy is read and written; it holds the effects of exactly the
committed steps; and it is where the routing of that step sends the key.**

Invariants that `validate` asserts:

- MIG-1  a cursor stays within its shard, and a step has at most one piece of a shard;
- MIG-2  only a committed step moves a cursor: each piece that is under way begins where its shard's cursor is;
- MIG-3  a copy is dropped only when no committed hash is in it: a source when the step with the last piece is
         committed, an arriving copy when the cursor is at the lowest hash; and no piece of such a shard is under way;
- MIG-4  it is over only when every shard is whole at its place and all that was left behind is dropped;
- MIG-5  at most one step is under way, and it is not one that was committed;
- MIG-6  what a step is expected to move is within its limit, unless it is one piece of a single hash;
- MIG-7  a piece leaves out only what a background copy holds: of a whole shard, as of a step that is not beyond its own;
- MIG-8  the next attempt at a step has the pieces of the one that failed.

Must not know: hosts, incarnations, files, how long anything takes but what it is told.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from anabranch.errors import EngineError
from anabranch.model.ids import ShardId, Step
from anabranch.protocol.budget import Budget
from anabranch.protocol.copies import Copies
from anabranch.protocol.orders import (
    CancelAsked,
    Command,
    CopyDone,
    CopyFailed,
    DropCopies,
    Dropped,
    DropSources,
    Event,
    Finish,
    MoveInStep,
    Phase,
    Prepared,
    Progress,
    Settings,
    StartCopy,
    StepAborted,
    StepAsked,
    StepCommitted,
    Strategy,
    Weighed,
)
from anabranch.protocol.pieces import Drop, Move, Piece, Track, by_giver, choose, choose_whole, side_by_side

_START = Step(0)


class Migration:
    """The machine.  Mappings are replaced, never changed, so that a shallow copy is a copy.

    Args:
        moves: every shard that changes its host, each once; after a crash also those that are done, so that they can be
            brought back.
        cursors: after a crash, how far each shard has come; at its move's end it is done.  None: it begins now, and there is
            nothing at the targets.
        next_step: the step after the last committed one.
        backwards: after a crash, the shards that were coming back: what is below their cursors returns to the source.
        cancelled: after a crash, that the moves undo a migration that was cancelled.

    Raises:
        EngineError: the arguments contradict each other; from `handle`, an event that cannot happen now.

    >>> from anabranch.model.ids import WorkerId
    >>> move = Move(ShardId(0), 0, 100, WorkerId(0), WorkerId(1), size=10)
    >>> migration = Migration(Settings(Strategy.SUDDEN), [move])
    >>> migration.handle(Prepared({}))
    []
    >>> [(piece.low, piece.end) for piece in migration.handle(StepAsked(Step(0)))[0].pieces]
    [(0, 100)]
    >>> migration.handle(StepCommitted(Step(0), seconds=0.1, moved_bytes=10))
    [DropSources(shards=(0,))]
    >>> migration.handle(Dropped([0]))
    [Finish(cancelled=False)]
    """

    def __init__(
        self,
        settings: Settings,
        moves: Iterable[Move],
        cursors: Mapping[ShardId, int] | None = None,
        next_step: Step = _START,
        backwards: Collection[ShardId] = (),
        cancelled: bool = False,
    ) -> None:
        resumed, cursors = cursors is not None, cursors or {}
        listed = tuple(moves)
        self.settings = settings
        self.phase = Phase.PREPARING
        self.cancelled = cancelled
        self._tracks: Mapping[ShardId, Track] = {
            move.shard: Track(
                move,
                cursors.get(move.shard, move.low),
                back=move.shard in backwards,
                arrived=resumed,
            )
            for move in listed
        }
        self._check(listed, cursors, backwards)
        self._batch = settings.batch or max(1, -(-len(listed) // 8))
        self._next_step = next_step
        self._under_way: MoveInStep | None = None  # from the first question to the commit
        self._attempting = False  # whether an attempt at it is outstanding
        self._cancel_wanted = False
        self._moved_bytes = 0
        self._budget = Budget(
            settings.first_budget if settings.budget is None else settings.budget,
            fixed=settings.budget is not None,
            target_seconds=settings.target_seconds,
        )
        # What is cut, or comes back, cannot be copied: fluid is what moves it most gently.
        begun = any(0 < track.left < track.hashes for track in self._tracks.values())
        fluid = settings.strategy is Strategy.HOT and (begun or cancelled)
        self._strategy = Strategy.FLUID if fluid else settings.strategy
        fixed = settings.batch is not None
        self._copies = Copies(self._batch, fixed, at_a_time=self._batch if fixed else 1)
        self._copying = False
        self._copy_failed = False

    # --- what others may know

    @property
    def strategy(self) -> Strategy:
        """The one by which pieces are chosen now: `hot` goes on as `fluid` when it cannot copy, or copying does not pay."""
        return self._strategy

    @property
    def copied(self) -> Step | None:
        """Undo records of the moving shards are needed from this step on."""
        return self._copies.as_of

    @property
    def budget(self) -> int:
        """Bytes that the next step may move."""
        return self._budget.bytes if self._adapts else self.settings.most_per_step

    @property
    def moves(self) -> tuple[Move, ...]:
        """As they are now: of a cancelled migration some are turned round."""
        return tuple(track.move for track in self._tracks.values())

    @property
    def cursors(self) -> dict[ShardId, int]:
        return {shard: track.cursor for shard, track in self._tracks.items()}

    @property
    def backwards(self) -> frozenset[ShardId]:
        return frozenset(shard for shard, track in self._tracks.items() if track.back)

    @property
    def progress(self) -> Progress:
        tracks = self._tracks.values()
        return Progress(
            len(tracks),
            sum(track.whole and not track.turns for track in tracks),
            sum(track.estimate(track.hashes if track.turns else track.left) for track in tracks),
            self._moved_bytes,
        )

    def handle(self, event: Event) -> list[Command]:
        commands: list[Command] = []
        match event:
            case Prepared(sizes) if self.phase is Phase.PREPARING:
                self._weighed(sizes)
                self.phase = Phase.MOVING
            case Weighed(sizes) if self._under_way is None:
                self._weighed(sizes)
            case StepAsked(step, held):
                return [self._ask(step, held)]
            case StepCommitted(step, seconds, moved_bytes):
                self._committed(step, seconds, moved_bytes)
            case StepAborted(step):
                self._expect(step)
                self._attempting = False
            case CopyDone(as_of, size) if self._copying:
                commands = self._copy_done(as_of, size)
            case CopyFailed() if self._copying:
                commands = self._copy_again()
            case CancelAsked() if self.phase is not Phase.DONE and not self.cancelled:
                self._cancel_wanted = True
            case Dropped(shards):
                self._dropped(shards)
            case _:
                # Late news of what was given up meanwhile, or a wish that is fulfilled.
                pass
        return [*commands, *self._next_commands()]

    def validate(self) -> None:
        out = self._under_way
        pieces = () if out is None else out.pieces
        moving = [piece.shard for piece in pieces]
        assert len(set(moving)) == len(moving), "MIG-1"
        for track in self._tracks.values():
            assert track.move.low <= track.cursor <= track.move.end, "MIG-1"
            if track.drop is not Drop.NONE:
                assert track.whole or track.cursor == track.move.low, "MIG-3"
                assert track.move.shard not in moving, "MIG-3"
        for piece in pieces:
            track = self._tracks[piece.shard]
            assert track.move.low <= piece.low < piece.end <= track.move.end, "MIG-1"
            assert track.cursor == (piece.end if piece.back else piece.low), "MIG-2"
            assert piece.back == track.back, "MIG-2"
            if piece.since is not None:
                assert piece.last, "MIG-7"
                assert track.left == track.hashes, "MIG-7"
                assert out is not None, "MIG-7"
                assert piece.since == self.copied, "MIG-7"
                assert piece.since <= out.step, "MIG-7"
        if self.phase is Phase.DONE:
            assert not pieces, "MIG-4"
            for track in self._tracks.values():
                assert track.whole, "MIG-4"
                assert track.drop is Drop.GONE, "MIG-4"
        assert out is None or out.step >= self._next_step, "MIG-5"
        if pieces and pieces[0].since is None:
            planned = self._planned(pieces)
            single = len(pieces) == 1 and pieces[0].end - pieces[0].low == 1
            assert planned <= self.budget or single, "MIG-6"

    # --- events

    def _weighed(self, sizes: Mapping[ShardId, int]) -> None:
        self._tracks = {
            shard: replace(track, move=replace(track.move, size=sizes.get(shard, track.move.size)))
            for shard, track in self._tracks.items()
        }

    def _ask(self, step: Step, held: Collection[ShardId]) -> MoveInStep:
        again = self._under_way
        if self._attempting or step < self._next_step or (again is not None and again.step != step):
            raise EngineError(
                f"the migration is asked for the pieces of step {step}, {self._next_step} is the next step and "
                f"{again or 'nothing'} is under way: commit or abort a step, and commit it before the next is asked for"
            )
        if again is None:
            pieces = self._pieces(held) if self.phase is Phase.MOVING else ()
            self._mark((piece.shard for piece in pieces), arrived=True)
            again = self._under_way = MoveInStep(step, pieces)
        self._attempting = True
        return again

    def _committed(self, step: Step, seconds: float, moved_bytes: int) -> None:
        pieces: tuple[Piece, ...] = ()
        if self._under_way is not None:
            self._expect(step)
            pieces = self._under_way.pieces
        self._budget = self._budget.told(max(1, self._planned(pieces)) if pieces else 0, seconds)
        tracks = dict(self._tracks)
        for piece in pieces:
            track = tracks[piece.shard]
            tracks[piece.shard] = replace(track, cursor=piece.low if piece.back else piece.end)
        self._tracks = tracks
        self._under_way, self._attempting = None, False
        self._next_step = Step(step + 1)
        self._moved_bytes += moved_bytes
        if any(piece.since is not None for piece in pieces):
            self._copies = self._copies.switched(moved_bytes)

    def _copy_done(self, as_of: Step, size: int) -> list[Command]:
        self._copying = False
        self._copies = self._copies.copied(as_of, size)
        self._moved_bytes += size
        if self._copies.wants_another(self.settings.switch_below, self.settings.most_rounds):
            return self._copy(as_of)
        self.phase = Phase.MOVING
        return []

    def _copy_again(self) -> list[Command]:
        self._forget_copies()
        if not self._copy_failed:
            self._copy_failed = True
            return self._copy(None)
        self._go_on_without_copies()
        self.phase = Phase.MOVING
        return self._drop_copies(self._copies.group)

    def _dropped(self, shards: Collection[ShardId]) -> None:
        tracks = dict(self._tracks)
        for shard in shards:
            track = tracks.get(shard)
            if track is not None and track.drop is Drop.ASKED:
                # A half copy that is gone leaves the shard free to move; there will be another to drop.
                drop = Drop.GONE if track.whole else Drop.NONE
                tracks[shard] = replace(track, drop=drop, arrived=False)
        self._tracks = tracks

    # --- what follows from where everything is

    def _next_commands(self) -> list[Command]:
        if self.phase is Phase.DONE:
            return []
        if self._cancel_wanted and not (self._under_way and self._under_way.pieces):
            self._cancel()
        self._turn_round()
        commands: list[Command] = []
        idle = [track for track in self._tracks.values() if track.whole and track.drop is Drop.NONE]
        left = tuple(track.move.shard for track in idle if not track.back)
        if left:
            self._mark(left, drop=Drop.ASKED)
            commands.append(DropSources(left))
        commands += self._drop_copies(track.move.shard for track in idle if track.back and track.arrived)
        self._mark((track.move.shard for track in idle if track.back and not track.arrived), drop=Drop.GONE)
        if self.phase in (Phase.MOVING, Phase.DROPPING):
            self.phase = Phase.MOVING if self._todo() else Phase.DROPPING
        switched = all(self._tracks[shard].whole for shard in self._copies.group)
        if self._strategy is Strategy.HOT and self.phase is Phase.MOVING and switched:
            commands += self._copy_next()
        over = all(track.whole and track.drop is Drop.GONE for track in self._tracks.values())
        if over and self.phase is Phase.DROPPING:
            self.phase = Phase.DONE
            commands.append(Finish(self.cancelled))
        return commands

    def _cancel(self) -> None:
        self._cancel_wanted = False
        self.cancelled = True
        self._forget_copies()
        if self._strategy is Strategy.HOT:
            self._go_on_without_copies()
        if self.phase is Phase.COPYING:
            self.phase = Phase.MOVING
        self._tracks = {
            shard: replace(track, turns=True) if track.whole else replace(track, back=True)
            for shard, track in self._tracks.items()
        }
        if self.phase is Phase.PREPARING and not self._todo():
            # Nobody has to be ready for it.
            self.phase = Phase.DROPPING

    def _turn_round(self) -> None:
        """Shards that wait for nothing but their new way back."""
        tracks = dict(self._tracks)
        for shard, track in self._tracks.items():
            if track.turns and track.drop is Drop.GONE:
                move = replace(track.move, source=track.move.target, target=track.move.source)
                tracks[shard] = Track(move, move.low)
        self._tracks = tracks

    def _todo(self) -> list[Track]:
        return [track for track in self._tracks.values() if track.turns or not track.whole]

    def _copy_next(self) -> list[Command]:
        """The last group has switched: begin with the next one, or, where that does not pay, go on without copies."""
        todo = side_by_side(self._todo())
        self._copies = self._copies.judged()
        if not self.settings.at_once:
            todo = todo[: self._copies.at_a_time]
        self._copies = self._copies.begin(track.move.shard for track in todo)
        if not todo:
            self._go_on_without_copies()
            return []
        return self._copy(None)

    def _copy(self, since: Step | None) -> list[Command]:
        self.phase = Phase.COPYING
        self._copying = True
        self._mark(self._copies.group, arrived=True)
        return [StartCopy(self._copies.group, since)]

    def _go_on_without_copies(self) -> None:
        self._strategy = Strategy.FLUID
        self._budget = self._budget.anew()

    def _forget_copies(self) -> None:
        self._copying = False
        self._copies = self._copies.forget()

    def _drop_copies(self, shards: Iterable[ShardId]) -> list[Command]:
        listed = tuple(shards)
        self._mark(listed, drop=Drop.ASKED)
        return [DropCopies(listed)] if listed else []

    # --- pieces

    def _pieces(self, held: Collection[ShardId]) -> tuple[Piece, ...]:
        # A half copy that is being dropped is where the shard's new copy has to be.
        ready = [
            track
            for track in self._todo()
            if track.drop is Drop.NONE and not (track.back and track.move.shard in held)
        ]
        if self._strategy is Strategy.HOT:
            ready = [track for track in ready if track.move.shard in self._copies.group]
            if self.settings.at_once:
                return tuple(track.piece(track.left, self.copied) for track in ready)
        if self._adapts and self._budget.rests:
            return ()
        if self._strategy is Strategy.FLUID and not self._budget.knows and not self.settings.at_once:
            return ()
        if self._strategy is Strategy.HOT:
            return choose_whole(by_giver(ready), self.budget, self._remainder, self.copied)
        if self._strategy is Strategy.BATCHED:
            ready = side_by_side(ready)[: self._batch]
        return choose(by_giver(ready), self.budget)

    @property
    def _adapts(self) -> bool:
        """Whether the bytes of a step follow from how long the last ones lasted."""
        return self._strategy in (Strategy.FLUID, Strategy.HOT)

    def _planned(self, pieces: Iterable[Piece]) -> int:
        return sum(
            self._tracks[piece.shard].estimate(piece.end - piece.low)
            if piece.since is None
            else self._remainder(self._tracks[piece.shard])
            for piece in pieces
        )

    def _remainder(self, track: Track) -> int:
        """What a copied shard still has to get: about as much as the last round brought, and never more than all."""
        return min(track.move.size, self._copies.next_round)

    # --- small things

    def _mark(self, shards: Iterable[ShardId], **changes: Any) -> None:
        self._tracks = {**self._tracks, **{s: replace(self._tracks[s], **changes) for s in shards}}

    def _expect(self, step: Step) -> None:
        if self._under_way is None or self._under_way.step != step or not self._attempting:
            raise EngineError(
                f"the migration is told how step {step} ended, and {self._under_way or 'nothing'} is under way"
            )

    def _check(
        self, moves: Collection[Move], cursors: Mapping[ShardId, int], backwards: Collection[ShardId]
    ) -> None:
        if len(self._tracks) != len(moves):
            raise EngineError("a shard has two moves in one migration")
        unknown = {*cursors, *backwards} - {*self._tracks}
        if unknown:
            raise EngineError(f"shards {sorted(unknown)} have a cursor but no move")
        for track in self._tracks.values():
            move = track.move
            if not move.low <= track.cursor <= move.end or move.low >= move.end:
                raise EngineError(f"{move} with its cursor at {track.cursor} is not a move")
