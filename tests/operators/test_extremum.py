"""Extremes of every type that has an order, with and without deletions."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import polars as pl
import pytest
from dictstate import DictState

from anabranch.model.batch import HASH, WEIGHT
from anabranch.model.hashing import hash_columns
from anabranch.model.ids import OperatorId, Step
from anabranch.operators import aggregates as ab
from anabranch.operators.aggregate import AggregateKernel
from anabranch.operators.kernel import Context

UTC = dt.UTC
TYPES: list[tuple[pl.DataType, list[Any]]] = [
    (pl.Int8(), [-128, -1, 0, 127]),
    (pl.Int32(), [-(2**31), -1, 0, 2**31 - 1]),
    (pl.Int64(), [-(2**63), -1, 0, 2**63 - 1]),
    (pl.UInt64(), [0, 1, 2**63, 2**64 - 1]),
    (pl.Float32(), [float("-inf"), -0.5, 0.0, float("inf")]),
    (pl.Float64(), [float("-inf"), -5e-324, 0.0, 1e300]),
    (pl.Boolean(), [False, True]),
    (pl.String(), ["", "\x00", "a", "aa", "ü", "𝄞"]),
    (pl.Binary(), [b"", b"\x00", b"a", b"\xff"]),
    (pl.Date(), [dt.date(1, 1, 1), dt.date(1969, 12, 31), dt.date(2020, 1, 1)]),
    (pl.Time(), [dt.time(0), dt.time(23, 59)]),
    (pl.Datetime("us"), [dt.datetime(1900, 1, 1), dt.datetime(2020, 1, 1)]),
    (pl.Datetime("ms", "UTC"), [dt.datetime(1900, 1, 1, tzinfo=UTC), dt.datetime(2020, 1, 1, tzinfo=UTC)]),
    (pl.Duration("us"), [dt.timedelta(-1), dt.timedelta(0), dt.timedelta(1)]),
    (pl.Decimal(38, 3), [Decimal("-9" + "0" * 30), Decimal("-0.001"), Decimal(0), Decimal("9" + "0" * 30)]),
]


@pytest.mark.parametrize("append_only", [True, False])
@pytest.mark.parametrize(
    ("dtype", "values"), TYPES, ids=lambda value: str(value) if isinstance(value, pl.DataType) else ""
)
def test_extremes_of_every_type(dtype: pl.DataType, values: list[Any], append_only: bool) -> None:
    schema = {"k": pl.Int64(), "v": dtype}
    kernel = AggregateKernel(["k"], schema, {"low": ab.min("v"), "high": ab.max("v")}, append_only)
    state = DictState()

    def step(rows: list[tuple[Any, int]]) -> list[tuple[Any, ...]]:
        partials = []
        for value, weight in rows:
            frame = pl.DataFrame({"k": [1], "v": pl.Series([value], dtype=dtype), WEIGHT: [weight]})
            partials.append(kernel.partial(frame))
        joined = pl.concat(partials)
        joined = joined.with_columns(pl.Series(HASH, hash_columns(joined, ["k"])))
        out = kernel.process([joined], state, Context(OperatorId("o"), Step(0)))
        assert out.schema["low"] == out.schema["high"] == dtype
        return out.select("low", "high", WEIGHT).sort(WEIGHT).rows()

    assert step([(None, 1)]) == [(None, None, 1)]
    assert step([(value, 1) for value in values[1:]]) == [(None, None, -1), (values[1], values[-1], 1)]
    assert step([(values[0], 1)]) == [(values[1], values[-1], -1), (values[0], values[-1], 1)]
    if not append_only:
        assert step([(values[-1], -1)]) == [(values[0], values[-1], -1), (values[0], values[-2], 1)]
        assert step([(value, -1) for value in values[:-1]]) == [(values[0], values[-2], -1), (None, None, 1)]
        assert step([(None, -1)]) == [(None, None, -1)]
        assert state.dump() == {}
