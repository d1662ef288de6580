"""The durable input log of a source that cannot replay: numbered segments of recorded rows.

A segment is one Arrow stream behind a header with its checksum, in a file named by the number of its
first row.  It is created exclusively: a segment is there whole or not at all, and a second writer of the same log
fails instead of overwriting.  Segments follow one another without a gap, from the one on that `first.json` names:
those before it were trimmed.

Must not know: where rows come from.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import polars as pl
import pyarrow as pa

from anabranch import crash
from anabranch.errors import CorruptError, InputChangedError, JobDirError
from anabranch.storage import Storage, record
from anabranch.storage.ahead import read_ahead

_HEADER = struct.Struct("<8sIIQ")
_MAGIC = b"ABINPUT1"
_FIRST = "first.json"
_SUFFIX = ".segment"

_SEGMENT = crash.declare_write("segment", "rows of a source that cannot replay are recorded")
_TRIM = crash.declare_write("inputtrim", "an input log says which row is its first")


def segment_name(first: int) -> str:
    """The file of the segment whose first row has this number."""
    return f"{first:020d}{_SUFFIX}"


def write_segment(log: Storage, first: int, frame: pl.DataFrame) -> int:
    """Record rows durably; the segment's size in bytes.

    Raises:
        JobDirError: the segment exists, so another process writes this log.
        StorageFullError: the disk is full.
    """
    sink = pa.BufferOutputStream()
    table = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    body = sink.getvalue()
    header = _HEADER.pack(_MAGIC, zlib.crc32(body), frame.height, len(body))
    name = segment_name(first)
    try:
        log.create(name, b"".join((header, memoryview(body))), _SEGMENT)
    except FileExistsError:
        raise JobDirError(
            f"input log {log.where(name)} already exists: another process writes the same job; stop it first"
        ) from None
    return _HEADER.size + len(body)


def list_segments(log: Storage) -> list[tuple[int, int, int]]:
    """(first row, rows, bytes) of every segment that is kept, in order.  Leftovers of a crash are removed.

    Raises:
        CorruptError: a segment is missing in between, or a header is damaged.
    """
    log.sweep()
    due = _first_row(log)
    names = [name for name in log.list() if name.endswith(_SUFFIX)]
    kept = [name for name in names if _row_of(name) >= due]
    log.delete(*(name for name in names if name not in kept))
    found: list[tuple[int, int, int]] = []
    headers = read_ahead(log, lambda name: log.read(name, _HEADER.size), kept)
    for name, data in zip(kept, headers, strict=True):
        _, rows, length = _header(log.where(name), data)
        if _row_of(name) != due:
            raise CorruptError(f"input log {log}: expected a segment that begins at row {due}, found {name}")
        found.append((due, rows, _HEADER.size + length))
        due += rows
    return found


def trim_segments(log: Storage, first: int) -> None:
    """Delete all segments before the one that begins with row `first`.

    What a crash leaves of them, `list_segments` deletes.
    """
    record.replace(log, _FIRST, {"first": first}, point=_TRIM)
    names = [name for name in log.list() if name.endswith(_SUFFIX)]
    log.delete(*(name for name in names if _row_of(name) < first))


def is_whole(log: Storage) -> bool:
    """Whether the log still has all that was ever recorded."""
    return _first_row(log) == 0


def read_segment(log: Storage, first: int) -> pl.DataFrame:
    """The rows of one segment.

    Raises:
        InputChangedError: it is gone.
        CorruptError: its bytes are damaged.
    """
    name = segment_name(first)
    where = log.where(name)
    try:
        data = log.read(name)
    except FileNotFoundError:
        raise InputChangedError(
            f"input log {where} is gone; restore it from a backup of the job directory"
        ) from None
    checksum, rows, length = _header(where, data[: _HEADER.size])
    body = memoryview(data)[_HEADER.size :]
    if len(body) != length or zlib.crc32(body) != checksum:
        raise CorruptError(
            f"input log {where} fails its checksum; restore it from a backup of the job directory"
        )
    with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
        frame = pl.from_arrow(reader.read_all())
    assert isinstance(frame, pl.DataFrame)
    assert frame.height == rows
    return frame


def read_rows(log: Storage, segment: int, start: int, end: int) -> Iterator[tuple[int, pl.DataFrame]]:
    """Rows start … end − 1 as (number of the first, frame), beginning in the segment that holds `start`."""
    while segment < end:
        frame = read_segment(log, segment)
        low = max(start, segment)
        yield low, frame.slice(low - segment, min(end, segment + frame.height) - low)
        segment += frame.height


def _first_row(log: Storage) -> int:
    try:
        return int(record.read(log, _FIRST)["first"])
    except FileNotFoundError:
        return 0


def _row_of(name: str) -> int:
    return int(name.removesuffix(_SUFFIX))


def _header(where: str, data: bytes) -> tuple[int, int, int]:
    if len(data) < _HEADER.size or data[:8] != _MAGIC:
        raise CorruptError(
            f"input log {where} has no valid header; restore it from a backup of the job directory"
        )
    _, checksum, rows, length = _HEADER.unpack(data)
    return checksum, rows, length
