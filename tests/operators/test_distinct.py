"""Distinct against a counter of rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import polars as pl
import pytest
from dictstate import DictState
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.model.batch import HASH, MAJOR, MINOR, ORIGIN, WEIGHT
from anabranch.model.hashing import hash_columns
from anabranch.model.ids import OperatorId, Step
from anabranch.operators.distinct import DistinctKernel
from anabranch.operators.kernel import Combining, Context

SCHEMA = {"v": pl.Float64(), "k": pl.String(), "n": pl.Int32()}

cells = st.tuples(
    st.sampled_from([None, 0.0, 1.5, float("inf")]), st.sampled_from([None, "", "a", "bb"]), st.integers(0, 1)
)
weights = st.sampled_from([1, 1, 2, -1, -1, -3])
deltas = st.lists(st.lists(st.tuples(cells, weights), max_size=8), max_size=5)


def frame(rows: Any) -> pl.DataFrame:
    data = [(*row, weight) for row, weight in rows]
    return pl.DataFrame(data, schema={**SCHEMA, WEIGHT: pl.Int64()}, orient="row")


def keyed(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.with_columns(pl.Series(HASH, hash_columns(rows, ["k"]))).sort(HASH)


def run(kernel: DistinctKernel, state: DictState, rows: pl.DataFrame, **settings: Any) -> pl.DataFrame:
    return kernel.process([keyed(rows)], state, Context(OperatorId("d"), Step(0), **settings))


@settings(max_examples=25)
@given(deltas, st.booleans())
def test_distinct_follows_the_total_weights(steps: Any, combined: bool) -> None:
    kernel = DistinctKernel(["k"], SCHEMA, append_only=False)
    assert isinstance(kernel, Combining)
    state = DictState()
    total: Counter[Any] = Counter()
    for rows in steps:
        before = {row for row, weight in total.items() if weight > 0}
        for row, weight in rows:
            total[row] += weight
        after = {row for row, weight in total.items() if weight > 0}
        delta = kernel.partial(frame(rows)) if combined else frame(rows)
        out = run(kernel, state, delta)
        expected = dict.fromkeys(after - before, 1) | dict.fromkeys(before - after, -1)
        got = {row[:3]: row[3] for row in out.select(*SCHEMA, WEIGHT).iter_rows()}
        assert got == expected
        assert out.height == len(expected)
        assert out.get_column(HASH).to_list() == list(hash_columns(out, ["k"]))
    assert len(state.dump().get("rows", {})) == sum(weight != 0 for weight in total.values())


@settings(max_examples=15)
@given(deltas)
def test_workers_by_hash_range_give_what_one_gives(steps: Any) -> None:
    kernel = DistinctKernel(["k"], SCHEMA, append_only=False)
    one, two = DictState(), [DictState(), DictState()]
    for rows in steps:
        whole = run(kernel, one, frame(rows), emit_order=True, origin=3)
        given_rows = keyed(frame(rows)[::-1])
        low = pl.col(HASH) < np.uint64(1 << 63)
        parts = [
            run(kernel, two[i], given_rows.filter(low if i else ~low).drop(HASH), emit_order=True, origin=3)
            for i in (0, 1)
        ]
        assert pl.concat(parts).sort(ORIGIN, MAJOR, MINOR).equals(whole.sort(ORIGIN, MAJOR, MINOR))
        assert not whole.select(ORIGIN, MAJOR, MINOR).is_duplicated().any()


def test_one_zero_and_one_nan() -> None:
    kernel = DistinctKernel(["k"], SCHEMA, append_only=True)
    state = DictState()
    nan = float("nan")
    rows = [((-0.0, "a", 1), 1), ((0.0, "a", 1), 1), ((nan, "a", 1), 1), ((-nan, "a", 1), 1)]
    assert run(kernel, state, frame(rows)).height == 2
    assert str(sorted(run(kernel, DictState(), frame(rows[:1])).get_column("v").to_list())) == "[0.0]"
    assert run(kernel, state, frame(rows)).height == 0


def test_nested_columns() -> None:
    schema = {"k": pl.Int64(), "l": pl.List(pl.Int64())}
    kernel = DistinctKernel(["k"], schema, append_only=False)
    rows = pl.DataFrame(
        [(1, [1, 2], 1), (1, [1, 2], 1), (1, [], 1)], schema={**schema, WEIGHT: pl.Int64()}, orient="row"
    )
    out = run(kernel, DictState(), kernel.partial(rows))
    assert sorted(out.get_column("l").to_list()) == [[], [1, 2]]


@pytest.mark.parametrize("append_only", [True, False])
def test_rows_seen_before_are_not_written_when_nothing_is_deleted(append_only: bool) -> None:
    kernel = DistinctKernel(["k"], SCHEMA, append_only)
    state = DictState()
    rows = frame([((1.5, "a", 1), 1)])
    run(kernel, state, rows)
    before = state.dump()
    assert run(kernel, state, rows).height == 0
    assert (state.dump() == before) is append_only
