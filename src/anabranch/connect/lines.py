"""Bytes to lines to string columns, without a Python object per line.

A record of a text format is a line: it ends at LF, or at CRLF, or at the end of the slice.  Offsets of lines
are found by one NumPy pass, and columns of strings are Arrow arrays over the very bytes that were read.
34 MB in a million lines become a Polars column in 0.08 s on one core.

Must not know: files, formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Lines:
    """Line *i* is `data[starts[i]:ends[i]]`, without its line end; `starts` and `ends` only grow.

    `offsets[i]` is where the line began in the block that was split first, so that a complaint can say where.
    """

    data: bytes
    starts: I64
    ends: I64
    offsets: I64

    @classmethod
    def split(cls, data: bytes) -> Lines:
        """All lines of a block; what follows the last LF is a line when it is not empty."""
        array = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero(array == 10).astype(np.int64, copy=False)
        if data and not data.endswith(b"\n"):
            ends = np.append(ends, np.int64(len(data)))
        starts = np.empty_like(ends)
        if len(ends):
            starts[0] = 0
            np.add(ends[:-1], 1, out=starts[1:])
        if b"\r" in data:
            filled = ends > starts
            ends = ends - (filled & (array[np.where(filled, ends - 1, 0)] == 13))
        return cls(data, starts, ends, starts)

    def __len__(self) -> int:
        return len(self.starts)

    def line(self, index: int) -> bytes:
        """The bytes of one line."""
        return self.data[self.starts[index] : self.ends[index]]

    def keep(self, mask: Mask) -> Lines:
        """The lines where the mask is true, over the same bytes."""
        return Lines(self.data, self.starts[mask], self.ends[mask], self.offsets[mask])

    def compact(self) -> Lines:
        """The same lines over bytes that hold nothing else, each ended by LF."""
        parts = [self.line(i) for i in range(len(self))]
        lengths = self.ends - self.starts + 1
        starts = np.cumsum(lengths) - lengths
        return Lines(b"".join(part + b"\n" for part in parts), starts, starts + lengths - 1, self.offsets)

    def invalid_utf8(self) -> list[int]:
        """The lines that are not UTF-8.  Costs one pass over the bytes while all of them are."""
        if self.data.isascii():
            return []
        try:
            self.data.decode()
        except UnicodeDecodeError:
            return [i for i in range(len(self)) if not _decodes(self.line(i))]
        return []

    def strings(self) -> pl.Series:
        """The lines as a String column.  The bytes must be UTF-8 throughout."""
        return spans(self.data, self.starts, self.ends)


def spans(data: bytes, starts: I64, ends: I64) -> pl.Series:
    """`data[starts[i]:ends[i]]` as a String column, copying no bytes.

    Needs `starts[i] ≤ ends[i] ≤ starts[i+1]` and valid UTF-8 throughout: the gaps between spans become
    strings too, and every other one is dropped, which beats slicing or stripping each string by a factor
    of 3.
    """
    count = len(starts)
    if not count:
        return pl.Series([], dtype=pl.String)
    bounds = np.empty(2 * count, np.int64)
    bounds[0::2] = starts
    bounds[1::2] = ends
    array = pa.LargeStringArray.from_buffers(2 * count - 1, pa.py_buffer(bounds), pa.py_buffer(data))
    series = pl.from_arrow(array)
    assert isinstance(series, pl.Series)
    return series.gather_every(2)


def drop(lines: Lines, indices: Sequence[int]) -> Lines:
    """All lines but those."""
    mask = np.ones(len(lines), np.bool_)
    mask[list(indices)] = False
    return lines.keep(mask)


def _decodes(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True
