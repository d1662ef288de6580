"""The content hash is recorded with every step: golden vectors, a scalar oracle, and changes it must notice."""

from __future__ import annotations

import datetime as dt
import random
import struct
from decimal import Decimal
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.model.batch import WEIGHT
from anabranch.model.contenthash import content_hash
from anabranch.model.hashing import hash_text, row_hashes

MASK = (1 << 64) - 1
K, M = 0x2545F4914F6CDD1D, 0x9FB21C651E98DF25
NULL = 0x6A09E667F3BCC909


def frame(weights: list[int] | None = None, **columns: pl.Series) -> pl.DataFrame:
    made = pl.DataFrame(columns)
    return made.with_columns(pl.Series(WEIGHT, weights or [1] * made.height, dtype=pl.Int64))


def fold(h: int, word: int) -> int:
    h = ((h ^ (word & MASK)) * M) & MASK
    return h ^ (h >> 32)


def words(value: object) -> list[int]:
    if isinstance(value, float):
        return [struct.unpack("<Q", struct.pack("<d", value))[0]]
    if isinstance(value, str):
        data = value.encode()
        head = len(data) | int.from_bytes(data[:4], "little") << 32
        if len(data) <= 12:
            return [head, int.from_bytes(data[4:], "little")]
        if len(data) > 1024:
            return [head, hash_text(value)]
        rest = 0
        for at in [*range(4, len(data) - 8, 8), len(data) - 8]:
            rest = fold(rest, int.from_bytes(data[at : at + 8], "little"))
        return [head, rest]
    assert isinstance(value, int)
    return [int(value)]


def scalar(rows: list[tuple[Any, ...]], weights: list[int], texts: tuple[int, ...] = ()) -> int:
    total = 0
    for row, weight in zip(rows, weights, strict=True):
        h = 0
        for place, value in enumerate(row):
            for word in [NULL] * (1 + (place in texts)) if value is None else words(value):
                h = fold(h, word)
        total += weight * (K + h * (h >> 32))
    return total & MASK


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (frame(a=pl.Series([], dtype=pl.Int64)), 0),
        (frame(a=pl.Series([0], dtype=pl.Int64)), 0x2545F4914F6CDD1D),
        (frame(a=pl.Series([1], dtype=pl.Int64)), 0x6B73A1BE7526E55D),
        (
            frame(a=pl.Series([-1, 7], dtype=pl.Int64), b=pl.Series([2, None], dtype=pl.Int64)),
            0x37C137BAAC7D4CCA,
        ),
        (
            frame(
                [2, -1],
                k=pl.Series(["user-000123", "a longer string than twelve bytes"]),
                v=pl.Series([1.5, -0.0]),
            ),
            0xB5B714DDEDE93E57,
        ),
        (frame(s=pl.Series(["é" * 700])), 0x2AB2BBBF8F728E1D),
        (frame(t=pl.Series([dt.datetime(2024, 2, 29, 12)]), b=pl.Series([True])), 0x1A16E79D4AD205FD),
    ],
)
def test_golden(made: pl.DataFrame, expected: int) -> None:
    assert content_hash(made) == expected


TEXT = st.one_of(st.none(), st.text(max_size=15), st.text(alphabet="abc", min_size=10, max_size=70))
ROWS = st.lists(
    st.tuples(
        st.one_of(st.none(), st.integers(-(1 << 63), (1 << 63) - 1)),
        TEXT,
        st.one_of(st.none(), st.floats(allow_nan=False)),
        st.one_of(st.none(), st.booleans()),
        st.integers(-3, 3),
    ),
    max_size=12,
)


