"""Views of the buffers below Arrow arrays, for kernels written in numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

I64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


def to_arrow(series: pl.Series) -> pa.Array:
    """One contiguous Arrow array in the classic layouts: offsets of 64 bits, no views."""
    return series.rechunk().to_arrow(compat_level=pl.CompatLevel.oldest())


def list_offsets(array: pa.Array) -> I64:
    """The n + 1 offsets of a large string, binary or list array of n values."""
    if not len(array):
        return np.zeros(1, dtype=np.int64)
    offsets: I64 = np.frombuffer(array.buffers()[1], np.int64, count=len(array) + 1, offset=8 * array.offset)
    return offsets


def binary_spans(array: pa.Array) -> tuple[I64, Bytes]:
    """Offsets, from 0, and bytes of a large string or binary array."""
    offsets = list_offsets(array)
    buffer = array.buffers()[2]
    data = np.zeros(0, np.uint8) if buffer is None else np.frombuffer(buffer, np.uint8)
    first, last = int(offsets[0]), int(offsets[-1])
    return (offsets - first if first else offsets), data[first:last]
