"""A Python iterable as an input: recorded durably first, read from the record ever after.

Two threads in the driver: one pulls items, one converts what has gathered and records it as one segment.
While a segment is being synced the next one gathers, so a fast iterable is recorded in large segments and
a slow one without delay.  Pulling pauses when too much is recorded ahead of what was read, so that an
endless iterable does not fill the disk.

Must not know: steps, workers, flows.
"""

from __future__ import annotations

import inspect
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import polars as pl

from anabranch.connect.inputlog import list_segments, read_rows, trim_segments, write_segment
from anabranch.connect.items import BAD_REASON, BAD_RECORD, ItemDecoder
from anabranch.connect.source import Available, OnBad, Slice, Source, even_bounds, with_weight
from anabranch.errors import AnabranchError, ConfigError, InputChangedError, RecordError
from anabranch.model.batch import WEIGHT
from anabranch.model.ids import PartitionId
from anabranch.model.types import check_name, to_schema
from anabranch.storage import Storage

PARTITION = PartitionId("0")
_AHEAD = 50
"""Batches that may be recorded beyond what was read."""


def iterable(
    items: Iterable[Any] | Callable[..., Iterable[Any]],
    schema: object,
    batch: int = 10_000,
    weight: str | None = None,
) -> IterableSource:
    """An input of Python objects: dicts, tuples in the schema's order, or single values for one column.

    Every item is recorded in the job directory before a step may read it, so a flow that stops and goes
    on reads each item once: after a restart, as many items as are recorded are skipped.

    Args:
        items: an iterable that gives the same items when the flow is started again; or a function that
        returns
            one, and that is called with the number of items already recorded if it takes an argument.
        schema: names and types of the columns.
        batch: items in one recorded segment, at most.
        weight: an integer column that holds the rows' weights; it is not part of the schema then.

    Raises:
        ConfigError: an argument makes no sense.
        FlowError: the schema is wrong.
    """
    if batch < 1:
        raise ConfigError(f"iterable: batch is at least 1; found {batch}")
    if not callable(items) and not isinstance(items, Iterable):
        raise ConfigError(f"iterable: an iterable or a function is needed; found {type(items).__name__}")
    return IterableSource(items, to_schema(schema), batch, weight)


