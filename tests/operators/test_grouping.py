"""Numbering of keys against Python's dictionaries, for every type that a key may have."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import polars as pl
import pytest

from anabranch.model.batch import HASH
from anabranch.operators.grouping import group_rows, segment

COLUMNS: dict[str, tuple[list[Any], pl.DataType]] = {
    "dense": ([5, 3, 5, 4, 3], pl.Int16()),
    "sparse": ([10**15, -(10**15), 10**15, 0, -(10**15)], pl.Int64()),
    "nulls": ([1, None, 1, 2, None], pl.Int64()),
    "unsigned": ([2**64 - 1, 0, 2**64 - 1, 1, 0], pl.UInt64()),
    "text": (["a", None, "a", "", None], pl.String()),
    "binary": ([b"a", b"", b"a", b"\x00", b""], pl.Binary()),
    "truth": ([True, None, True, False, None], pl.Boolean()),
    "day": ([dt.date(2020, 1, 1), None, dt.date(2020, 1, 1), dt.date(1960, 1, 1), None], pl.Date()),
    "time": ([dt.datetime(2020, 1, 1)] * 3 + [None, dt.datetime(1960, 1, 1)], pl.Datetime("us", "UTC")),
    "price": ([Decimal("1.10"), None, Decimal("1.10"), Decimal("-2"), None], pl.Decimal(20, 2)),
}


@pytest.mark.parametrize(
    "keys", [*([name] for name in COLUMNS), ["dense", "text"], ["nulls", "price", "truth"]]
)
def test_rows_of_a_group_have_its_key(keys: list[str]) -> None:
    frame = pl.DataFrame([pl.Series(name, values, dtype=dtype) for name, (values, dtype) in COLUMNS.items()])
    frame = pl.concat([frame, frame[::-1]], rechunk=False)
    groups = group_rows(frame, keys)
    rows = frame.select(keys).rows()
    assert groups.keys.schema == frame.select(keys).schema
    assert [groups.keys.row(place) for place in groups.index.tolist()] == rows
    assert groups.count == len(groups.keys) == len(set(rows))


def test_no_rows_make_no_groups() -> None:
    groups = group_rows(pl.DataFrame(schema={"a": pl.Int64(), "b": pl.String()}), ["a", "b"])
    assert (groups.count, len(groups.keys), len(groups.index)) == (0, 0, 0)


def test_segments_are_runs_of_equal_keys_even_if_hashes_collide() -> None:
    frame = pl.DataFrame({"k": ["x", "b", "a", "b", None, "a", "y", "y"], "v": range(8)}).with_columns(
        pl.Series(HASH, [1, 2, 2, 2, 2, 2, 3, 3], dtype=pl.UInt64)
    )
    segments = segment(frame, ["k"])
    assert segments.keys.get_column("k").to_list() == ["x", None, "a", "b", "y"]
    assert segments.hashes.tolist() == [1, 2, 2, 2, 3]
    assert segments.total("v").tolist() == [0, 4, 7, 4, 13]
    assert np.array_equal(np.flatnonzero(np.diff(segments.index, prepend=-1)), segments.starts)


@pytest.mark.parametrize("width", [0, 3, 12, 13, 40])
def test_strings_of_any_length_are_numbered(width: int) -> None:
    values = [f"{number % 97:x}".rjust(width, "é")[:width] if width else "" for number in range(500)]
    for column in (pl.Series("k", values), pl.Series("k", [value.encode() for value in values])):
        groups = group_rows(column.to_frame(), ["k"])
        assert groups.count == len(set(column.to_list()))
        assert groups.keys["k"].gather(groups.index).to_list() == column.to_list()
        sliced = group_rows(column.to_frame().slice(100, 50), ["k"])
        assert sliced.keys["k"].gather(sliced.index).to_list() == column.to_list()[100:150]
