"""Adding up weights of encoded rows, and weights as stored values.

Rows are told apart by their bytes (`RowCodec`), which works for every column type, and gives
a canonical order within equal hashes for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

from anabranch.model.batch import HASH, U64, WEIGHT
from anabranch.operators.kernel import Schema
from anabranch.operators.order import I64

_ZERO = bytes(8)


class Folded(NamedTuple):
    """Distinct (hash, row) pairs in that order, with the sum of their weights, none of them zero."""

    hashes: U64
    rows: list[bytes]
    weights: I64
    at: I64
    """Where one of the rows with these bytes stands in the frame that was folded."""


def fold(frame: pl.DataFrame, rows: Sequence[bytes]) -> Folded:
    """Add up the weights of rows with equal hash and bytes."""
    table = pl.DataFrame(
        {
            "hash": frame.get_column(HASH),
            "row": pl.Series(rows, dtype=pl.Binary),
            "weight": frame.get_column(WEIGHT),
            "at": np.arange(frame.height, dtype=np.int64),
        }
    )
    summed = table.group_by("hash", "row").agg(pl.col("weight").sum(), pl.col("at").first())
    summed = summed.filter(pl.col("weight") != 0).sort("hash", "row")
    return Folded(
        summed.get_column("hash").to_numpy(),
        summed.get_column("row").to_list(),
        summed.get_column("weight").to_numpy(),
        summed.get_column("at").to_numpy(),
    )


def canonical(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with one zero and one NaN in its float columns, so that equal values have equal bytes."""
    floats = [name for name, dtype in frame.schema.items() if dtype.is_float()]
    if not floats:
        return frame
    column = pl.col(floats)
    # Adding 0.0 would do for zero, but Polars optimises it away.
    zero = pl.when(column == 0).then(0.0)
    return frame.with_columns(zero.when(column.is_nan()).then(float("nan")).otherwise(column).name.keep())


def has_nested(schema: Schema) -> bool:
    """Whether a column holds lists or structs, whose floats `canonical` does not reach."""
    return any(dtype.is_nested() for dtype in schema.values())


def pack_weights(weights: I64) -> list[bytes | None]:
    """Each weight as eight bytes, little-endian; None for zero, which is not stored."""
    packed: list[bytes | None] = weights.astype("<i8").view("V8").tolist()
    for place in np.flatnonzero(weights == 0).tolist():
        packed[place] = None
    return packed


def unpack_weights(values: Sequence[bytes | None]) -> I64:
    """The inverse of `pack_weights`."""
    joined = b"".join([value or _ZERO for value in values])
    return np.frombuffer(joined, dtype="<i8").astype(np.int64, copy=False)
