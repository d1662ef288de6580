"""Exact sums against fractions and `math.fsum`."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.operators import exactsum, limbs
from anabranch.operators.exactsum import sum_doubles, sum_integers, sum_wide, to_doubles, to_words
from anabranch.operators.limbs import Packed, merge

FINITE = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(allow_nan=False, allow_infinity=False, width=16),
    st.sampled_from(
        [0.0, -0.0, 5e-324, -5e-324, 2.0**-1022, 1.7976931348623157e308, -1.7976931348623157e308, 0.1]
    ),
)
WEIGHTS = st.one_of(st.integers(-3, 3), st.integers(-(2**40), 2**40))


def nearest(exact: Fraction) -> float:
    try:
        return float(exact)  # correctly rounded, ties to even
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 3), FINITE, WEIGHTS), max_size=30))
def test_weighted_doubles_are_the_nearest_to_the_exact_sum(rows: list[tuple[int, float, int]]) -> None:
    index = np.array([row[0] for row in rows], dtype=np.int64)
    values = np.array([row[1] for row in rows], dtype=np.float64)
    weights = np.array([row[2] for row in rows], dtype=np.int64)
    found = to_doubles(sum_doubles(index, 4, values, weights))
    for group in range(4):
        exact = sum((Fraction(v) * w for g, v, w in rows if g == group), Fraction(0))
        assert found[group].tobytes() == np.float64(nearest(exact)).tobytes()


@settings(max_examples=100)
@given(st.lists(FINITE, max_size=40))
def test_unit_weights_equal_fsum(values: list[float]) -> None:
    index = np.zeros(len(values), dtype=np.int64)
    found = to_doubles(sum_doubles(index, 1, np.array(values, dtype=np.float64), None))[0]
    try:
        assert found == math.fsum(values)
    except OverflowError:
        assert found == nearest(sum(map(Fraction, values), Fraction(0)))


@settings(max_examples=60)
@given(st.lists(st.tuples(FINITE, st.integers(0, 4), st.integers(-2, 2)), max_size=30), st.data())
def test_any_split_packs_to_the_same_words(rows: list[tuple[float, int, int]], data: st.DataObject) -> None:
    def pack(chosen: list[tuple[float, int, int]]) -> Packed:
        return sum_doubles(
            np.array([g for _, g, _ in chosen], dtype=np.int64),
            5,
            np.array([v for v, _, _ in chosen], dtype=np.float64),
            np.array([w for _, _, w in chosen], dtype=np.int64),
        )

    places = [data.draw(st.integers(0, 2)) for _ in rows]
    parts = [
        pack([row for row, place in zip(rows, places, strict=True) if place == part]) for part in range(3)
    ]
    whole = merge(5, [(pack(rows), np.arange(5))])
    merged = merge(5, [(part, np.arange(5)) for part in parts])
    assert merged.to_bytes() == whole.to_bytes() == pack(rows).to_bytes()


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), WEIGHTS), max_size=20))
@settings(max_examples=60)
def test_integers_and_wide_integers(rows: list[tuple[int, int]]) -> None:
    index = np.zeros(len(rows), dtype=np.int64)
    values = np.array([v for v, _ in rows], dtype=np.int64)
    weights = np.array([w for _, w in rows], dtype=np.int64)
    exact = sum(v * w for v, w in rows)
    packed = sum_integers(index, 1, values, weights)
    words, fits = to_words(packed, 4)
    assert fits[0]
    assert int.from_bytes(words[0].tobytes(), "little", signed=True) == exact
    assert to_words(packed, 2)[1][0] == (-(2**63) <= exact < 2**63)

    squares = [v * 2**60 + w for v, w in rows]
    low = np.array([s % 2**64 for s in squares], dtype=np.uint64)
    high = np.array([s >> 64 for s in squares], dtype=np.int64)
    words, fits = to_words(sum_wide(index, 1, low, high, weights), 8)
    assert fits[0]
    exact = sum(s * w for s, (_, w) in zip(squares, rows, strict=True))
    assert int.from_bytes(words[0].tobytes(), "little", signed=True) == exact


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([math.inf, 1.0], None, math.inf),
        ([-math.inf, 1e308], None, -math.inf),
        ([math.inf, -math.inf], None, math.nan),
        ([math.nan, 1.0], None, math.nan),
        ([math.nan, math.inf, 2.5], [0, 0, 2], 5.0),
        ([math.inf], [-1], -math.inf),
        ([1e308, 1e308], None, math.inf),
        ([1e308, 1e308, -1e308], None, 1e308),
        ([1e16, 1.0, -1e16], None, 1.0),
        ([2.0**53, 1.0], None, 2.0**53),
        ([2.0**53, 1.0, 5e-324], None, 2.0**53 + 2),
        ([2.0**53, 3.0], None, 2.0**53 + 4),
        ([-0.0, -0.0], None, 0.0),
    ],
)
def test_chosen_sums(values: list[float], weights: list[int] | None, expected: float) -> None:
    weighed = None if weights is None else np.array(weights, dtype=np.int64)
    packed = sum_doubles(np.zeros(len(values), dtype=np.int64), 1, np.array(values), weighed)
    assert to_doubles(packed)[0].tobytes() == np.float64(expected).tobytes() or (
        math.isnan(expected) and math.isnan(to_doubles(packed)[0])
    )
    again = merge(1, [(packed, np.array([0]))])
    assert again.to_bytes() == packed.to_bytes()


def test_cancelled_sums_leave_nothing() -> None:
    values = np.array([0.1, math.nan, math.inf, 3e-320, 0.1, math.nan, math.inf, 3e-320])
    packed = sum_doubles(np.zeros(8, np.int64), 1, values, np.array([1, 1, 1, 1, -1, -1, -1, -1]))
    assert packed.to_bytes() == [b""]


def test_blocks_give_the_words_of_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    index = rng.integers(0, 50, 2000)
    values = rng.standard_normal(2000) * 10.0 ** rng.integers(-300, 300, 2000)
    weights = rng.integers(-4, 5, 2000)
    whole = sum_doubles(index, 50, values, weights)
    doubles = to_doubles(whole)
    monkeypatch.setattr(limbs, "CELLS", 500)
    monkeypatch.setattr(exactsum, "_CHUNK", 64)
    blocks = sum_doubles(index, 50, values, weights)
    assert blocks.to_bytes() == whole.to_bytes()
    every = np.arange(50)
    both = merge(50, [(whole, every), (blocks, every)])
    assert np.array_equal(to_doubles(blocks), doubles)
    assert np.array_equal(to_doubles(both), 2 * doubles)


def test_series_and_bytes_round_trip() -> None:
    packed = sum_doubles(np.array([0, 2, 2]), 4, np.array([1.5, math.nan, -2e300]), None)
    assert Packed.from_series(packed.to_series()).to_bytes() == packed.to_bytes()
    assert Packed.from_bytes(packed.to_bytes()).to_series().equals(packed.to_series())
    assert len(Packed.from_series(Packed.zeros(3).to_series()).words) == 0
