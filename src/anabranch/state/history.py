"""What a store knows of the time before keys came to it from another.

Keys that arrive bring no undo records.  What the next checkpoint must know of their past is in *marks*: the record
of marks (region, *m*) names the keys that changed at some step below *m*, at or after the step from which on they are
*known*.  Each arrival is remembered with its range of hashes, so that these can be told:

HIS-1  A region cannot be taken back before a step in which some of the asked hashes arrived: `floor`.
HIS-2  What changed since a step is known only if, for each arrival after that step, the marks reach back to it:
       `knows`.  Whoever asks for more needs all keys.
HIS-3  The undo records of a store that came into being by an arrival begin there: `born`.

Must not know: LMDB, tables, who sent what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgpack

from anabranch.errors import CorruptError
from anabranch.model.ids import Step
from anabranch.model.ranges import EVERYTHING, HashRange

_START = Step(0)


class Arrived(NamedTuple):
    """Some hashes that came in one step."""

    step: Step
    low: int
    high: int
    """The last one; the one behind it may not fit into 64 bits."""
    known: Step
    """Marks name what changed from this step on; `step` itself if they name nothing."""

    def overlaps(self, ranges: Sequence[HashRange]) -> bool:
        return any(self.low < end and low <= self.high for low, end in ranges)

    def replaces(self, old: Arrived) -> bool:
        """Whether nothing need be known of an earlier arrival after this one."""
        return old.step == self.step or (self.low <= old.low and old.high <= self.high)


class History(NamedTuple):
    """The arrivals of one region of a store."""

    born: Step | None = None
    """The step in which the store came into being here; None for one that was made empty or restored."""
    arrivals: tuple[Arrived, ...] = ()

    def after(self, arrived: Sequence[Arrived], keep_from: Step) -> History:
        """With these, all of one step, in place of what came to the same hashes or in the same step before.

        Arrivals below `keep_from`, to which nobody goes back, become one.
        """
        kept = [old for old in self.arrivals if not any(new.replaces(old) for new in arrived)]
        past = [each for each in kept if each.step < keep_from]
        if len(past) > 1:
            lows, highs = min(each.low for each in past), max(each.high for each in past)
            steps, knowns = max(each.step for each in past), max(each.known for each in past)
            kept = [Arrived(steps, lows, highs, knowns), *(each for each in kept if each.step >= keep_from)]
        return self._replace(arrivals=(*kept, *arrived))

    def floor(self, ranges: Sequence[HashRange] = EVERYTHING) -> Step:
        """The earliest step as of which these hashes can be told (HIS-1)."""
        return max((Step(each.step + 1) for each in self.arrivals if each.overlaps(ranges)), default=_START)

    def knows(self, since: Step, ranges: Sequence[HashRange] = EVERYTHING) -> bool:
        """Whether marks and undo records name all that changed in these hashes from `since` on (HIS-2)."""
        return self.known(since, ranges) <= since

    def known(self, since: Step, ranges: Sequence[HashRange] = EVERYTHING) -> Step:
        """The earliest step, not before `since`, from which on changes in these hashes are named."""
        return max(
            (each.known for each in self.arrivals if each.step > since and each.overlaps(ranges)),
            default=since,
        )

    def encode(self) -> bytes:
        return bytes(msgpack.packb(tuple(self)))

    @classmethod
    def decode(cls, raw: bytes) -> History:
        """Inverse of `encode`; raises CorruptError."""
        try:
            born, arrivals = msgpack.unpackb(raw)
            return cls(born, tuple(Arrived(*each) for each in arrivals))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise CorruptError(f"the arrivals of a region do not parse: {error!r}") from error