class IterableSource(Source):
    """See `iterable`."""

    def __init__(self, items: Any, schema: Mapping[str, pl.DataType], batch: int, weight: str | None) -> None:
        self.schema = {name: dtype for name, dtype in schema.items() if name != weight}
        self.append_only = weight is None
        if weight is not None:
            check_name(weight)
            schema = {**self.schema, weight: pl.Int64()}
        if not self.schema:
            raise ConfigError(f"iterable: no column is left beside the weight column {weight!r}")
        self._recorded = dict(schema)
        self._weight = weight
        self._batch = batch
        self._items: Any = items
        self._log: Storage | None = None
        self._recorder: _Recorder | None = None

    def fingerprint(self) -> dict[str, Any]:
        return {
            "kind": "iterable",
            "schema": {name: str(dtype) for name, dtype in self._recorded.items()},
            "weight": self._weight,
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_items": None, "_recorder": None}

    def attach(self, log: Storage) -> None:
        self._log = log

    def start(self, log: Storage | None) -> None:
        if log is None:
            raise ConfigError("iterable: this input must be recorded; a directory for its log is needed")
        if self._recorder is not None:
            raise ConfigError("iterable: this input is running already; build a new one for a second flow")
        self.attach(log)
        self._recorder = _Recorder(self._items, log, ItemDecoder(self._recorded, self._weight), self._batch)

    def trim(self, positions: Mapping[PartitionId, int]) -> None:
        self._running().trim(positions.get(PARTITION, 0))

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.stop()
            self._recorder = None

    def discover(self, positions: Mapping[PartitionId, int]) -> list[Available]:
        recorder = self._running()
        start = positions.get(PARTITION, 0)
        end, size = recorder.recorded(start)
        if start > end:
            raise InputChangedError(f"input log {self._log}: {start} items were read, and {end} are recorded")
        return [Available(PARTITION, start, end, end - start, size)] if start < end else []

    def pending(self) -> bool:
        return self._recorder is not None and self._recorder.pending()

    def cut(self, available: Available, rows: int, size: int) -> Slice:
        width = max(1, available.size // (available.end - available.start))
        count = min(available.end - available.start, max(1, min(rows, size // width)))
        return self._slice(available.start, available.start + count, count * width)

    def split(self, piece: Slice, parts: int) -> list[Slice]:
        width = piece.size // (piece.end - piece.start)
        return [
            self._slice(low, high, (high - low) * width)
            for low, high in even_bounds(piece.start, piece.end, parts)
        ]

    def read(self, piece: Slice, on_bad: OnBad) -> Iterator[pl.DataFrame]:
        if self._log is None:
            raise ConfigError("iterable: this input was sent to a worker before it was attached to its log")
        for first, recorded in read_rows(self._log, piece.extra["segment"], piece.start, piece.end):
            frame = recorded
            if recorded.get_column(BAD_REASON).null_count() < recorded.height:
                for place in recorded.get_column(BAD_REASON).is_not_null().arg_true():
                    row = recorded.row(place, named=True)
                    on_bad(f"input item {first + place}", row[BAD_RECORD], row[BAD_REASON])
                frame = recorded.filter(pl.col(BAD_REASON).is_null())
            if self._weight is None:
                yield with_weight(frame.select(*self.schema))
            else:
                yield frame.select(*self.schema, pl.col(self._weight).alias(WEIGHT))

    def _slice(self, start: int, end: int, size: int) -> Slice:
        extra = {"segment": self._running().segment_of(start)}
        return Slice(PARTITION, start, end, end - start, size, extra)

    def _running(self) -> _Recorder:
        if self._recorder is None:
            raise ConfigError("iterable: this input was not started")
        return self._recorder


class _Recorder:
    """The two threads and what they share, all under one lock.

    Invariants: `_starts` are the first items of the segments that are kept, `_sizes` their bytes and `_size` the sum
    of those; `_total` items were ever recorded; the next item that the puller adds to `_gathered` has the number
    `_total + in flight + len(_gathered)`.
    """

    def __init__(self, items: Any, log: Storage, decoder: ItemDecoder, batch: int) -> None:
        self._items = items
        self._log = log
        self._decoder = decoder
        self._batch = batch
        self._lock = threading.Condition()
        self._starts: list[int] = []
        self._sizes: list[int] = []
        self._size = 0
        self._total = 0
        for first, rows, size in list_segments(log):
            self._note(first, rows, size)
        self._gathered: list[Any] = []
        self._exhausted = False
        self._done = False
        self._stopping = False
        self._failure: AnabranchError | None = None
        self._read_to = 0
        self._threads = [
            threading.Thread(target=target, name=f"anabranch-iterable-{role}", daemon=True)
            for role, target in (("pull", self._pull), ("record", self._record))
        ]
        for thread in self._threads:
            thread.start()

    def recorded(self, start: int) -> tuple[int, int]:
        """How many items are recorded, and about how many bytes are those from `start` on."""
        with self._lock:
            if start != self._read_to:
                self._read_to = start
                self._lock.notify_all()
            if self._failure is not None and self._done and start >= self._total:
                raise self._failure
            if not self._starts:
                return 0, 0
            size = self._size * (self._total - start) // (self._total - self._starts[0])
            return self._total, size

    def pending(self) -> bool:
        with self._lock:
            return not self._done

    def segment_of(self, start: int) -> int:
        with self._lock:
            if start < self._starts[0]:
                raise InputChangedError(
                    f"input log {self._log}: items before {self._starts[0]} were trimmed; asked for item {start}"
                )
            return self._starts[bisect_right(self._starts, start) - 1]

    def trim(self, before: int) -> None:
        """Delete the segments of which no item is at or beyond `before`; the last one stays, it tells how many items
        were recorded."""
        with self._lock:
            gone = max(0, min(bisect_right(self._starts, before), len(self._starts)) - 1)
            if not gone:
                return
            self._size -= sum(self._sizes[:gone])
            del self._starts[:gone], self._sizes[:gone]
            first = self._starts[0]
        trim_segments(self._log, first)

    def stop(self) -> None:
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        # A puller that is blocked inside the user's iterable cannot be woken; it is a daemon and holds
        # nothing.
        self._threads[1].join()

    def _note(self, first: int, rows: int, size: int) -> None:
        self._starts.append(first)
        self._sizes.append(size)
        self._size += size
        self._total = first + rows

    def _pull(self) -> None:
        try:
            for item in self._remaining():
                with self._lock:
                    self._lock.wait_for(self._may_pull)
                    if self._stopping:
                        return
                    self._gathered.append(item)
                    if len(self._gathered) == 1:
                        self._lock.notify_all()
        except AnabranchError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  the user's code may raise anything; it surfaces in `discover`
            with self._lock:
                number = self._total + len(self._gathered)
            reason = f"the iterable raised {type(error).__name__}: {error}"
            self._fail(RecordError(f"input item {number}", reason))
        finally:
            with self._lock:
                self._exhausted = True
                self._lock.notify_all()

    def _may_pull(self) -> bool:
        ahead = self._total + len(self._gathered) - self._read_to
        return self._stopping or (len(self._gathered) < 4 * self._batch and ahead < _AHEAD * self._batch)

    def _remaining(self) -> Iterator[Any]:
        """The items that are not recorded yet."""
        recorded = self._total
        made: Iterator[Any]
        if callable(self._items):
            if _takes_argument(self._items):
                rest: Iterator[Any] = iter(self._items(recorded))
                return rest
            made = iter(self._items())
        else:
            made = iter(self._items)
        skipped = sum(1 for _ in islice(made, recorded))
        if skipped < recorded:
            raise InputChangedError(
                f"input log {self._log} holds {recorded} items, and the iterable has only {skipped} now; "
                "it must give the same items again, or be a function that takes the number of items that are "
                "recorded already"
            )
        return made

    def _record(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._gathered or self._exhausted or self._stopping)
                items = self._gathered[: self._batch]
                first = self._total
                if not items:
                    self._done = True
                    return
            try:
                size = write_segment(self._log, first, self._decoder.decode(items))
            except AnabranchError as error:
                self._fail(error, done=True)
                return
            except Exception as error:  # noqa: BLE001  a thread has no caller; it surfaces in `discover`
                self._fail(RecordError(f"input item {first}", f"cannot be recorded: {error}"), done=True)
                return
            with self._lock:
                # Items leave `_gathered` when they are counted in `_total`, so that their sum never falls.
                del self._gathered[: len(items)]
                self._note(first, len(items), size)
                self._lock.notify_all()

    def _fail(self, error: AnabranchError, *, done: bool = False) -> None:
        with self._lock:
            self._done = self._done or done
            self._failure = self._failure or error
            self._lock.notify_all()


def _takes_argument(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(parameter.kind in positional for parameter in parameters)
