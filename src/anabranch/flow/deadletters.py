"""The output that every flow has for records that were set aside."""

from __future__ import annotations

import polars as pl

DEAD_LETTERS = "dead_letters"
"""Its name."""

DEAD_LETTER_SCHEMA: dict[str, pl.DataType] = {
    "operator": pl.String(),
    "where": pl.String(),
    "record": pl.String(),
    "reason": pl.String(),
}
"""Its columns."""
