"""Columns of fixed-width types as numpy arrays of their little-endian bytes, and back.

Must not know: how rows or keys are laid out.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from anabranch.model.buffers import to_arrow

Bools = npt.NDArray[np.bool_]

_FORMATS: dict[type[pl.DataType], str] = {
    pl.Boolean: "u1",
    pl.Int8: "i1",
    pl.Int16: "<i2",
    pl.Int32: "<i4",
    pl.Int64: "<i8",
    pl.UInt8: "u1",
    pl.UInt16: "<u2",
    pl.UInt32: "<u4",
    pl.UInt64: "<u8",
    pl.Float16: "<f2",
    pl.Float32: "<f4",
    pl.Float64: "<f8",
    pl.Date: "<i4",
    pl.Time: "<i8",
    pl.Datetime: "<i8",
    pl.Duration: "<i8",
    pl.Decimal: "V16",
}


def fixed_format(dtype: pl.DataType) -> str | None:
    """The numpy format of a value of this type, or None if its width varies."""
    return _FORMATS.get(dtype.base_type())


def to_fixed(series: pl.Series) -> npt.NDArray[np.generic]:
    """The values of a fixed-width column in its `fixed_format`; zero bytes where null."""
    form = _FORMATS[series.dtype.base_type()]
    if isinstance(series.dtype, pl.Decimal):
        array = to_arrow(series)
        values = np.frombuffer(array.buffers()[1], form, count=len(array), offset=16 * array.offset)
        if series.null_count():
            values = values.copy()
            values[series.is_null().to_numpy()] = np.void(bytes(16))
        return values
    # Every call of an expression costs tens of microseconds, which small steps feel.
    physical = series.to_physical() if series.dtype.is_temporal() else series
    if isinstance(series.dtype, pl.Boolean):
        physical = physical.cast(pl.UInt8)
    if physical.null_count():
        physical = physical.fill_null(0)
    return physical.to_numpy().astype(form, copy=False)


def from_fixed(
    name: str, values: npt.NDArray[np.generic], dtype: pl.DataType, nulls: Bools | None = None
) -> pl.Series:
    """The inverse of `to_fixed`: a column of exactly this type."""
    if isinstance(dtype, pl.Boolean):
        data = np.packbits(values.astype(np.bool_), bitorder="little")
    else:
        data = np.ascontiguousarray(values)
    validity = None if nulls is None else pa.py_buffer(np.packbits(~nulls, bitorder="little"))
    # Bytes: Python's buffer protocol has no format for numpy's void type.
    buffer = pa.py_buffer(data.view(np.uint8))
    array = pa.Array.from_buffers(arrow_type(dtype), len(values), [validity, buffer])
    return pl.Series(name, array, dtype=dtype)


@lru_cache(maxsize=256)
def arrow_type(dtype: pl.DataType) -> pa.DataType:
    """The Arrow type of a Polars type."""
    return to_arrow(pl.Series([], dtype=dtype)).type
