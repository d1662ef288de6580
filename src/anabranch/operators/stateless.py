"""Kernels that turn rows into rows without state.

Each carries the hidden columns along: a row that is made from another has its weight and its place in
the canonical order.  Where one row can become several, places are numbered anew (`order.renumber`).

An expression or a batch function that fails is run again on halves of the batch until the rows at fault stand
alone: log₂(rows) extra runs for one bad row, none for good batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import polars as pl

from anabranch.model.batch import ORDER, WEIGHT, hidden, visible
from anabranch.model.contenthash import content_hash
from anabranch.operators.arrow import BatchFunctionError, Table, from_table, to_table
from anabranch.operators.kernel import Context, Schema
from anabranch.operators.order import I64, groups, has_order, in_order, lengths, renumber
from anabranch.operators.rowwise import check_predicate, check_rowwise, passes_through
from anabranch.operators.userfn import (
    Misfit,
    Rows,
    as_rows,
    build_frame,
    call_rows,
    check_out,
    guarded,
    misfits,
    raised,
    reason_of,
    set_aside,
    shown,
    stop,
)

__all__ = [
    "AddKey",
    "FilterExpr",
    "FilterRows",
    "FlatMapRows",
    "MapBatches",
    "MapRows",
    "SelectExprs",
    "WithColumns",
    "check_predicate",
    "check_rowwise",
    "passes_through",
]

RowFunction = Callable[[Any], Any]

_PIECES = 1024
"""A batch on which processes died is cut into as many: a row among millions stands alone after three deaths."""


def _call(
    function: RowFunction, frame: pl.DataFrame, schema: Schema, context: Context
) -> tuple[list[Any], pl.DataFrame, Rows]:
    """The function's results, the frame without the rows on which it failed, and these rows."""
    rows = Rows(frame, schema)

    def failed(place: int, error: Exception) -> None:
        set_aside(context, reason_of(error), rows[place], _weight(frame, place), error)

    results, bad = call_rows(guarded(function, context), rows, failed)
    check_out(context)
    if not bad:
        return results, frame, rows
    kept = frame[np.delete(np.arange(frame.height), bad)]
    return results, kept, Rows(kept, schema)


def _convert(
    results: list[Any], owners: I64, frame: pl.DataFrame, rows: Rows, schema: Schema, context: Context
) -> tuple[pl.DataFrame, I64]:
    """Columns from results; `owners[i]` is the row that result *i* came from.

    A row one of whose results does not fit is set aside with all of them.
    """
    try:
        return build_frame(results, schema), owners
    except Misfit as misfit:
        reasons: dict[int, str] = {}
        for place, reason in misfits(results, schema):
            reasons.setdefault(int(owners[place]), reason)
        if not reasons:
            stop(context, str(misfit), cause=misfit)
    for owner, reason in reasons.items():
        set_aside(context, reason, rows[owner], _weight(frame, owner))
    keep = ~np.isin(owners, list(reasons))
    return build_frame([results[i] for i in np.flatnonzero(keep)], schema), owners[keep]


def _weight(frame: pl.DataFrame, place: int) -> int:
    return int(frame.get_column(WEIGHT)[place])


def _carry(columns: pl.DataFrame, frame: pl.DataFrame, owners: I64 | None) -> pl.DataFrame:
    carried = frame.select(hidden(frame))
    if owners is not None:
        carried = carried[owners]
    return columns.hstack(carried)


@dataclass(frozen=True)
class MapRows:
    """One row from each row, by a Python function."""

    fn: RowFunction
    in_schema: Schema
    out_schema: Schema

    def apply(self, frame: pl.DataFrame, context: Context) -> pl.DataFrame:
        results, kept, rows = _call(self.fn, frame, self.in_schema, context)
        columns, owners = _convert(results, np.arange(kept.height), kept, rows, self.out_schema, context)
        return _carry(columns, kept, owners if len(owners) < kept.height else None)


