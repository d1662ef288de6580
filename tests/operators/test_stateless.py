"""Stateless kernels against the same thing done row by row in plain Python."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import FlowError, RecordError
from anabranch.model.batch import MAJOR, MINOR, ORDER_SCHEMA, ORIGIN, WEIGHT
from anabranch.model.ids import OperatorId, Step
from anabranch.operators.kernel import Context, OnError
from anabranch.operators.stateless import (
    AddKey,
    FilterExpr,
    FilterRows,
    FlatMapRows,
    MapBatches,
    MapRows,
    SelectExprs,
    WithColumns,
    check_predicate,
    check_rowwise,
    passes_through,
)

AB = {"a": pl.Int64(), "b": pl.String()}
VALUE = {"value": pl.Int64()}


def context(on_error: OnError = "stop") -> Context:
    return Context(OperatorId("op"), Step(7), on_error)


def ab(*rows: tuple[int | None, str | None, int]) -> pl.DataFrame:
    return pl.DataFrame(list(rows), schema={**AB, WEIGHT: pl.Int64()}, orient="row")


def values(*numbers: int) -> pl.DataFrame:
    return pl.DataFrame(
        {"value": list(numbers), WEIGHT: [1] * len(numbers)}, schema={**VALUE, WEIGHT: pl.Int64()}
    )


def ordered(rows: list[tuple[int, int, int, int]]) -> pl.DataFrame:
    """Rows (value, origin, major, minor) of weight one."""
    frame = pl.DataFrame(rows, schema={**VALUE, **ORDER_SCHEMA}, orient="row")
    return frame.with_columns(pl.lit(1, dtype=pl.Int64).alias(WEIGHT)).select("value", WEIGHT, *ORDER_SCHEMA)


def test_map_hands_named_tuples_and_takes_tuples_dicts_and_rows() -> None:
    frame = ab((1, "x", 2), (None, "y", -1))
    for function in (
        lambda row: (row.a, row.b + "!"),
        lambda row: {"b": row.b + "!", "a": row.a},
        lambda row: row._replace(b=row.b + "!"),
    ):
        out = MapRows(function, AB, AB).apply(frame, context())
        assert out.rows() == [(1, "x!", 2), (None, "y!", -1)]


def test_map_hands_bare_values_and_takes_them() -> None:
    for function in (lambda value: value + 1, lambda value: (value + 1,), lambda value: {"value": value + 1}):
        assert MapRows(function, VALUE, VALUE).apply(values(1, 2), context()).rows() == [(2, 1), (3, 1)]


def test_mixed_results_and_names_that_are_no_identifiers() -> None:
    schema = {"a": pl.Int64(), "class": pl.String()}
    frame = ab((1, "x", 1), (2, "y", 1)).rename({"b": "class"})
    out = MapRows(lambda row: row if row.a == 1 else {"a": 0, "class": row[1]}, schema, schema).apply(
        frame, context()
    )
    assert out.rows() == [(1, "x", 1), (0, "y", 1)]


@pytest.mark.parametrize(
    ("result", "schema"),
    [
        ("1", VALUE),
        (1.5, VALUE),
        (True, VALUE),
        (2**63, VALUE),
        ((1, 2), VALUE),
        ({"v": 1}, VALUE),
        (1, AB),
        ((1,), AB),
        ({"a": 1}, AB),
        ({"a": 1, "b": "x", "c": 2}, AB),
        ((1, b"x"), AB),
        (None, AB),
        (Decimal("1.234"), {"d": pl.Decimal(10, 2)}),
        (1.5, {"d": pl.Decimal(10, 2)}),
        (dt.datetime(2020, 1, 1), {"d": pl.Date()}),
        (dt.date(2020, 1, 1), {"d": pl.Datetime("us")}),
        ("2020-01-01", {"d": pl.Date()}),
        (1, {"d": pl.Boolean()}),
        (300, {"d": pl.Int8()}),
        ([1, "a"], {"d": pl.List(pl.Int64())}),
    ],
)
def test_results_that_do_not_fit_name_operator_and_record(
    result: Any, schema: dict[str, pl.DataType]
) -> None:
    def bad_on_seven(value: int) -> Any:
        return result if value == 7 else None if len(schema) == 1 else (None, None)

    kernel = MapRows(bad_on_seven, VALUE, schema)
    with pytest.raises(RecordError, match=r"operator op: function returned .* expected .*; record: 7"):
        kernel.apply(values(1, 7, 2), context())
    letters = context("dead_letter")
    out = kernel.apply(values(1, 7, 2), letters)
    assert out.get_column(WEIGHT).to_list() == [1, 1]
    assert [(x.record, x.operator, x.where) for x in letters.dead_letters] == [("7", "op", "step 7")]


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (Decimal("1.25"), pl.Decimal(10, 2)),
        (3, pl.Float64()),
        (dt.datetime(2020, 1, 1), pl.Datetime("us")),
        (dt.date(2020, 1, 1), pl.Date()),
        ([1, None], pl.List(pl.Int64())),
        ({"x": 1}, pl.Struct({"x": pl.Int64()})),
        (b"x", pl.Binary()),
    ],
)
def test_results_that_fit(value: Any, dtype: pl.DataType) -> None:
    out = MapRows(lambda _: value, VALUE, {"out": dtype}).apply(values(1, 2), context())
    assert out.schema["out"] == dtype
    assert out.get_column("out").to_list() == [value, value]


@pytest.mark.parametrize("error", [ValueError("boom"), StopIteration("boom")])
@pytest.mark.parametrize("last", [3, 9])
def test_functions_that_raise(error: Exception, last: int) -> None:
    calls: list[int] = []

    def fails(value: int) -> int:
        calls.append(value)
        if value in (1, last):
            raise error
        return value

    frame = values(0, 1, 2, 3, 9)
    with pytest.raises(
        RecordError, match=f"operator op: function raised {type(error).__name__}.*; record: 1"
    ):
        MapRows(fails, VALUE, VALUE).apply(frame, context())
    calls.clear()
    letters = context("dead_letter")
    out = MapRows(fails, VALUE, VALUE).apply(frame, letters)
    assert calls == [0, 1, 2, 3, 9]
    assert out.get_column("value").to_list() == [v for v in calls if v not in (1, last)]
    assert [x.record for x in letters.dead_letters] == ["1", str(last)]


def test_filter_means_what_python_means() -> None:
    frame = ab((1, "", 1), (2, "x", -3), (3, None, 1))
    assert FilterRows(lambda row: row.b, AB).apply(frame, context()).rows() == [(2, "x", -3)]


def test_flat_map_repeats_hidden_columns_and_sets_whole_rows_aside() -> None:
    def halves(value: int) -> Any:
        if value == 4:
            return None
        for part in range(value):
            if part == 2:
                yield "bad"
            yield part

    letters = context("dead_letter")
    frame = values(2, 3, 0, 1).with_columns(pl.Series(WEIGHT, [5, 1, 1, -1]))
    out = FlatMapRows(halves, VALUE, VALUE).apply(frame, letters)
    assert out.rows() == [(0, 5), (1, 5), (0, -1)]
    assert [x.record for x in letters.dead_letters] == ["3"]


@pytest.mark.parametrize("result", ["abc", {"value": 1}, 5])
def test_flat_map_refuses_what_is_no_list_of_rows(result: Any) -> None:
    with pytest.raises(RecordError, match="expected a list of rows"):
        FlatMapRows(lambda _: result, VALUE, VALUE).apply(values(1), context())


order_rows = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 1), st.integers(0, 3), st.integers(0, 50)),
    max_size=20,
    unique_by=lambda row: row[1:],
)


@settings(max_examples=40)
@given(order_rows, st.randoms(use_true_random=False))
def test_flat_map_and_map_batches_keep_order_whatever_else_is_in_the_frame(rows: Any, random: Any) -> None:
    kernels: list[Any] = [
        FlatMapRows(lambda value: [value * 10 + i for i in range(value)], VALUE, VALUE),
        MapBatches(_spread_table, VALUE, VALUE, False),
    ]
    expected = [value * 10 + i for value, *_ in sorted(rows, key=lambda row: row[1:]) for i in range(value)]
    random.shuffle(rows)
    for kernel in kernels:
        whole = kernel.apply(ordered(rows), context()).sort(ORIGIN, MAJOR, MINOR)
        assert whole.get_column("value").to_list() == expected
        assert not whole.select(ORIGIN, MAJOR, MINOR).is_duplicated().any()
        parts = [kernel.apply(ordered([r for r in rows if r[2] % 2 == k]), context()) for k in (0, 1)]
        assert pl.concat(parts).sort(ORIGIN, MAJOR, MINOR).equals(whole)


def _spread_table(table: Any) -> Any:
    return pa.table(
        {"value": [v * 10 + i for v in table["value"].to_pylist() for i in range(v)]}, VALUE_ARROW
    )


VALUE_ARROW = pa.schema([("value", pa.int64())])


def test_map_batches_repeats_by_weight_or_hands_weights_out() -> None:
    frame = values(1, 2).with_columns(pl.Series(WEIGHT, [3, 1]))
    out = MapBatches(lambda t: t, VALUE, VALUE, False).apply(frame, context())
    assert out.rows() == [(1, 1), (1, 1), (1, 1), (2, 1)]
    out = MapBatches(lambda t: t, VALUE, VALUE, True).apply(frame.with_columns(-pl.col(WEIGHT)), context())
    assert out.rows() == [(1, -3), (2, -1)]


def test_map_batches_casts_safely_and_reorders() -> None:
    def swapped(table: Any) -> Any:
        return pa.table({"b": ["x", "y"], "a": pa.array([1, 2], pa.int8())})

    out = MapBatches(swapped, VALUE, AB, False).apply(values(1, 2), context())
    assert out.rows() == [(1, "x", 1), (2, "y", 1)]
    assert out.schema["a"] == pl.Int64()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda t: t.to_pylist(), "function returned list"),
        (lambda t: t.rename_columns(["other"]), r"columns \(other\)"),
        (lambda t: pa.table({"value": ["x"] * len(t)}), "column value of type string is no Int64"),
        (lambda t: pa.table({"value": [1.5] * len(t)}), "column value of type double is no Int64"),
        (lambda t: pc.divide(t["value"], 0), "function raised ArrowInvalid"),
    ],
)
def test_map_batches_refuses(function: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(RecordError, match=f"operator op: .*{message}"):
        MapBatches(function, VALUE, VALUE, False).apply(values(1, 2, 3), context())


def test_map_batches_and_expressions_set_only_bad_rows_aside() -> None:
    def picky(table: Any) -> Any:
        if 13 in table["value"].to_pylist():
            raise ValueError("unlucky")
        return table

    letters = context("dead_letter")
    out = MapBatches(picky, VALUE, VALUE, False).apply(values(1, 13, 2, 13, 3), letters)
    assert out.get_column("value").to_list() == [1, 2, 3]
    assert [(x.record, x.reason) for x in letters.dead_letters] == [
        ("13", "function raised ValueError: unlucky")
    ] * 2

    letters = context("dead_letter")
    frame = ab((1, "5", 1), (2, "x", 1), (3, "7", 2))
    out = SelectExprs([pl.col("b").cast(pl.Int64)]).apply(frame, letters)
    assert out.rows() == [(5, 1), (7, 2)]
    assert [x.record for x in letters.dead_letters] == ["Row(a=2, b='x')"]
    with pytest.raises(RecordError, match=r"operator op: expression failed.*record: Row\(a=2, b='x'\)"):
        FilterExpr(pl.col("b").cast(pl.Int64) > 1).apply(frame, context())


def test_expressions_see_only_the_users_columns_and_carry_hidden_ones() -> None:
    frame = ab((1, "x", 2), (5, "y", -1))
    assert SelectExprs([pl.all()]).apply(frame, context()).equals(frame)
    assert SelectExprs([pl.lit(1).alias("one")]).apply(frame, context()).rows() == [(1, 2), (1, -1)]
    assert SelectExprs([pl.lit(1).alias("one")]).apply(frame.clear(), context()).rows() == []
    out = WithColumns([pl.col("a") + 1, pl.lit("z").alias("c")]).apply(frame, context())
    assert out.columns == ["a", "b", "c", WEIGHT]
    assert out.rows() == [(2, "x", "z", 2), (6, "y", "z", -1)]
    assert FilterExpr(pl.col("a") > 1).apply(frame, context()).rows() == [(5, "y", -1)]
    assert FilterExpr(pl.lit(True)).apply(frame, context()).equals(frame)


def test_add_key() -> None:
    out = AddKey(lambda row: row.b[0], AB, "key", pl.String()).apply(ab((1, "xy", 2)), context())
    assert out.columns == ["a", "b", "key", WEIGHT]
    assert out.rows() == [(1, "xy", "x", 2)]
    letters = context("dead_letter")
    out = AddKey(lambda row: row.b[0], AB, "key", pl.String()).apply(ab((1, "", 2), (2, "z", 1)), letters)
    assert out.rows() == [(2, "z", "z", 1)]
    assert letters.dead_letters[0].weight == 2


@pytest.mark.parametrize(
    "expr",
    [
        pl.col("a").sum(),
        pl.col("a") - pl.col("a").mean(),
        pl.col("a").sort(),
        pl.col("a").over("b"),
        pl.col("a").sum().over("b"),
        pl.len(),
        pl.col("a").shift(),
        pl.col("a").cum_sum(),
        pl.col("a").first(),
        pl.col("a").head(1),
        pl.int_range(pl.len()),
        pl.col("a").unique(),
        pl.col("a").drop_nulls(),
        pl.col("a").filter(pl.col("a") > 1),
        pl.col("b").str.split(" ").explode(),
        pl.col("a").is_in(pl.col("a").max().implode()),
        pl.col("a").fill_null(strategy="forward"),
        pl.col("a").shuffle(seed=1),
        pl.all().reverse(),
        pl.col("a").map_batches(lambda s: s.cum_sum(), return_dtype=pl.Int64),
        pl.when(pl.col("a") > 1).then(pl.col("a").max()).otherwise(0),
        pl.col("a") + pl.lit(pl.Series([1, 2])),
        pl.col("missing"),
        pl.col(WEIGHT),
        pl.lit(None).alias("x"),
        pl.col("a").alias("__x"),
        pl.col("b") * 2,
    ],
)
def test_expressions_that_are_refused(expr: pl.Expr) -> None:
    with pytest.raises(FlowError, match="operator 'chosen'"):
        check_rowwise([expr], AB, "chosen")


@pytest.mark.parametrize(
    ("expr", "dtype"),
    [
        (pl.col("a") + 1, pl.Int64()),
        (pl.lit("x").alias("a"), pl.String()),
        (pl.col("a").is_in([1, 2]), pl.Boolean()),
        (pl.when(pl.col("a") > 1).then(pl.lit("x")).otherwise(pl.col("b")).alias("a"), pl.String()),
        (pl.col("b").str.split(" ").list.len().alias("a"), pl.UInt32()),
        (pl.col("a").replace_strict({1: 2}, default=0), pl.Int64()),
        (pl.col("b").cast(pl.Int64).alias("a"), pl.Int64()),
        (pl.struct("a", "b").alias("a"), pl.Struct({"a": pl.Int64(), "b": pl.String()})),
        (pl.col("a").fill_null(0), pl.Int64()),
        (pl.format("{}-{}", "a", "b").alias("a"), pl.String()),
        (pl.col("a").map_elements(lambda v: float(str(v)), return_dtype=pl.Float64), pl.Float64()),
    ],
)
def test_expressions_that_are_taken(expr: pl.Expr, dtype: pl.DataType) -> None:
    assert check_rowwise([expr], AB, "chosen") == {"a": dtype}
    assert check_rowwise([expr], AB, "chosen", keep=True) == {"a": dtype, "b": pl.String()}


def test_predicates_and_columns_that_pass_through() -> None:
    check_predicate(pl.col("a") > 1, AB, "f")
    with pytest.raises(FlowError, match="one column of booleans; found Int64"):
        check_predicate(pl.col("a"), AB, "f")
    with pytest.raises(FlowError, match="operator 'twice'"):
        check_rowwise([pl.col("a"), pl.col("a")], AB, "twice")
    assert passes_through([pl.col("a")], "a")
    assert passes_through([pl.all()], "a")
    assert passes_through([pl.col("a").alias("a")], "a")
    assert not passes_through([pl.col("b").alias("a")], "a")
    assert not passes_through([pl.col("a") + 1], "a")
    assert not passes_through([pl.all() + 1], "a")
    assert not passes_through([pl.col("b")], "a")
    assert passes_through([pl.col("b") + "x"], "a", keep=True)
    assert not passes_through([pl.col("a") + 1], "a", keep=True)
