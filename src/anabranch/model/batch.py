"""Z-set batches: Polars frames whose rows carry an integer weight.

Hidden columns begin with two underscores, and no user's column may:

`__weight`  Int64, in every batch, never null.  +1 inserts a row, −1 deletes one.
`__hash`    UInt64, inside regions: the stable hash of the row's key.
`__origin`, `__major`, `__minor`
            the canonical order of rows, carried only where an operator downstream
            depends on order.  `__origin` numbers the source or region that made the row;
            for a source `__major` is the place of the slice in the step's plan and
            `__minor` the place in the slice; for a region they are the hash of the key and
            the place among the key's rows.  No value depends on the number of workers.

Must not know: flows, operators, storage.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

WEIGHT = "__weight"
HASH = "__hash"
ORIGIN = "__origin"
MAJOR = "__major"
MINOR = "__minor"
STEP = "__step"
ORDER = (ORIGIN, MAJOR, MINOR)
HIDDEN = (WEIGHT, HASH, *ORDER)

ORDER_SCHEMA: dict[str, pl.DataType] = {ORIGIN: pl.Int32(), MAJOR: pl.UInt64(), MINOR: pl.Int64()}

U64 = npt.NDArray[np.uint64]


def visible(frame: pl.DataFrame) -> list[str]:
    """The user's columns of a batch, in order."""
    return [name for name in frame.columns if not name.startswith("__")]


def hidden(frame: pl.DataFrame) -> list[str]:
    """The hidden columns of a batch, in order."""
    return [name for name in frame.columns if name.startswith("__")]


def consolidate(frame: pl.DataFrame) -> pl.DataFrame:
    """Add up the weights of equal rows and drop rows whose weight is zero.

    Only the user's columns and the weight remain.  The order of rows is not kept.
    """
    columns = visible(frame)
    if not columns:
        total = frame.get_column(WEIGHT).sum()
        return (
            frame.select(WEIGHT).head(1).with_columns(pl.lit(total).alias(WEIGHT)).filter(pl.col(WEIGHT) != 0)
        )
    grouped = frame.group_by(columns).agg(pl.col(WEIGHT).sum())
    return grouped.filter(pl.col(WEIGHT) != 0).select(*columns, WEIGHT)
