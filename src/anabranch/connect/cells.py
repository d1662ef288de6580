"""Text cells to typed columns.

Every format is fixed: nothing is guessed from the values, because a guess over one slice need not agree
with a guess over another, and then the result would depend on how the input was cut.

Must not know: files, lines.
"""

from __future__ import annotations

import polars as pl

from anabranch.errors import ConfigError
from anabranch.model.types import to_dtype

_JSON_INNER = (pl.Boolean, pl.String, pl.Date, pl.Datetime)
_DATETIMES = ("%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%d")
_ZONED = ("%Y-%m-%dT%H:%M:%S%.f%#z", "%Y-%m-%d %H:%M:%S%.f%#z")


def check_cell_type(name: str, dtype: pl.DataType, format_name: str) -> None:
    """Refuse types that the format cannot hold.

    Raises:
        ConfigError: a duration, or a nested type in CSV, or one in JSON with an inner type that JSON lacks.
    """
    fits = _fits_json(dtype) if format_name == "jsonl" and dtype.is_nested() else not dtype.is_nested()
    if not fits or isinstance(dtype, pl.Duration):
        raise ConfigError(
            f"column {name!r}: type {dtype} cannot be read from {format_name}; use Parquet, or read it as "
            "a string and convert it in the flow"
        )


def _fits_json(dtype: pl.DataType) -> bool:
    # Polars panics on fixed-size arrays of the wrong length, and never accepts the other types left out.
    if isinstance(dtype, pl.List):
        return _fits_json(to_dtype(dtype.inner))
    if isinstance(dtype, pl.Struct):
        return all(_fits_json(to_dtype(field.dtype)) for field in dtype.fields)
    return dtype.is_integer() or dtype.is_float() or isinstance(dtype, _JSON_INNER)


def parse_cells(cells: pl.Series, dtype: pl.DataType) -> pl.Series:
    """A String column as another type; what does not parse becomes null.

    Integers and decimals are plain digits, booleans `true`/`false`/`1`/`0` in any case, dates
    `2024-01-31`, timestamps `2024-01-31T12:00:00.5` with `T` or a blank, or a date alone, and `Z` or an
    offset where the type has a zone.
    """
    name = cells.name
    if isinstance(dtype, pl.String):
        return cells
    if isinstance(dtype, pl.Boolean):
        low = pl.col(name).str.to_lowercase()
        made = pl.when(low.is_in(["true", "1"])).then(True).when(low.is_in(["false", "0"])).then(False)
        return cells.to_frame().select(made.alias(name)).to_series()
    if isinstance(dtype, pl.Date):
        return cells.str.to_date("%Y-%m-%d", strict=False)
    if isinstance(dtype, pl.Time):
        return cells.str.to_time("%H:%M:%S%.f", strict=False)
    if isinstance(dtype, pl.Datetime):
        return _parse_datetimes(cells, dtype)
    return cells.cast(dtype, strict=False)


def failed(cells: pl.Series, parsed: pl.Series, *, empty_is_null: bool) -> pl.Series:
    """Where a cell held something and yet parsed to null."""
    bad = parsed.is_null() & cells.is_not_null()
    return bad & (cells != "") if empty_is_null else bad


def _parse_datetimes(cells: pl.Series, dtype: pl.Datetime) -> pl.Series:
    unit = dtype.time_unit
    formats = _DATETIMES if dtype.time_zone is None else _ZONED
    made: pl.Series | None = None
    for form in formats:
        parsed = cells.str.to_datetime(form, time_unit=unit, strict=False)
        made = parsed if made is None else made.zip_with(made.is_not_null(), parsed)
        if made.null_count() == cells.null_count():
            break
    assert made is not None
    return made if dtype.time_zone is None else made.dt.convert_time_zone(dtype.time_zone)
