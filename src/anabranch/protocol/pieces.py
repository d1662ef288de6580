"""Moves, how far each of them is, and the pieces of a step that keep within a number of bytes.

A shard under way is a `Track`.  Its *cursor* parts it: hashes below are with the arriving copy at the move's target, the
others with the copy that stays, at its source.  Forwards the cursor goes up to the move's end, `back` it comes down to its
lowest hash; each piece begins where the cursor is.

Bytes are shared by the workers that give state, side by side: each reads and ships its own.  A worker gives one shard
after the other, and goes on with a cut one before it begins another.  A shard that fits what is left of its worker's
share goes whole; one that would not fit a whole share is cut; any other waits for the next step.

Must not know: strategies, phases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest

from anabranch.model.ids import ShardId, Step, WorkerId
from anabranch.protocol.budget import shares


@dataclass(frozen=True, slots=True)
class Move:
    """A shard, hashes [low, end), that changes its host."""

    shard: ShardId
    low: int
    end: int
    source: WorkerId
    target: WorkerId
    size: int


@dataclass(frozen=True, slots=True)
class Piece:
    """In one step hashes [low, end) of a shard change over from `source` to `target`.

    `source` is where they are collected and `target` where they are acquired, also when they come back.
    """

    shard: ShardId
    low: int
    end: int
    source: WorkerId
    target: WorkerId
    last: bool
    """Afterwards the shard is whole at `target`."""
    back: bool = False
    """`target` is the copy that stayed: the cursor comes down to `low`."""
    since: Step | None = None
    """Only what steps from this one on have changed travels; the rest is in a background copy."""


class Drop(Enum):
    """What is known of the copy that a shard does not need."""

    NONE = "there is none, or it is needed"
    ASKED = "it is to be dropped"
    GONE = "it is dropped"


@dataclass(frozen=True, slots=True)
class Track:
    """A move and how far it is."""

    move: Move
    cursor: int
    back: bool = False
    """The cursor comes down: the shard is to be whole at its source."""
    arrived: bool = False
    """Something may be at the target: a piece or a copy was under way, whatever became of it."""
    turns: bool = False
    """Whole at a target where it shall not be: the opposite move begins when the old copy at the source is gone."""
    drop: Drop = Drop.NONE

    @property
    def whole(self) -> bool:
        """Whether all of the shard is where it shall be."""
        return self.cursor == (self.move.low if self.back else self.move.end)

    @property
    def left(self) -> int:
        """How many hashes have to move."""
        return self.cursor - self.move.low if self.back else self.move.end - self.cursor

    @property
    def hashes(self) -> int:
        return self.move.end - self.move.low

    @property
    def giver(self) -> WorkerId:
        return self.move.target if self.back else self.move.source

    def estimate(self, hashes: int) -> int:
        """Bytes in so many hashes, rounded up: keys are spread evenly, as hashes are."""
        return -(-self.move.size * hashes // self.hashes)

    def piece(self, hashes: int, since: Step | None = None) -> Piece:
        move, last = self.move, hashes == self.left
        if self.back:
            low = self.cursor - hashes
            return Piece(move.shard, low, self.cursor, move.target, move.source, last, back=True)
        return Piece(
            move.shard, self.cursor, self.cursor + hashes, move.source, move.target, last, since=since
        )


def by_giver(tracks: Iterable[Track]) -> dict[WorkerId, list[Track]]:
    """By the worker that gives; what is cut already first, so that few shards are cut at a time."""
    queues: dict[WorkerId, list[Track]] = {}
    for track in sorted(tracks, key=lambda track: track.left == track.hashes):
        queues.setdefault(track.giver, []).append(track)
    return queues


def side_by_side(tracks: Iterable[Track]) -> list[Track]:
    """In an order in which all workers that give something take turns."""
    rounds = zip_longest(*by_giver(tracks).values())
    return [track for one in rounds for track in one if track is not None]


def choose(queues: Mapping[WorkerId, list[Track]], budget: int) -> tuple[Piece, ...]:
    """Pieces within the budget; at least one, however large, so that it goes on."""
    needs = {giver: sum(t.estimate(t.left) for t in queue) for giver, queue in queues.items()}
    given = shares(budget, needs)
    pieces: list[Piece] = []
    for giver, queue in queues.items():
        room = given[giver]
        for place, track in enumerate(queue):
            hashes = track.left
            if track.estimate(hashes) > room:
                # Only what does not fit a share of its own is cut: for a while a cut shard is two.
                hashes = 0 if place else room * track.hashes // track.move.size
            if hashes:
                pieces.append(track.piece(hashes))
                room -= track.estimate(hashes)
            if hashes < track.left:
                break
    if not pieces:
        return tuple(queue[0].piece(1) for queue in list(queues.values())[:1])
    return tuple(pieces)


def choose_whole(
    queues: Mapping[WorkerId, list[Track]], budget: int, size: Callable[[Track], int], since: Step | None
) -> tuple[Piece, ...]:
    """Whole shards, of each what changed since the step up to which it was copied, within the budget; at least one."""
    given = shares(budget, {giver: sum(map(size, queue)) for giver, queue in queues.items()})
    tracks: list[Track] = []
    for giver, queue in queues.items():
        room = given[giver]
        for track in queue:
            room -= size(track)
            if room < 0:
                break
            tracks.append(track)
    return tuple(
        track.piece(track.left, since)
        for track in tracks or [queue[0] for queue in list(queues.values())[:1]]
    )
