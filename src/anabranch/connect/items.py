"""Python objects to typed rows, and which of them do not fit.

An item is a mapping with every column of the schema, a sequence in the schema's order, or, where the
schema has one column, the value itself.  Values are converted by Arrow, which is strict: no number
becomes a string, and no fraction is cut off.

Must not know: logs, threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
import pyarrow as pa

BAD_RECORD = "__record"
BAD_REASON = "__reason"
"""Both null where the item was good; where it was not, its text and why, and all other columns are null."""

_FAILURES = (pa.ArrowException, TypeError, ValueError, OverflowError)


class ItemDecoder:
    """Converts items to frames of a schema, with `__record` and `__reason` for those that do not fit."""

    def __init__(self, schema: Mapping[str, pl.DataType], required: str | None = None) -> None:
        self._schema = dict(schema)
        self._names = list(schema)
        self._required = required
        self._types = {
            name: pl.Series([], dtype=dtype).to_arrow(compat_level=pl.CompatLevel.oldest()).type
            for name, dtype in schema.items()
        }

    def decode(self, items: Sequence[Any]) -> pl.DataFrame:
        """One row for each item, in order."""
        rows: list[tuple[Any, ...] | None] = []
        complaints: dict[int, str] = {}
        for place, item in enumerate(items):
            row = self._row(item)
            if isinstance(row, str):
                complaints[place] = row
            rows.append(None if isinstance(row, str) else row)
        frame = self._convert([row for row in rows if row is not None])
        if isinstance(frame, str) or complaints:
            frame = self._one_by_one(rows, complaints)
        records = [repr(items[place]) if place in complaints else None for place in range(len(items))]
        reasons = [complaints.get(place) for place in range(len(items))]
        return frame.with_columns(
            pl.Series(BAD_RECORD, records, dtype=pl.String), pl.Series(BAD_REASON, reasons, dtype=pl.String)
        )

    def _row(self, item: Any) -> tuple[Any, ...] | str:
        names = self._names
        if isinstance(item, Mapping):
            try:
                return tuple([item[name] for name in names])
            except KeyError as error:
                return f"column {error.args[0]!r} is missing"
        if isinstance(item, tuple | list) and not (len(names) == 1 and self._schema[names[0]].is_nested()):
            if len(item) == len(names):
                return tuple(item)
            return f"expected {len(names)} values, found {len(item)}"
        if len(names) == 1:
            return (item,)
        return f"expected a dict or a tuple of {len(names)} values, found {type(item).__name__}"

    def _convert(self, rows: list[tuple[Any, ...]]) -> pl.DataFrame | str:
        """A frame, or why not."""
        columns: dict[str, Any] = {}
        cells = list(zip(*rows, strict=True)) if rows else [()] * len(self._names)
        for name, values in zip(self._names, cells, strict=True):
            try:
                columns[name] = self._column(name, values)
            except _FAILURES as error:
                return f"column {name!r}: {error}"
        frame = pl.from_arrow(pa.table(columns))
        assert isinstance(frame, pl.DataFrame)
        return frame.cast(self._schema)  # type: ignore[arg-type]

    def _column(self, name: str, values: Sequence[Any]) -> Any:
        wanted = self._types[name]
        if name == self._required and None in values:
            raise ValueError("must not be null")
        if not pa.types.is_integer(wanted):
            return pa.array(values, type=wanted)
        # Given the type at once, Arrow cuts fractions off; a cast afterwards refuses to.
        array = pa.array(values)
        if pa.types.is_boolean(array.type):
            raise TypeError("found a bool where an integer is expected")
        return array.cast(wanted, safe=True)

    def _one_by_one(self, rows: list[tuple[Any, ...] | None], complaints: dict[int, str]) -> pl.DataFrame:
        empty = pl.DataFrame({name: [None] for name in self._names}, schema=self._schema)
        frames = []
        for place, row in enumerate(rows):
            frame = empty if row is None else self._convert([row])
            if isinstance(frame, str):
                complaints[place] = frame
                frame = empty
            frames.append(frame)
        return pl.concat(frames)