@dataclass(frozen=True)
class FilterRows:
    """The rows for which a Python function gives something true, as Python's `filter` means it."""

    fn: RowFunction
    schema: Schema

    def apply(self, frame: pl.DataFrame, context: Context) -> pl.DataFrame:
        function = self.fn
        truths, kept, _ = _call(lambda row: bool(function(row)), frame, self.schema, context)
        return kept.filter(pl.Series(truths, dtype=pl.Boolean))


@dataclass(frozen=True)
class FlatMapRows:
    """Any number of rows from each row, by a Python function that returns an iterable (or None for none)."""

    fn: RowFunction
    in_schema: Schema
    out_schema: Schema

    def apply(self, frame: pl.DataFrame, context: Context) -> pl.DataFrame:
        ordered = has_order(frame)
        if ordered:
            frame = in_order(frame)
        function = self.fn
        # A generator's errors come while it is iterated: that has to happen within the call.
        lists, kept, rows = _call(lambda row: list(as_rows(function(row))), frame, self.in_schema, context)
        counts = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
        owners = np.repeat(np.arange(len(lists)), counts)
        results = list(chain.from_iterable(lists))
        columns, owners = _convert(results, owners, kept, rows, self.out_schema, context)
        out = _carry(columns, kept, owners)
        return renumber(out) if ordered else out


@dataclass(frozen=True)
class AddKey:
    """A column that a Python function computes from each row, to key the stream by."""

    fn: RowFunction
    in_schema: Schema
    name: str
    dtype: pl.DataType

    def apply(self, frame: pl.DataFrame, context: Context) -> pl.DataFrame:
        results, kept, rows = _call(self.fn, frame, self.in_schema, context)
        out = {self.name: self.dtype}
        columns, owners = _convert(results, np.arange(kept.height), kept, rows, out, context)
        if len(owners) < kept.height:
            kept = kept[owners]
        return _carry(kept.select(visible(kept)).hstack(columns), kept, None)


