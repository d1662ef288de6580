"""Arrow tables for a user's batch function, and frames from what it returns."""

from __future__ import annotations

from typing import Any

import polars as pl
import pyarrow as pa

from anabranch.operators.kernel import Schema

Table = Any
"""A `pyarrow.Table`; pyarrow has no types that mypy knows."""


class BatchFunctionError(Exception):
    """A batch function raised, or returned something else than declared; its text says what."""


def to_table(frame: pl.DataFrame) -> Table:
    """The frame as Arrow, in the types that Arrow's own functions all know (no string views)."""
    return frame.to_arrow(compat_level=pl.CompatLevel.oldest())


def from_table(result: object, schema: Schema, what: str = "a table") -> pl.DataFrame:
    """The result of a batch function, in the order and with the types of the schema.

    Types that can be cast without loss are.

    Raises:
        BatchFunctionError: no table, other columns, or a type that cannot be cast.
    """
    wanted = ", ".join(f"{name}: {dtype}" for name, dtype in schema.items())
    if not isinstance(result, pa.Table):
        raise BatchFunctionError(
            f"function returned {type(result).__name__}, expected {what} (a pyarrow.Table) with ({wanted})"
        )
    found = result.column_names
    if sorted(found) != sorted(schema):
        raise BatchFunctionError(
            f"function returned {what} with columns ({', '.join(found)}), expected ({wanted})"
        )
    target = to_table(pl.DataFrame(schema=dict(schema))).schema
    columns = []
    for name in schema:
        try:
            columns.append(result.column(name).cast(target.field(name).type, safe=True))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            kind = result.schema.field(name).type
            raise BatchFunctionError(
                f"function returned {what} whose column {name} of type {kind} is no {schema[name]}: {error}"
            ) from None
    frame = pl.DataFrame(pl.from_arrow(pa.table(columns, schema=target)))
    return frame.cast(pl.Schema(schema)) if dict(frame.schema) != dict(schema) else frame
