from __future__ import annotations

import datetime as dt
from decimal import Decimal

import polars as pl
import pyarrow as pa
import pytest

from anabranch.errors import FlowError
from anabranch.model.types import to_dtype, to_schema


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        (int, pl.Int64()),
        (float, pl.Float64()),
        (str, pl.String()),
        (bool, pl.Boolean()),
        (bytes, pl.Binary()),
        (dt.datetime, pl.Datetime("us")),
        (dt.date, pl.Date()),
        (dt.time, pl.Time()),
        (dt.timedelta, pl.Duration("us")),
        (Decimal, pl.Decimal(38, 9)),
        (pl.Decimal, pl.Decimal(38, 9)),
        (pl.Int32, pl.Int32()),
        (pl.Datetime("ns", "UTC"), pl.Datetime("ns", "UTC")),
        (pl.List(pl.Int64), pl.List(pl.Int64())),
        (pa.int8(), pl.Int8()),
        (pa.string(), pl.String()),
        (pa.large_binary(), pl.Binary()),
        (pa.timestamp("ms"), pl.Datetime("ms")),
        (pa.timestamp("s", "Europe/Paris"), pl.Datetime("ms", "Europe/Paris")),
        (pa.decimal128(10, 2), pl.Decimal(10, 2)),
        (pa.dictionary(pa.int32(), pa.string()), pl.String()),
        (pa.list_(pa.struct({"x": pa.int32()})), pl.List(pl.Struct({"x": pl.Int32()}))),
    ],
)
def test_what_may_be_written(spec: object, dtype: pl.DataType) -> None:
    assert to_dtype(spec) == dtype


@pytest.mark.parametrize(
    "spec",
    [
        object,
        complex,
        "int",
        None,
        [],
        pl.List,
        pl.Categorical,
        pl.Object,
        pl.Null,
        pl.List(pl.Categorical),
        pl.Struct({"x": pl.Null}),
        pa.decimal256(50, 2),
        pa.map_(pa.string(), pa.int64()),
        pa.null(),
        pa.float16(),
        pa.list_(pa.null()),
    ],
)
def test_what_may_not(spec: object) -> None:
    with pytest.raises(FlowError):
        to_dtype(spec)


def test_schemas_keep_their_order() -> None:
    wanted = {"b": pl.Int64(), "a": pl.String()}
    assert list(to_schema({"b": int, "a": str}).items()) == list(wanted.items())
    assert to_schema([("b", int), ("a", str)]) == wanted
    assert to_schema(pa.schema({"b": pa.int64(), "a": pa.string()})) == wanted
    assert to_schema(pl.Schema(wanted)) == wanted


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "at least one column"),
        ({"__w": int}, "'__w'.*rename"),
        ({"": int}, "must not be empty"),
        ({1: int}, "is a string; found 1"),
        ([("a", int), ("a", str)], "'a' is in the schema twice"),
        (pa.schema([("a", pa.int64()), ("a", pa.int64())]), "'a' is in the schema twice"),
        ({"a": object}, "column 'a': unsupported type"),
        (["a", "b"], "pairs of name and type"),
        ("a", "a schema is a dict"),
    ],
)
def test_wrong_schemas(spec: object, message: str) -> None:
    with pytest.raises(FlowError, match=message):
        to_schema(spec)
