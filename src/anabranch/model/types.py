"""The types a column may have, and the ways a user may write them down.

A schema is an ordered mapping from column name to Polars type.  Users may also write pyarrow types, a
`pyarrow.Schema`, or plain Python types; all become Polars types here, so that nothing else has to ask.

Must not know: flows, sources, storage.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

import polars as pl
import pyarrow as pa

from anabranch.errors import FlowError

_PYTHON: dict[Any, pl.DataType] = {
    int: pl.Int64(),
    float: pl.Float64(),
    str: pl.String(),
    bool: pl.Boolean(),
    bytes: pl.Binary(),
    dt.datetime: pl.Datetime("us"),
    dt.date: pl.Date(),
    dt.time: pl.Time(),
    dt.timedelta: pl.Duration("us"),
    Decimal: pl.Decimal(38, 9),
}

_SUPPORTED: tuple[type[pl.DataType], ...] = (
    pl.Int8,
    pl.Int16,
    pl.Int32,
    pl.Int64,
    pl.UInt8,
    pl.UInt16,
    pl.UInt32,
    pl.UInt64,
    pl.Float32,
    pl.Float64,
    pl.Boolean,
    pl.String,
    pl.Binary,
    pl.Date,
    pl.Time,
    pl.Datetime,
    pl.Duration,
    pl.Decimal,
)

_ALLOWED = (
    "columns are numbers, booleans, strings, binary, dates, times, timestamps, durations, decimals, "
    "and lists and structs of them"
)


def to_dtype(spec: object) -> pl.DataType:
    """One column type, from a Polars type (class or instance), a pyarrow type or a Python type.

    Python's `int` is Int64, `float` Float64, `datetime` Datetime in microseconds without a zone, `Decimal`
    Decimal(38, 9).  Dictionary-encoded Arrow types become their values' type.

    Raises:
        FlowError: the type is unknown or cannot be a column of a stream.

    >>> to_dtype(int)
    Int64
    """
    dtype = _resolve(spec)
    _check(dtype, spec)
    return dtype


def to_schema(spec: object) -> dict[str, pl.DataType]:
    """A whole schema, from a mapping of names to types, pairs of them, a `pl.Schema` or a `pa.Schema`.

    Raises:
        FlowError: no columns, a name that is empty, hidden, not a string or there twice, or an unsupported
            type.

    >>> to_schema({"user": str, "amount": pl.Int32})
    {'user': String, 'amount': Int32}
    """
    pairs: Iterable[Any]
    if isinstance(spec, pa.Schema):
        pairs = [(field.name, field.type) for field in spec]
    elif isinstance(spec, Mapping):
        pairs = list(spec.items())
    elif isinstance(spec, list | tuple):
        pairs = spec
    else:
        raise FlowError(
            f"a schema is a dict of column names to types, or a pyarrow.Schema; found {type(spec).__name__}"
        )
    schema: dict[str, pl.DataType] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise FlowError(f"a schema's entries are pairs of name and type; found {pair!r}")
        name, given = pair
        check_name(name)
        if name in schema:
            raise FlowError(f"column {name!r} is in the schema twice; column names must differ")
        try:
            schema[name] = to_dtype(given)
        except FlowError as error:
            raise FlowError(f"column {name!r}: {error}") from None
    if not schema:
        raise FlowError("a schema needs at least one column; found none")
    return schema


def check_name(name: object) -> None:
    """Refuse what cannot be a column's name.

    Raises:
        FlowError: not a string, empty, or beginning with two underscores.
    """
    if not isinstance(name, str):
        raise FlowError(f"a column's name is a string; found {name!r}")
    if not name:
        raise FlowError("a column's name must not be empty")
    if name.startswith("__"):
        raise FlowError(
            f"column {name!r}: names beginning with two underscores are the engine's own; rename it"
        )


def _resolve(spec: object) -> pl.DataType:
    if isinstance(spec, pl.DataType):
        return spec
    if isinstance(spec, type) and issubclass(spec, pl.DataType):
        if spec is pl.Decimal:
            return pl.Decimal(38, 9)
        if spec in (pl.List, pl.Struct, pl.Array, pl.Enum):
            raise FlowError(f"type {spec.__name__} needs its inner types, as in pl.List(pl.Int64)")
        try:
            return spec()
        except TypeError:
            raise FlowError(f"type {spec.__name__} needs parameters") from None
    if isinstance(spec, pa.DataType):
        return _from_arrow(spec)
    try:
        return _PYTHON[spec]
    except (KeyError, TypeError):
        raise FlowError(
            f"unsupported type {spec!r}; use a Polars type, a pyarrow type, or one of "
            + ", ".join(sorted(known.__name__ for known in _PYTHON))
        ) from None


def _from_arrow(spec: Any) -> pl.DataType:
    if pa.types.is_dictionary(spec):
        spec = spec.value_type
    if not _arrow_supported(spec):
        raise FlowError(f"unsupported type {spec}; {_ALLOWED}")
    return pl.Series(pl.from_arrow(pa.array([], spec))).dtype


def _arrow_supported(spec: Any) -> bool:
    # Asked before Polars sees the type: Polars panics on some (a 256-bit decimal), which no `except` clause
    # for ordinary exceptions would catch.
    types = pa.types
    if types.is_struct(spec):
        return all(_arrow_supported(field.type) for field in spec)
    if types.is_list(spec) or types.is_large_list(spec) or types.is_fixed_size_list(spec):
        return _arrow_supported(spec.value_type)
    return any(
        test(spec)
        for test in (
            types.is_integer,
            types.is_float32,
            types.is_float64,
            types.is_boolean,
            types.is_string,
            types.is_large_string,
            types.is_string_view,
            types.is_binary,
            types.is_large_binary,
            types.is_binary_view,
            types.is_fixed_size_binary,
            types.is_date,
            types.is_time,
            types.is_timestamp,
            types.is_duration,
            types.is_decimal128,
        )
    )


def _check(dtype: pl.DataType, spec: object) -> None:
    if isinstance(dtype, pl.List | pl.Array):
        _check(_resolve(dtype.inner), spec)
    elif isinstance(dtype, pl.Struct):
        for field in dtype.fields:
            _check(_resolve(field.dtype), spec)
    elif not isinstance(dtype, _SUPPORTED):
        raise FlowError(f"unsupported type {spec!r}; {_ALLOWED}")
