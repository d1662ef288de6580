"""What may be aggregated, and the types that result."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from anabranch.errors import FlowError
from anabranch.operators import aggregates as ab
from anabranch.operators.aggregate import AggregateKernel

SCHEMA: dict[str, pl.DataType] = {
    "k": pl.String(),
    "i": pl.Int16(),
    "u": pl.UInt64(),
    "f": pl.Float32(),
    "d": pl.Decimal(10, 3),
    "t": pl.Datetime("us"),
    "l": pl.List(pl.Int64()),
    "b": pl.Boolean(),
}


def test_types_of_results() -> None:
    asked = {
        "n": ab.count(),
        "si": ab.sum("i"),
        "su": ab.sum("u"),
        "sf": ab.sum("f"),
        "sd": ab.sum("d"),
        "mi": ab.mean("i"),
        "md": ab.mean("d"),
        "nt": ab.min("t"),
        "xf": ab.max("f"),
        "xk": ab.max("k"),
    }
    assert ab.check(asked, SCHEMA, "totals") == {
        "n": pl.Int64(),
        "si": pl.Int64(),
        "su": pl.Int64(),
        "sf": pl.Float64(),
        "sd": pl.Decimal(38, 3),
        "mi": pl.Float64(),
        "md": pl.Float64(),
        "nt": pl.Datetime("us"),
        "xf": pl.Float32(),
        "xk": pl.String(),
    }


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "operator totals: nothing to aggregate"),
        ({"a": ab.sum("nope")}, r"operator totals: sum of column 'nope', which is not there; .*'k', 'i'"),
        ({"a": ab.sum("k")}, "operator totals: sum of column 'k': it must be a number, and is String"),
        ({"a": ab.mean("t")}, "operator totals: mean of column 't': it must be a number"),
        ({"a": ab.sum("b")}, "operator totals: sum of column 'b': it must be a number"),
        ({"a": ab.min("l")}, "operator totals: min of column 'l': values of type .* have no order"),
        ({"a": "i"}, "operator totals: 'a' must be one of ab.count"),
    ],
)
def test_what_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(FlowError, match=message):
        ab.check(asked, SCHEMA, "totals")


def test_an_aggregate_must_not_hide_a_key() -> None:
    with pytest.raises(FlowError, match="'k' has the name of a key"):
        AggregateKernel(["k"], SCHEMA, {"k": ab.count()}, append_only=True)
