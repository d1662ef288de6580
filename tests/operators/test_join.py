"""Joins against nested loops over the whole of both sides."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import numpy as np
import polars as pl
import pytest
from dictstate import DictState
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import FlowError
from anabranch.model.batch import HASH, MAJOR, MINOR, ORIGIN, WEIGHT
from anabranch.model.hashing import hash_columns
from anabranch.model.ids import OperatorId, Step
from anabranch.operators.join import How, JoinKernel
from anabranch.operators.kernel import Context

LEFT = {"x": pl.Int64(), "k": pl.String(), "j": pl.Int64()}
RIGHT = {"j2": pl.Int64(), "x": pl.Float64(), "k2": pl.String(), "y": pl.String()}
KEYS_LEFT, KEYS_RIGHT = ["k", "j"], ["k2", "j2"]

names = st.sampled_from([None, "a", "b"])
numbers = st.sampled_from([None, 1])
weights = st.sampled_from([1, 1, 2, -1, -1])
left_rows = st.tuples(st.tuples(st.integers(0, 1), names, numbers), weights)
right_rows = st.tuples(
    st.tuples(numbers, st.sampled_from([None, 0.5]), names, st.sampled_from([None, "y"])), weights
)
steps = st.lists(st.tuples(st.lists(left_rows, max_size=5), st.lists(right_rows, max_size=5)), max_size=5)

Zset = Counter[tuple[Any, ...]]


def oracle(left: Zset, right: Zset, how: str) -> Zset:
    out: Zset = Counter()
    left = Counter({row: weight for row, weight in left.items() if weight})
    right = Counter({row: weight for row, weight in right.items() if weight})

    def meets(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
        return None not in (a[1], a[2]) and (a[1], a[2]) == (b[2], b[0])

    for a, weight in left.items():
        matches = [b for b in right if meets(a, b)]
        if how in ("inner", "left", "full"):
            for b in matches:
                out[(a[1], a[2], a[0], b[1], b[3])] += weight * right[b]
        if how in ("left", "full") and not matches:
            out[(a[1], a[2], a[0], None, None)] += weight
        if (how == "semi" and matches) or (how == "anti" and not matches):
            out[a] += weight
    if how == "full":
        for b, weight in right.items():
            if not any(meets(a, b) for a in left):
                out[(b[2], b[0], None, b[1], b[3])] += weight
    return out


def keyed(rows: Any, schema: Any, keys: list[str]) -> pl.DataFrame:
    frame = pl.DataFrame([(*row, w) for row, w in rows], schema={**schema, WEIGHT: pl.Int64()}, orient="row")
    return frame.with_columns(pl.Series(HASH, hash_columns(frame, keys))).sort(HASH)


def both(left: Any, right: Any) -> list[pl.DataFrame]:
    return [keyed(left, LEFT, KEYS_LEFT), keyed(right, RIGHT, KEYS_RIGHT)]


def context(**settings: Any) -> Context:
    return Context(OperatorId("j"), Step(0), **settings)


@pytest.mark.parametrize("how", get_args(How))
@settings(max_examples=25)
@given(steps)
def test_changes_add_up_to_the_join_of_the_whole(how: How, steps: Any) -> None:
    kernel = JoinKernel(KEYS_LEFT, KEYS_RIGHT, LEFT, RIGHT, how)
    state = DictState()
    left: Zset = Counter()
    right: Zset = Counter()
    before: Zset = Counter()
    for left_delta, right_delta in steps:
        for row, weight in left_delta:
            left[row] += weight
        for row, weight in right_delta:
            right[row] += weight
        after = oracle(left, right, how)
        out = kernel.process(both(left_delta, right_delta), state, context())
        assert out.columns == [*kernel.output_schema, WEIGHT, HASH]
        assert dict(out.select(*kernel.output_schema).schema) == kernel.output_schema
        got = {row[:-1]: row[-1] for row in out.drop(HASH).iter_rows()}
        assert len(got) == out.height, "a row is there twice"
        assert 0 not in got.values()
        expected = {row: after[row] - before[row] for row in {*after, *before} if after[row] != before[row]}
        assert got == expected
        assert out.get_column(HASH).to_list() == list(hash_columns(out, ["k", "j"]))
        before = after


@pytest.mark.parametrize("how", ["inner", "full"])
@settings(max_examples=10)
@given(steps)
def test_workers_by_hash_range_give_what_one_gives(how: How, steps: Any) -> None:
    kernel = JoinKernel(KEYS_LEFT, KEYS_RIGHT, LEFT, RIGHT, how)
    one, two = DictState(), [DictState(), DictState()]
    for delta in steps:
        given_rows = both(*delta)
        whole = kernel.process(given_rows, one, context(emit_order=True, origin=2))
        low = pl.col(HASH) < np.uint64(1 << 63)
        parts = [
            kernel.process(
                [rows.filter(low if i else ~low) for rows in both(delta[0][::-1], delta[1][::-1])],
                two[i],
                context(emit_order=True, origin=2),
            )
            for i in (0, 1)
        ]
        assert pl.concat(parts).sort(ORIGIN, MAJOR, MINOR).equals(whole.sort(ORIGIN, MAJOR, MINOR))
        assert not whole.select(ORIGIN, MAJOR, MINOR).is_duplicated().any()


def test_columns_of_the_result() -> None:
    kernel = JoinKernel(KEYS_LEFT, KEYS_RIGHT, LEFT, RIGHT, "inner")
    assert list(kernel.output_schema) == ["k", "j", "x", "x_right", "y"]
    assert JoinKernel(KEYS_LEFT, KEYS_RIGHT, LEFT, RIGHT, "anti").output_schema == LEFT
    with pytest.raises(FlowError, match="choose another suffix"):
        JoinKernel(
            ["k"],
            ["k"],
            {"k": pl.Int64(), "x": pl.Int64(), "x_right": pl.Int64()},
            {"k": pl.Int64(), "x": pl.Int64()},
            "inner",
        )


def test_sides_of_keys_alone() -> None:
    schema = {"k": pl.Int64()}
    kernel = JoinKernel(["k"], ["k"], schema, schema, "inner")
    rows = keyed([((1,), 2), ((3,), 1)], schema, ["k"])
    out = kernel.process([rows, keyed([((1,), 3)], schema, ["k"])], DictState(), context())
    assert out.select("k", WEIGHT).rows() == [(1, 6)]


def test_keys_whose_hashes_collide_are_kept_apart() -> None:
    schema = {"k": pl.Int64(), "v": pl.Int64()}
    kernel = JoinKernel(["k"], ["k"], schema, schema, "left")
    state = DictState()
    same = pl.lit(7, dtype=pl.UInt64).alias(HASH)
    left = keyed([((2, 20), 1), ((1, 10), 1), ((2, 21), 1)], schema, ["k"]).with_columns(same)
    right = keyed([((1, 100), 1)], schema, ["k"]).with_columns(same)
    out = kernel.process([left, right], state, context())
    assert sorted(out.drop(HASH).rows()) == [(1, 10, 100, 1), (2, 20, None, 1), (2, 21, None, 1)]
    out = kernel.process(
        [left.clear(), right.with_columns(pl.lit(2).cast(pl.Int64).alias("k"))], state, context()
    )
    assert sorted(out.drop(HASH).rows(), key=str) == [
        (2, 20, 100, 1), (2, 20, None, -1), (2, 21, 100, 1), (2, 21, None, -1)
    ]  # fmt: skip


def test_only_touched_keys_are_read() -> None:
    schema = {"k": pl.Int64(), "v": pl.Int64()}

    class Watched(DictState):
        scanned = 0

        def scan(self, table: str, hashes: Any, prefixes: Any) -> Any:
            self.scanned += len(prefixes)
            return super().scan(table, hashes, prefixes)

    kernel = JoinKernel(["k"], ["k"], schema, schema, "inner")
    state = Watched()
    many = keyed([((i, i), 1) for i in range(100)], schema, ["k"])
    kernel.process([many, many], state, context())
    state.scanned = 0
    out = kernel.process([keyed([((5, 6), 1)], schema, ["k"]), many.clear()], state, context())
    assert out.drop(HASH).rows() == [(5, 6, 5, 1)]
    assert state.scanned == 1
