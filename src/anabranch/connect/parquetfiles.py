"""A directory of Parquet files.  A position is a row number.

A file must be complete when it gets its name (write it under a name that ends in `.tmp` or begins with
`_`, then rename): one that is not yet Parquet is waited for during `settle` seconds and is an error after
that.

Costs, measured on one core with rows of two integers and a string: whole row groups decode at 24 million
rows/s; a slice from inside a large row group costs what a scan with a pushed-down slice costs, 10 million
rows/s, instead of decoding the whole group (a slice of 100,000 of 1,000,000 rows: 10 ms instead of 44
ms).  Footers are parsed once per process and file.

Must not know: steps, workers, flows.
"""

from __future__ import annotations

import os
import time
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.connect.filesource import FileSource
from anabranch.connect.listing import Listing
from anabranch.connect.source import Available, OnBad, Slice, even_bounds, with_weight
from anabranch.errors import FlowError, InputChangedError, RecordError
from anabranch.model.batch import WEIGHT
from anabranch.model.ids import PartitionId
from anabranch.model.types import to_dtype

_WHOLE_GROUPS = 0.4
"""From this share of the touched row groups on, decoding them whole beats slicing inside them."""

_SMALL_GROUP = 8 << 20
"""Bytes up to which a decoded row group is kept for the next slice of it; four are kept in a process."""


class Footer(NamedTuple):
    """What a file's footer says."""

    metadata: Any
    bounds: list[int]
    """Row numbers at which row groups begin, and the end."""
    size: int
    """Bytes of all columns before compression."""
    checksum: int

    @property
    def rows(self) -> int:
        return self.bounds[-1]


@lru_cache(maxsize=256)
def _footer(path: str, mtime_ns: int, size: int) -> Footer:
    with open(path, "rb") as file:
        file.seek(max(0, size - 8))
        tail = file.read(8)
        if len(tail) < 8 or tail[4:] not in (b"PAR1", b"PARE"):
            raise pa.ArrowInvalid("no Parquet footer")
        length = int.from_bytes(tail[:4], "little")
        file.seek(max(0, size - 8 - length))
        checksum = zlib.crc32(file.read(length))
    metadata = pq.read_metadata(path)
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    bounds = [0, *accumulate(group.num_rows for group in groups)]
    return Footer(metadata, bounds, sum(group.total_byte_size for group in groups), checksum)


def read_footer(path: Path) -> Footer:
    """A file's footer, from the process's cache if the file is the same.

    Raises:
        FileNotFoundError: there is no such file.
        RecordError: it is not a Parquet file.
    """
    stat = os.stat(path)
    try:
        return _footer(str(path), stat.st_mtime_ns, stat.st_size)
    except pa.ArrowException as error:
        raise RecordError(f"input file {path}", f"not a readable Parquet file: {error}") from None


@lru_cache(maxsize=4)
def _small_group(path: str, checksum: int, index: int, columns: tuple[str, ...]) -> pl.DataFrame:
    """A row group that small steps read bit by bit, decoded once.  `checksum` tells files of one name
    apart."""
    return _read_groups(path, read_footer(Path(path)), range(index, index + 1), columns)


def _read_groups(path: str, footer: Footer, groups: range, columns: Sequence[str]) -> pl.DataFrame:
    with pq.ParquetFile(path, metadata=footer.metadata, memory_map=True) as file:
        table = file.read_row_groups(list(groups), columns=list(columns), use_threads=False)
    frame = pl.from_arrow(table, rechunk=False)
    assert isinstance(frame, pl.DataFrame)
    return frame


