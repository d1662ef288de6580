"""Which operators can take an input's rows a batch at a time, and the batches.

Behind an input, rows flow through operators that treat them one by one until something needs all of them.  An
aggregate does not: it adds up batch by batch and combines what came of them.  So a step's rows need never be in
memory together, and each batch is read, checked, mapped and added up while it is in the cache, in memory that the
batch before it has left.

Measured with a keyed sum of 8 M rows a worker over 100,000 integer keys: of a step's rows in one piece, a third of the
stage's CPU time goes into page faults (and far more on a machine that is short of cores), in batches a tenth.  Of
315 ms then, numbering keys took 132, the rest of adding up 58, reading Parquet 68, the content hash 27, combining 28.
With the keys of earlier batches known (`operators/known.py`), the stage takes 225 ms.  A profile
of a slower run, before the last pass was saved, has of 273 ms numbering at 54, the rest of adding up 80, reading 73, the
content hash 33, combining 25; of partials with the same keys in the same order (`operators/partials.py`), 6 since.
Settings of the allocators (glibc's thresholds, mimalloc's delay of purging) halved the faults that are left, and the
CPU time of workers on a busy machine did not tell the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import polars as pl

from anabranch.flow.plan import Channel, Plan, Planned
from anabranch.model.ids import OperatorId
from anabranch.operators.known import Known

BATCH = 1_000_000
"""Rows that are aggregated at once: few enough for the cache, many enough that most keys come several times."""

_SHRINKS = 8
"""How many rows of a batch a partial must stand for.  With 100,000 keys in 8 M rows (ten) batches save a fifth of
the worker's time; with a million keys (1.6), numbering the keys of partials again nearly doubled the stage's."""


@dataclass(frozen=True, slots=True)
class Stream:
    """An input with what follows it row by row in its stage."""

    flow: str
    """The plan's fingerprint."""
    ordered: bool
    """Whether the input's rows carry the order columns."""
    operators: tuple[Planned, ...]
    """The stateless operators behind the input, each after the one that feeds it."""
    aggregates: tuple[tuple[Channel, OperatorId], ...]
    """Channels that carry partials, and the operator (or the input) whose rows each adds up."""
    whole: frozenset[OperatorId]
    """Operators (or the input) whose rows are needed all at once: an output, a union or another channel takes them."""


def behind(source: Planned, plan: Plan) -> Stream:
    """What follows an input without leaving its stage or waiting for all rows."""
    members = {source.node.id}
    operators = []
    whole: set[OperatorId] = set()
    for planned in plan.stage(source.depth):
        mine = members.intersection(feed for feed in planned.feeds if not isinstance(feed, int))
        if mine and planned.node.stateless is not None:
            members.add(planned.node.id)
            operators.append(planned)
        else:
            whole |= mine
    aggregates = []
    for channel in plan.leaving(source.depth):
        feed = channel.producer if channel.kind == "forward" else plan.operator(channel.producer).feeds[0]
        if isinstance(feed, int) or feed not in members:
            continue
        if channel.combine is None:
            whole.add(feed)
        else:
            aggregates.append((channel, feed))
    return Stream(plan.fingerprint, source.ordered, tuple(operators), tuple(aggregates), frozenset(whole))


_crowded: dict[tuple[str, int], bool] = {}
"""Whether a flow's channel (by fingerprint and number) had too many keys for batches when this process last filled it.
Costs depend on it, results do not."""


@lru_cache(maxsize=4)
def known_keys(flow: str, channel: int) -> Known:
    """The keys that this process remembers of a flow's channel, by the plan's fingerprint and the channel's number."""
    return Known()


class Batches:
    """The rows of frames in turn, in frames of one piece each; at least one frame."""

    def __init__(self, stream: Stream, frames: Iterable[pl.DataFrame], empty: pl.DataFrame) -> None:
        self._flow = stream.flow
        self._frames = frames
        self._empty = empty
        # Order numbers the rows of a whole piece, and without aggregates batches would only be put together again.
        whole = stream.ordered or not stream.aggregates
        crowded = any(_crowded.get((stream.flow, channel.number)) for channel, _ in stream.aggregates)
        self.limit = None if whole or crowded else BATCH
        """The most rows of a batch; None: all that are left in one."""

    def learn(self, channel: Channel, batch: pl.DataFrame, partials: pl.DataFrame) -> None:
        """Take the rest at once, and the next step, where batches shrink too little for combining to pay."""
        if batch.height >= BATCH // 2:
            # Of more than a batch: a batch of it would have had at most as many partials.
            crowded = partials.height * _SHRINKS > min(batch.height, BATCH)
            _crowded[self._flow, channel.number] = crowded
            self.limit = None if crowded else self.limit

    def __iter__(self) -> Iterator[pl.DataFrame]:
        waiting: list[pl.DataFrame] = []
        rows = 0
        some = False
        for frame in self._frames:
            for part in (frame,) if self.limit is None else frame.iter_slices(self.limit):
                if self.limit is not None and rows + part.height > self.limit:
                    some = True
                    yield together(waiting)
                    waiting, rows = [], 0
                waiting.append(part)
                rows += part.height
        if waiting or not some:
            yield together(waiting or [self._empty])


def together(frames: list[pl.DataFrame]) -> pl.DataFrame:
    # In one piece: kernels would otherwise each put the pieces together for themselves.
    return frames[0] if len(frames) == 1 else pl.concat(frames, rechunk=True)