def _bisect(
    frame: pl.DataFrame,
    run: Callable[[pl.DataFrame], pl.DataFrame],
    empty: Callable[[], pl.DataFrame],
    context: Context,
) -> pl.DataFrame:
    """Run over the frame; when that fails, over its halves, until each row at fault is set aside.

    Where processes died on the frame it is run in pieces, so that the next death tells more.
    """
    if context.guard is not None and frame.height:
        record = _noted(frame)
        if frame.height > 1 and context.guard.died(context.operator, record):
            size = -(-frame.height // _PIECES)
            pieces = [frame[start : start + size] for start in range(0, frame.height, size)]
            return pl.concat([_bisect(piece, run, empty, context) for piece in pieces])
        reason = context.guard.admit(context.operator, record)
        if reason is not None:
            set_aside(context, reason, record, _weight(frame, 0))
            return empty()
    try:
        out = run(frame)
        check_out(context)
        return out
    except (pl.exceptions.PolarsError, BatchFunctionError) as error:
        reason = str(error) if isinstance(error, BatchFunctionError) else _failed(error)
        if frame.height == 0:
            stop(context, reason, cause=error)
        if frame.height == 1:
            set_aside(context, reason, _first(frame), _weight(frame, 0), error)
            return empty()
    half = frame.height // 2
    return pl.concat([_bisect(part, run, empty, context) for part in (frame[:half], frame[half:])])


def _first(frame: pl.DataFrame) -> Any:
    return Rows(frame[:1], {name: frame.schema[name] for name in visible(frame)})[0]


def _noted(frame: pl.DataFrame) -> str:
    """What a guard knows a batch by: its only row, or the first and the content of all."""
    first = shown(_first(frame))
    if frame.height == 1:
        return first
    return f"{frame.height} rows with hash {content_hash(frame):016x}, of which the first is {first}"


def _failed(error: Exception) -> str:
    # Polars goes on for several lines; the first says it all.
    return f"expression failed: {str(error).splitlines()[0]}"


def _evaluate(frame: pl.DataFrame, exprs: Sequence[pl.Expr], context: Context) -> pl.DataFrame:
    """The expressions over the user's columns alone, so that `pl.all()` finds no hidden ones."""
    out = frame.select(visible(frame)).select(exprs)
    if out.height == frame.height:
        return out
    if out.height != 1:
        stop(context, f"expressions made {out.height} rows from {frame.height}; they must work row by row")
    # Literals alone know nothing of the frame's height.
    return out[np.zeros(frame.height, dtype=np.int64)]


@dataclass(frozen=True)
class SelectExprs:
    """The given expressions as the new columns."""

    exprs: Sequence[pl.Expr]

    def apply(self, frame: pl.DataFrame, context: Context) -> pl.DataFrame:
        def run(part: pl.DataFrame) -> pl.DataFrame:
            return _carry(_evaluate(part, self.exprs, context), part, None)

        return _bisect(frame, run, lambda: run(frame.clear()), context)


@dataclass(frozen=True)
class WithColumns:
    """The given expressions added to the columns, or in the place of those of the same name."""

    exprs: Sequence[pl.Expr]

    def apply(self, frame: pl.DataFrame, context: Context) -> pl.DataFrame:
        def run(part: pl.DataFrame) -> pl.DataFrame:
            made = _evaluate(part, self.exprs, context)
            return _carry(part.select(visible(part)).with_columns(made.get_columns()), part, None)

        return _bisect(frame, run, lambda: run(frame.clear()), context)


@dataclass(frozen=True)
class FilterExpr:
    """The rows for which a boolean expression is true (null is not)."""

    expr: pl.Expr

    def apply(self, frame: pl.DataFrame, context: Context) -> pl.DataFrame:
        def run(part: pl.DataFrame) -> pl.DataFrame:
            return part.filter(_evaluate(part, [self.expr], context).to_series())

        return _bisect(frame, run, frame.clear, context)


@dataclass(frozen=True)
class MapBatches:
    """A function from Arrow table to Arrow table.

    How rows are cut into tables depends on the number of workers, so a function whose result
    is to be the same at any number must treat rows one by one.  With order columns it is called once for
    every (origin, major) group, and sees its rows in order.

    With `weights` the table has the column `__weight` and the result must have it too.  Without, a row
    of weight *w* is there *w* times, and the flow lets no deletions come here.  The result has no `__hash`:
    nothing tells which row a result came from.
    """

    fn: Callable[[Table], Table]
    in_schema: Schema
    out_schema: Schema
    weights: bool

    def apply(self, frame: pl.DataFrame, context: Context) -> pl.DataFrame:
        if not has_order(frame):
            return self._safely(frame, context)
        frame = in_order(frame)
        starts = groups(frame)
        parts = [self._empty().hstack(frame.clear().select(ORDER))]
        for start, size in zip(starts.tolist(), lengths(starts, frame.height).tolist(), strict=True):
            out = self._safely(frame[start : start + size], context)
            place = frame[start : start + 1].select(ORDER)
            parts.append(out.hstack(place[np.zeros(out.height, dtype=np.int64)]))
        return renumber(pl.concat(parts))

    def _safely(self, frame: pl.DataFrame, context: Context) -> pl.DataFrame:
        return _bisect(frame, self._run, self._empty, context) if frame.height else self._empty()

    def _run(self, part: pl.DataFrame) -> pl.DataFrame:
        weight = part.get_column(WEIGHT).to_numpy()
        given = part.select(*self.in_schema, *([WEIGHT] if self.weights else []))
        if not self.weights and bool((weight != 1).any()):
            given = given[np.repeat(np.arange(part.height), weight)]
        try:
            result = self.fn(to_table(given))
        except Exception as error:
            raise BatchFunctionError(raised(error)) from error
        if self.weights:
            return from_table(result, {**self.out_schema, WEIGHT: pl.Int64()})
        return from_table(result, self.out_schema).with_columns(pl.lit(1, dtype=pl.Int64).alias(WEIGHT))

    def _empty(self) -> pl.DataFrame:
        return pl.DataFrame(schema={**self.out_schema, WEIGHT: pl.Int64()})