class ParquetFiles(FileSource):
    """A directory of Parquet files that grows by new files."""

    format_name = "parquet"

    def __init__(
        self, listing: Listing, schema: Mapping[str, pl.DataType], weight: str | None, settle: float
    ) -> None:
        super().__init__(listing, schema, weight, settle)
        self._columns = [*self.schema, weight] if weight else list(self.schema)
        self._has_text = any(isinstance(dtype, pl.String | pl.Binary) for dtype in self.schema.values())
        self._footers: dict[str, Footer] = {}
        self._waiting: list[str] = []
        """Files that are not Parquet yet; each is in the listing and younger than `settle`."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_footers": {}, "_waiting": []}

    # The driver's half.

    def discover(self, positions: Mapping[PartitionId, int]) -> list[Available]:
        if self._listing.refresh():
            known = self._footers
            self._waiting = [name for name in self._listing.names if name not in known]
            self._footers = {name: known.pop(name) for name in self._listing.names if name in known}
            for name, footer in known.items():
                if positions.get(PartitionId(name), 0) < footer.rows:
                    raise self._vanished(name)
        if self._waiting:
            self._waiting = [name for name in self._waiting if not self._learn(name)]
            self._footers = dict(sorted(self._footers.items()))
        found = []
        for name, footer in self._footers.items():
            start = positions.get(PartitionId(name), 0)
            if start < footer.rows:
                rows = footer.rows - start
                found.append(
                    Available(PartitionId(name), start, footer.rows, rows, footer.size * rows // footer.rows)
                )
            elif start > footer.rows:
                raise self._changed(name, f"{start} rows were read of it, and now it has {footer.rows}")
        return found

    def pending(self) -> bool:
        return bool(self._waiting)

    def _learn(self, name: str) -> bool:
        path = self.path_of(name)
        try:
            self._footers[name] = read_footer(path)
        except FileNotFoundError:
            return True
        except RecordError:
            if time.time() - path.stat().st_mtime >= self._settle:
                raise
            return False
        return True

    def cut(self, available: Available, rows: int, size: int) -> Slice:
        footer = self._footer_of(available.partition)
        width = max(1.0, footer.size / footer.rows)
        limit = max(1, min(rows, int(size / width)))
        start, end = available.start, available.end
        if end - start > limit:
            end = start + limit
            boundary = footer.bounds[bisect_right(footer.bounds, end) - 1]
            if boundary - start >= limit / 2:
                end = boundary
        extra = {"rows": footer.rows, "footer": footer.checksum}
        return Slice(available.partition, start, end, end - start, int((end - start) * width), extra)

    def split(self, piece: Slice, parts: int) -> list[Slice]:
        footer = self._footer_of(piece.partition)
        marks = [piece.start]
        bounds = even_bounds(piece.start, piece.end, parts)
        for low, high in bounds[:-1]:
            at = bisect_right(footer.bounds, high)
            near = min(footer.bounds[at - 1 : at + 1], key=lambda mark: abs(mark - high))
            mark = near if abs(near - high) <= (high - low) // 4 else high
            if marks[-1] < mark < piece.end:
                marks.append(mark)
        marks.append(piece.end)
        width = piece.size / (piece.end - piece.start)
        return [
            Slice(piece.partition, low, high, high - low, int((high - low) * width), piece.extra)
            for low, high in pairwise(marks)
        ]

    # The worker's half.

    def read(self, piece: Slice, on_bad: OnBad) -> Iterator[pl.DataFrame]:
        name = piece.partition
        path = self.path_of(name)
        footer = self._footer_of(name)
        if footer.rows != piece.extra["rows"] or footer.checksum != piece.extra["footer"]:
            raise self._changed(name, "its footer is not the one that was recorded")
        present = footer.metadata.schema.to_arrow_schema()
        for column in self._columns:
            if column not in present.names:
                raise RecordError(
                    f"input file {path}",
                    f"column {column!r} is missing; the file has {', '.join(present.names)}",
                )
        frame = self._conform(self._load(path, footer, piece.start, piece.end), path)
        if frame.height != piece.end - piece.start:
            raise self._changed(
                name, f"{frame.height} rows came where {piece.end - piece.start} were recorded"
            )
        if self._weight is None:
            yield with_weight(frame)
            return
        weights = frame.get_column(self._weight)
        for row in weights.is_null().arg_true() if weights.null_count() else ():
            record = str(frame.row(row, named=True))
            on_bad(
                f"input file {path} row {piece.start + row}",
                record,
                f"weight column {self._weight!r} is null",
            )
        frame = frame.filter(weights.is_not_null()) if weights.null_count() else frame
        yield frame.rename({self._weight: WEIGHT}).select(*self.schema, WEIGHT)

    def _load(self, path: Path, footer: Footer, start: int, end: int) -> pl.DataFrame:
        first = bisect_right(footer.bounds, start) - 1
        last = bisect_right(footer.bounds, end - 1) - 1
        low, high = footer.bounds[first], footer.bounds[last + 1]
        part = end - start < _WHOLE_GROUPS * (high - low)
        if part and first == last and footer.metadata.row_group(first).total_byte_size <= _SMALL_GROUP:
            group = _small_group(str(path), footer.checksum, first, tuple(self._columns))
            return group.slice(start - low, end - start)
        # Polars decodes strings four times as fast as Arrow does; Arrow is a third faster with numbers.
        if not part and not self._has_text:
            frame = _read_groups(str(path), footer, range(first, last + 1), self._columns)
            return frame.slice(start - low, end - start)
        return pl.scan_parquet(path, glob=False).select(self._columns).slice(start, end - start).collect()

    def _conform(self, frame: pl.DataFrame, path: Path) -> pl.DataFrame:
        wanted = dict(self.schema)
        if self._weight:
            wanted[self._weight] = pl.Int64()
        casts = []
        for name, dtype in wanted.items():
            found = frame.schema[name]
            if found == dtype:
                continue
            if not _widens(found, dtype):
                raise RecordError(
                    f"input file {path}", f"column {name!r} is {found}, and the input's schema says {dtype}"
                )
            casts.append(pl.col(name).cast(dtype))
        try:
            return frame.select(*wanted).with_columns(casts)
        except pl.exceptions.PolarsError as error:
            raise RecordError(f"input file {path}", str(error).split("\n", 1)[0]) from None

    def _footer_of(self, partition: PartitionId) -> Footer:
        try:
            return read_footer(self.path_of(partition))
        except FileNotFoundError:
            raise self._vanished(partition) from None

    def _vanished(self, name: str) -> InputChangedError:
        return InputChangedError(f"input file {self.path_of(name)} vanished before it was read; put it back")

    def _changed(self, name: str, what: str) -> InputChangedError:
        return InputChangedError(
            f"input file {self.path_of(name)} changed: {what}; a Parquet file must stay as it is: restore "
            "it, or add new data as a new file"
        )


def parquet_schema(path: Path) -> dict[str, pl.DataType]:
    """The columns of a Parquet file.

    Raises:
        RecordError: it is not one.
        FlowError: a column has a type that no stream can have.
    """
    schema = {}
    for field in read_footer(path).metadata.schema.to_arrow_schema():
        try:
            schema[field.name] = to_dtype(field.type)
        except FlowError as error:
            raise FlowError(f"input file {path}: column {field.name!r}: {error}") from None
    return schema


def _widens(found: pl.DataType, wanted: pl.DataType) -> bool:
    """Whether a cast keeps the meaning: within numbers, within timestamps, from dictionary to string."""
    if found.is_numeric() and wanted.is_numeric():
        return not (found.is_float() and wanted.is_integer())
    if isinstance(wanted, pl.String):
        return isinstance(found, pl.Categorical | pl.Enum)
    if isinstance(found, pl.Datetime) and isinstance(wanted, pl.Datetime):
        return found.time_zone == wanted.time_zone
    return isinstance(found, pl.Null) or found.base_type() == wanted.base_type()
