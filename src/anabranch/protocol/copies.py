"""What `hot` copies beside the steps: which shards, in how many rounds, how many at a time, and whether it pays.

Theory of operation
-------------------
Some shards, a *group*, are copied: all of them, then again and again what changed meanwhile, until a round brings little
or no longer shrinks.  Then steps switch to them, with what changed since the last round, and the next group begins.  What
changes between a key's copy and its switch travels twice.  How much that is hangs on the load alone, and nobody knows it
beforehand; so the first group is a single shard, and each group says how large the next one is:

    sent again <= AGAIN · copied   twice as many shards, at most `most`
    sent again >  AGAIN · copied   half as many: less time lies between a copy and its switch
    ... and it was one shard       none: copying does not pay here, and the rest moves inside the steps

A *fixed* group is what the settings say: it neither grows nor shrinks.

Must not know: budgets, cursors, how shards are chosen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from anabranch.model.ids import ShardId, Step

AGAIN = 1 / 20
"""Of what was copied, as much may travel twice: those who move state count its bytes, and fluid sends each once."""


@dataclass(frozen=True, slots=True)
class Copies:
    """A value: every method returns the next one.

    >>> one = Copies(most=4).begin([ShardId(7)]).copied(Step(3), 1000)
    >>> one.switched(50).judged().at_a_time, one.switched(51).judged().at_a_time
    (2, 0)
    """

    most: int
    fixed: bool = False
    at_a_time: int = 1
    """Shards of the next group; 0: none, it does not pay."""
    group: tuple[ShardId, ...] = ()
    as_of: Step | None = None
    """All steps below it are in the copies of the group; None: there are no such copies."""
    rounds: tuple[int, ...] = ()
    """Bytes of each round that the group's copies have got."""
    remainder: int = 0
    """Bytes that the steps brought which switched to them."""

    def begin(self, shards: Iterable[ShardId]) -> Copies:
        """The next group."""
        return replace(self.forget(), group=tuple(shards))

    def forget(self) -> Copies:
        """What was copied counts for nothing."""
        return replace(self, as_of=None, rounds=(), remainder=0)

    def copied(self, as_of: Step, size: int) -> Copies:
        """A round has brought so many bytes."""
        return replace(self, as_of=as_of, rounds=(*self.rounds, size))

    def switched(self, size: int) -> Copies:
        """A step has switched to some of the group, and brought so many bytes."""
        return replace(self, remainder=self.remainder + size)

    def judged(self) -> Copies:
        """All of the group have switched."""
        if self.fixed or not self.rounds:
            return self
        again = sum(self.rounds[1:]) + self.remainder
        if again > AGAIN * self.rounds[0]:
            return replace(self, at_a_time=len(self.group) // 2)
        return replace(self, at_a_time=min(2 * self.at_a_time, self.most))

    def wants_another(self, enough: int, most_rounds: int) -> bool:
        """Whether another round pays: the last was above `enough`, and less than half of the one before."""
        last = self.rounds[-1]
        shrinks = len(self.rounds) < 2 or 2 * last < self.rounds[-2]
        return last > enough and len(self.rounds) < most_rounds and shrinks

    @property
    def next_round(self) -> int:
        """Bytes that each shard of the group will still bring: about as much as in the last round."""
        return -(-sum(self.rounds[-1:]) // max(1, len(self.group)))
