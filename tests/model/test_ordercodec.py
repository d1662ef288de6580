"""Byte order is value order, and values come back."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import CorruptError
from anabranch.model.rowcodec import order_decode, order_encode

TYPES: list[tuple[pl.DataType, st.SearchStrategy[Any]]] = [
    (pl.Int8(), st.integers(-128, 127)),
    (pl.Int64(), st.integers(-(2**63), 2**63 - 1)),
    (pl.UInt8(), st.integers(0, 255)),
    (pl.UInt64(), st.integers(0, 2**64 - 1)),
    (pl.Float32(), st.floats(width=32, allow_nan=False)),
    (pl.Float64(), st.floats(allow_nan=False)),
    (pl.Boolean(), st.booleans()),
    (pl.String(), st.text(max_size=8)),
    (pl.Binary(), st.binary(max_size=8)),
    (pl.Date(), st.dates()),
    (pl.Time(), st.times()),
    (pl.Datetime("us"), st.datetimes()),
    (
        pl.Datetime("ms", "Asia/Tokyo"),
        st.datetimes(dt.datetime(1900, 1, 1)).map(lambda d: d.replace(microsecond=0, tzinfo=dt.UTC)),
    ),
    (pl.Duration("us"), st.timedeltas(dt.timedelta(-1000), dt.timedelta(1000))),
    (pl.Decimal(38, 2), st.integers(-(10**36), 10**36).map(lambda n: Decimal(f"{n}e-2"))),
]


@settings(max_examples=150)
@given(st.sampled_from(TYPES).flatmap(lambda t: st.tuples(st.just(t[0]), st.lists(t[1], max_size=12))))
def test_order_and_round_trip(case: tuple[pl.DataType, list[Any]]) -> None:
    dtype, values = case
    series = pl.Series(values, dtype=dtype)
    encoded = order_encode(series)
    plain = series.to_list()
    for a, x in zip(encoded, plain, strict=True):
        for b, y in zip(encoded, plain, strict=True):
            assert (a < b) == (x < y)
            assert (a == b) == (x == y)
    back = order_decode(encoded, dtype)
    assert back.dtype == dtype
    assert back.to_list() == plain


@pytest.mark.parametrize("dtype", [pl.Float32(), pl.Float64()])
def test_nan_is_last_and_zero_has_no_sign(dtype: pl.DataType) -> None:
    values = pl.Series([-math.inf, -1.0, -0.0, 0.0, 1.0, math.inf, math.nan], dtype=dtype)
    encoded = order_encode(values)
    assert encoded == sorted(encoded)
    assert encoded[2] == encoded[3]
    assert encoded[6] > encoded[5]
    assert order_encode(pl.Series([-math.nan], dtype=dtype)) == encoded[6:]
    back = order_decode(encoded, dtype).to_list()
    assert math.copysign(1.0, back[2]) == 1.0
    assert math.isnan(back[6])


def test_bytes_on_disk() -> None:
    assert order_encode(pl.Series([-1, 0, 1])) == [
        b"\x7f" + b"\xff" * 7,
        b"\x80" + b"\x00" * 7,
        b"\x80" + b"\x00" * 6 + b"\x01",
    ]
    assert order_encode(pl.Series([1.0, -1.0])) == [b"\xbf\xf0" + bytes(6), b"\x40\x0f" + b"\xff" * 6]
    assert order_encode(pl.Series(["é"])) == ["é".encode()]


def test_nulls_and_unordered_types_are_refused() -> None:
    with pytest.raises(ValueError, match="column 'x' has nulls"):
        order_encode(pl.Series("x", [1, None]))
    with pytest.raises(TypeError, match="no order"):
        order_encode(pl.Series([[1]]))


@pytest.mark.parametrize(("dtype", "data"), [(pl.Int64(), b"short"), (pl.String(), b"\xff")])
def test_damaged_values_are_refused(dtype: pl.DataType, data: bytes) -> None:
    with pytest.raises(CorruptError):
        order_decode([data], dtype)
