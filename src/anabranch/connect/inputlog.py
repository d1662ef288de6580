"""The durable input log of a source that cannot replay: numbered segments of recorded rows.

A segment is one Arrow stream behind a header with its checksum, in a file named by the number of its
first row.  It is written under a temporary name, synced, and linked to its own name exclusively: a
segment is there whole or not at all, and a second writer of the same log fails instead of overwriting.
Segments follow one another without a gap.

Must not know: where rows come from.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pyarrow as pa

from anabranch.connect.durable import disk_full, sync_directory
from anabranch.errors import CorruptError, InputChangedError, JobDirError

_HEADER = struct.Struct("<8sIIQ")
_MAGIC = b"ABINPUT1"


def segment_path(directory: Path, first: int) -> Path:
    """The file of the segment whose first row has this number."""
    return directory / f"{first:020d}.segment"


def write_segment(directory: Path, first: int, frame: pl.DataFrame) -> int:
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
    path = segment_path(directory, first)
    temporary = directory / f".{path.name}.{os.getpid()}.tmp"
    with disk_full(path):
        try:
            with open(temporary, "wb") as file:
                file.write(_HEADER.pack(_MAGIC, zlib.crc32(body), frame.height, len(body)))
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, path)
            except FileExistsError:
                raise JobDirError(
                    f"input log {path} already exists: another process writes the same job; stop it first"
                ) from None
        finally:
            temporary.unlink(missing_ok=True)
        sync_directory(directory)
    return _HEADER.size + len(body)


def list_segments(directory: Path) -> list[tuple[int, int, int]]:
    """(first row, rows, bytes) of every segment, in order.  Leftovers of a crash are removed.

    Raises:
        CorruptError: a segment is missing in between, or a header is damaged.
    """
    for leftover in directory.glob(".*.tmp"):
        leftover.unlink()
    found: list[tuple[int, int, int]] = []
    for path in sorted(directory.glob("*.segment")):
        with open(path, "rb") as file:
            _, rows, length = _header(path, file.read(_HEADER.size))
        first = int(path.stem)
        due = found[-1][0] + found[-1][1] if found else 0
        if first != due:
            raise CorruptError(
                f"input log {directory}: expected a segment that begins at row {due}, found {path.name}"
            )
        found.append((first, rows, _HEADER.size + length))
    return found


def read_segment(directory: Path, first: int) -> pl.DataFrame:
    """The rows of one segment.

    Raises:
        InputChangedError: it is gone.
        CorruptError: its bytes are damaged.
    """
    path = segment_path(directory, first)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise InputChangedError(
            f"input log {path} is gone; restore it from a backup of the job directory"
        ) from None
    checksum, rows, length = _header(path, data[: _HEADER.size])
    body = memoryview(data)[_HEADER.size :]
    if len(body) != length or zlib.crc32(body) != checksum:
        raise CorruptError(
            f"input log {path} fails its checksum; restore it from a backup of the job directory"
        )
    with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
        frame = pl.from_arrow(reader.read_all())
    assert isinstance(frame, pl.DataFrame)
    assert frame.height == rows
    return frame


def read_rows(directory: Path, segment: int, start: int, end: int) -> Iterator[tuple[int, pl.DataFrame]]:
    """Rows start … end − 1 as (number of the first, frame), beginning in the segment that holds `start`."""
    while segment < end:
        frame = read_segment(directory, segment)
        low = max(start, segment)
        yield low, frame.slice(low - segment, min(end, segment + frame.height) - low)
        segment += frame.height


def _header(path: Path, data: bytes) -> tuple[int, int, int]:
    if len(data) < _HEADER.size or data[:8] != _MAGIC:
        raise CorruptError(
            f"input log {path} has no valid header; restore it from a backup of the job directory"
        )
    _, checksum, rows, length = _HEADER.unpack(data)
    return checksum, rows, length
