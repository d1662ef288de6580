"""Partials of any batches, combined in any grouping, leave the same bits as the partial of all rows at once."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import polars as pl
import pytest
from dictstate import DictState
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import RecordError
from anabranch.model.batch import HASH, WEIGHT
from anabranch.model.hashing import hash_columns
from anabranch.model.ids import OperatorId, Step
from anabranch.operators import aggregates as ab
from anabranch.operators.aggregate import AggregateKernel
from anabranch.operators.distinct import DistinctKernel
from anabranch.operators.kernel import Combining, Context, StatefulKernel

SCHEMA: dict[str, pl.DataType] = {
    "k": pl.String(),
    "j": pl.Int64(),
    "i": pl.Int64(),
    "u": pl.UInt64(),
    "x": pl.Float64(),
    "d": pl.Decimal(30, 2),
    "s": pl.String(),
}
AGGREGATES = {
    "rows": ab.count(),
    "si": ab.sum("i"),
    "xi": ab.max("i"),
    "su": ab.sum("u"),
    "sx": ab.sum("x"),
    "nx": ab.min("x"),
    "xx": ab.max("x"),
    "md": ab.mean("d"),
    "sd": ab.sum("d"),
    "ns": ab.min("s"),
}
LARGE = 1 << 62
ROWS = st.tuples(
    st.sampled_from(["a", "b", "a key of more than twelve bytes", None]),
    st.sampled_from([1, -(10**18), None]),
    st.one_of(st.none(), st.integers(-3, 3), st.sampled_from([LARGE, -LARGE, -2 * LARGE, 2 * LARGE - 1])),
    st.one_of(st.none(), st.integers(0, 3), st.just(2**64 - 1)),
    st.one_of(
        st.none(), st.sampled_from([0.1, -0.1, 0.0, -0.0, 1e300, 5e-324, math.inf, -math.inf, math.nan])
    ),
    st.one_of(st.none(), st.sampled_from([Decimal("0.01"), Decimal("-7.50"), Decimal(10**27)])),
    st.one_of(st.none(), st.sampled_from(["", "a", "ab", "ü"])),
)
ADDED = st.integers(1, 3)
WEIGHTS = st.one_of(st.integers(-3, 3), st.sampled_from([1 << 40, -(1 << 40)]))


def frame_of(delta: list[tuple[tuple[Any, ...], int]]) -> pl.DataFrame:
    frame = pl.DataFrame([row for row, _ in delta], schema=SCHEMA, orient="row")
    return frame.with_columns(pl.Series(WEIGHT, [weight for _, weight in delta], dtype=pl.Int64))


def grouped(data: st.DataObject, kernel: Combining, partials: list[pl.DataFrame]) -> pl.DataFrame:
    """Combine neighbours, as many at a time as drawn, until one is left."""
    while len(partials) > 1:
        size = data.draw(st.integers(2, len(partials)))
        start = data.draw(st.integers(0, len(partials) - size))
        some = partials[start : start + size]
        combined = kernel.combine(some)
        assert combined.schema == some[0].schema
        assert combined.height <= sum(piece.height for piece in some)
        partials[start : start + size] = [combined]
    return partials[0]


def outcome(kernel: StatefulKernel, keys: list[str], steps: list[pl.DataFrame]) -> Any:
    """Each step's changes and what is stored in the end; or that a sum did not fit."""
    state = DictState()
    changes = []
    for partials in steps:
        hashed = partials.with_columns(pl.Series(HASH, hash_columns(partials, keys))).sort(HASH)
        try:
            out = kernel.process([hashed], state, Context(OperatorId("totals"), Step(0)))
        except RecordError as error:
            return changes, error.reason
        changes.append(sorted(repr(row) for row in out.rows()))
    return changes, state._tables


def check(
    data: st.DataObject, kernel: Any, keys: list[str], rows: st.SearchStrategy[Any], batch: int = 8
) -> None:
    whole, combined = [], []
    for _ in range(2):
        batches = data.draw(st.lists(st.lists(rows, max_size=batch), min_size=1, max_size=5))
        whole.append(kernel.partial(frame_of([row for some in batches for row in some])))
        combined.append(grouped(data, kernel, [kernel.partial(frame_of(some)) for some in batches]))
    assert outcome(kernel, keys, combined) == outcome(kernel, keys, whole)


@settings(max_examples=150)
@given(st.data(), st.booleans())
def test_aggregates(data: st.DataObject, append_only: bool) -> None:
    kernel = AggregateKernel(["k", "j"], SCHEMA, AGGREGATES, append_only)
    check(data, kernel, ["k", "j"], st.tuples(ROWS, ADDED if append_only else WEIGHTS))


@settings(max_examples=150)
@given(st.data())
def test_integer_sums_of_any_size(data: st.DataObject) -> None:
    """Alone and of one key: batches that fit in int64 each and not together must be common."""
    kernel = AggregateKernel(["j"], SCHEMA, {"s": ab.sum("i")}, append_only=False)
    large = st.sampled_from([LARGE, -LARGE, LARGE - 1, -2 * LARGE, 2 * LARGE - 1, 1, -1])
    rows = large.map(lambda value: (None, 1, value, None, None, None, None))
    check(data, kernel, ["j"], st.tuples(rows, st.sampled_from([1, 1, 1, -1, 2])), batch=2)


@settings(max_examples=50)
@given(st.data(), st.booleans())
def test_distinct(data: st.DataObject, append_only: bool) -> None:
    kernel = DistinctKernel(["k"], SCHEMA, append_only)
    check(data, kernel, ["k"], st.tuples(ROWS, ADDED if append_only else WEIGHTS))


@pytest.mark.parametrize("kind", ["integers", "floats"])
def test_many_groups(kind: str) -> None:
    rng = np.random.default_rng(5)
    schema: dict[str, pl.DataType] = {
        "k": pl.Int64(),
        "v": pl.Int64() if kind == "integers" else pl.Float64(),
    }
    values = rng.integers(-1000, 1000, 30_000) if kind == "integers" else rng.standard_normal(30_000)
    frame = pl.DataFrame({"k": rng.integers(0, 3_000, 30_000) * 10**12, "v": values})
    frame = frame.with_columns(pl.lit(1, pl.Int64).alias(WEIGHT))
    kernel = AggregateKernel(["k"], schema, {"s": ab.sum("v")}, append_only=True)
    parts = kernel.combine([kernel.partial(part) for part in frame.iter_slices(7_000)])
    assert parts.height == frame.get_column("k").n_unique()
    assert outcome(kernel, ["k"], [parts]) == outcome(kernel, ["k"], [kernel.partial(frame)])
