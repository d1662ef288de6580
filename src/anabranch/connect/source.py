"""The contract of a source: what the driver plans with, and what a worker reads with.

A source is cut into **partitions**, each an ordered sequence of records that only ever grows.  A
**position** is a non-negative integer inside a partition, 0 at its beginning; what it counts (bytes, rows,
items) is the source's own affair.  The driver asks what is there (`discover`), cuts a prefix of it (`cut`),
records the resulting `Slice` durably, and workers read exactly that slice, perhaps in pieces (`split`),
perhaps many times, perhaps on other hosts and years later.

The one promise that everything above stands on:

    For every slice that was ever recorded, `read` yields the same rows in the same order, or raises.

Must not know: steps, workers, flows.

To write a source of your own: subclass `Source`, make a slice a pure function of what is stored, keep
what only the driver needs out of `__getstate__`, and run `tests/connect/test_source_contract.py` over it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl

from anabranch.model.batch import WEIGHT
from anabranch.model.ids import PartitionId
from anabranch.storage import Storage

_ONES = 1 << 20

OnBad = Callable[[str, str, str], None]
"""`on_bad(where, record, reason)` either raises `RecordError`, which stops the step, or notes a dead
letter and returns, and then the reader leaves the record out."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A recorded range of one partition: all that is needed to read the same rows again.

    `start` ≤ `end`; the range is half-open.  `rows` and `size` (bytes) are for balancing and display and
    may be estimates.  `extra` is JSON: whatever identifies the thing that was read, so that a change is
    noticed.
    """

    partition: PartitionId
    start: int
    end: int
    rows: int
    size: int
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A JSON-able form; the inverse of `from_json`."""
        return {
            "partition": self.partition,
            "start": self.start,
            "end": self.end,
            "rows": self.rows,
            "size": self.size,
            "extra": dict(self.extra),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Slice:
        """Read back what `to_json` gave."""
        return cls(
            PartitionId(str(data["partition"])),
            int(data["start"]),
            int(data["end"]),
            int(data["rows"]),
            int(data["size"]),
            dict(data["extra"]),
        )


@dataclass(frozen=True, slots=True)
class Available:
    """What a partition holds beyond the position that was asked about: `start` < `end`.

    `rows` is an estimate of the records in it, at least 1; `size` is bytes.
    """

    partition: PartitionId
    start: int
    end: int
    rows: int
    size: int


class Source(ABC):
    """Where an input's rows come from.

    Life in the driver: `start`, then `discover`/`pending`/`cut`/`split` as often as the step loop likes, then
    `close`.  Life in a worker: unpickled, `read`.  A source that was never started can be asked for its
    schema and fingerprint and can be pickled.  `discover` to `split` are called from one thread at a
    time.
    """

    schema: Mapping[str, pl.DataType]
    """The user's columns, in order; no name begins with two underscores."""

    append_only: bool = True
    """Whether every row has weight +1."""

    splittable: bool = True
    """Whether `split` can give more than one piece."""

    abreast: bool = False
    """Whether rows come to all partitions side by side, as in a topic: then a step takes of each its share of what waits.
    Files are better read a few at a time, each for long."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """The JSON-able parameters that say what is read and how.

        A job whose source changed its fingerprint reads something else than what its records describe.
        Parameters that only change speed or timing are not part of it.
        """

    def attach(self, log: Storage) -> None:  # noqa: B027  most sources need nothing
        """Learn where a durable input log is kept (driver, before the source is started or pickled)."""

    def start(self, log: Storage | None) -> None:  # noqa: B027  most sources need nothing
        """Make ready to be asked (driver only).

        A source that cannot replay keeps its durable input log in `log` and refuses `None` with a
        `ConfigError`; all others ignore it.
        """

    def trim(self, positions: Mapping[PartitionId, int]) -> None:  # noqa: B027  most sources keep nothing
        """Free what lies before `positions`: nobody will read it again (driver, after `start`).  Idempotent."""

    def close(self) -> None:  # noqa: B027  most sources need nothing
        """Release what `start` took; may be called twice, or without `start`."""

    @abstractmethod
    def discover(self, positions: Mapping[PartitionId, int]) -> list[Available]:
        """What lies beyond `positions` now, one entry for each partition that has something.

        A partition that `positions` does not name is read from 0.  The order is deterministic.  It is
        polled every 20 ms or so: when nothing has changed it must cost no more than a few system calls.

        Raises:
            InputChangedError: a partition holds less than its position says was already read.
        """

    @abstractmethod
    def pending(self) -> bool:
        """Whether more will come by itself, without anybody adding input from outside.

        True for a generator below its limit, an iterable that is not exhausted, and a text file whose
        last line has no newline and has not settled yet.  A flow that runs until idle stops when nothing
        is available and nothing is pending.
        """

    @abstractmethod
    def cut(self, available: Available, rows: int, size: int) -> Slice:
        """A prefix of `available` with at most about `rows` records and `size` bytes, and at least one
        record."""

    def split(self, piece: Slice, parts: int) -> list[Slice]:
        """Contiguous pieces of `piece`, in order, of about equal size, at most `parts` of them, none of
        them empty.

        Reading the pieces one after another gives what reading `piece` gives.
        """
        return [piece]

    @abstractmethod
    def read(self, piece: Slice, on_bad: OnBad) -> Iterator[pl.DataFrame]:
        """The slice's rows, in partition order (worker).

        Every frame has exactly the schema's columns and types, in order, and then `__weight` (Int64).
        Frames may be empty; there may be none.

        Raises:
            InputChangedError: what is stored is not what the slice was cut from.
            RecordError: a record is bad and `on_bad` stops there.
        """


def frame_schema(schema: Mapping[str, pl.DataType]) -> dict[str, pl.DataType]:
    """The exact schema of the frames that `read` yields."""
    return {**schema, WEIGHT: pl.Int64()}


def with_weight(frame: pl.DataFrame) -> pl.DataFrame:
    """A frame of plain records as a batch in which each has weight +1."""
    if frame.height > _ONES:
        return frame.with_columns(pl.lit(1, pl.Int64).alias(WEIGHT))
    return frame.with_columns(_ones().head(frame.height))


@lru_cache(maxsize=1)
def _ones() -> pl.Series:
    """One column for all frames: filling a fresh one for each costs more in page faults than hashing its rows does."""
    return pl.Series(WEIGHT, np.ones(_ONES, dtype=np.int64))


def even_bounds(start: int, end: int, parts: int) -> list[tuple[int, int]]:
    """Cut [start, end) into at most `parts` ranges that differ in length by at most one; none is empty."""
    parts = max(1, min(parts, end - start))
    width = end - start
    marks = [start + width * i // parts for i in range(parts + 1)]
    return list(pairwise(marks))