@settings(max_examples=80)
@given(rows=ROWS, cut=st.integers(0, 12))
def test_the_scalar_definition(rows: list[tuple[Any, ...]], cut: int) -> None:
    schema = {"i": pl.Int64(), "s": pl.String(), "f": pl.Float64(), "b": pl.Boolean(), WEIGHT: pl.Int64()}
    made = pl.DataFrame(rows, schema=schema, orient="row")
    expected = scalar([row[:4] for row in rows], [row[4] for row in rows], texts=(1,))
    assert content_hash(made) == expected
    assert content_hash(made.reverse()) == expected
    assert content_hash(pl.concat([made[cut:], made[:cut]], rechunk=False)) == expected
    assert (content_hash(made[:cut]) + content_hash(made[cut:])) & MASK == expected


def test_long_and_huge_strings_in_many_buffers() -> None:
    rng = random.Random(5)
    texts = ["x" * rng.choice([0, 5, 12, 13, 20, 21, 1000, 1024, 1025, 5000]) + str(n) for n in range(3000)]
    expected = scalar([(text,) for text in texts], [1] * len(texts))
    whole = frame(s=pl.Series(texts))
    assert content_hash(whole) == expected
    pieces = [frame(s=pl.Series(texts[at : at + 100])) for at in range(0, 3000, 100)]
    assert content_hash(pl.concat(pieces, rechunk=False)) == expected
    assert content_hash(pl.concat(pieces, rechunk=True)) == expected
    assert content_hash(whole[1000:]) == scalar([(text,) for text in texts[1000:]], [1] * 2000)


def test_how_a_value_is_stored_plays_no_part() -> None:
    small = frame(a=pl.Series([1, None, -3], dtype=pl.Int16), b=pl.Series(["x", None, "y" * 30]))
    large = frame(a=pl.Series([1, None, -3], dtype=pl.Int64), b=pl.Series([b"x", None, b"y" * 30]))
    assert content_hash(small) == content_hash(large)
    nan = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000001))[0]
    assert content_hash(frame(a=pl.Series([nan]))) == content_hash(frame(a=pl.Series([float("nan")])))


def test_types_without_words_of_their_own_go_by_hash_v1() -> None:
    for values in (
        pl.Series([Decimal("1.25"), None], dtype=pl.Decimal(10, 2)),
        pl.Series([[1, 2], None], dtype=pl.List(pl.Int64)),
        pl.Series([{"x": 1}, {"x": 2}]),
    ):
        hashes = row_hashes(values.to_frame("v"), ["v"]).tolist()
        made = frame(v=values)
        assert content_hash(made) == scalar([(value,) for value in hashes], [1, 1])
    day = frame(d=pl.Series([dt.date(2024, 1, 1)]))
    assert content_hash(day) == scalar([((dt.date(2024, 1, 1) - dt.date(1970, 1, 1)).days,)], [1])


def test_columns_and_rows_are_told_apart() -> None:
    def of(*rows: tuple[Any, ...]) -> int:
        return content_hash(pl.DataFrame(rows, schema=["a", "b", WEIGHT], orient="row"))

    assert of((1, 2, 1)) != of((2, 1, 1))
    assert of((1, 2, 1), (3, 4, 1)) != of((1, 4, 1), (3, 2, 1))
    assert of((0.5, 0.25, 1)) != of((-0.5, -0.25, 1))
    assert of(("ab", "c", 1)) != of(("a", "bc", 1))
    assert of((0, 0, 1)) != of((0, 0, -1))
    assert of(("", None, 1)) != of((None, "", 1))


def test_values_exchanged_between_two_rows_are_noticed() -> None:
    """The commonest way for a sum over rows to stay the same; small numbers give a weak hash away."""
    rng = np.random.default_rng(1)
    keys, values = rng.integers(0, 200, (2, 4000, 2))
    for a, b in zip(keys.tolist(), values.tolist(), strict=True):
        if a[0] != a[1] and b[0] != b[1]:
            assert scalar([(a[0], b[0]), (a[1], b[1])], [1, 1]) != scalar(
                [(a[0], b[1]), (a[1], b[0])], [1, 1]
            )


def test_no_two_of_many_rows_collide() -> None:
    seen = {scalar([(a, b)], [1]) for a in range(300) for b in range(300)}
    assert len(seen) == 90_000
