"""`Flow`, `Stream` and `KeyedStream`: what a user types.

Every call checks its arguments against the schema at once and raises `FlowError` with the
operator's name, so that a flow that could be built can also be run.  What is checked, and the nodes that
are made, is in `stateless` and `stateful`.

>>> import anabranch as ab
>>> flow = ab.Flow("totals")
>>> orders = flow.input("orders", ab.generator(rows=100, keys=5))
>>> totals = orders.key_by("key").aggregate(n=ab.count(), total=ab.sum("value"))
>>> totals.output("totals", ab.memory([]))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, cast

import polars as pl

from anabranch.connect.sink import Sink
from anabranch.connect.sinks import parquet
from anabranch.connect.source import Source
from anabranch.errors import FlowError
from anabranch.flow import stateful, stateless
from anabranch.flow.checks import check_name, show
from anabranch.flow.graph import Graph
from anabranch.flow.node import Node
from anabranch.model.hashing import is_key_type
from anabranch.operators import aggregates as agg
from anabranch.operators import stateless as ops
from anabranch.operators.join import How
from anabranch.operators.kernel import OnError


class Flow(Graph):
    """A graph from inputs through operators to outputs.

    Args:
        name: letters, digits, `_` and `-`; names the job in Spark and in the job directory.
        on_error: what a bad record does unless an operator says otherwise: `"stop"` the flow with
            an error that names it, or, with `"dead_letter"`, go to the output `dead_letters` with the reason.
    """

    def __init__(self, name: str, *, on_error: OnError = "stop") -> None:
        super().__init__(name, on_error)

    def input(self, name: str, source: Source, *, on_error: OnError | None = None) -> Stream:
        """A named input; its rows have the source's columns and weight +1, or that of its weight column."""
        check_name("input", name)
        if not isinstance(source, Source):
            raise FlowError(
                f"input {name!r}: expected a source such as ab.files(…), got {type(source).__name__}"
            )
        node = self.add(
            "input",
            "input",
            (),
            source.schema,
            source.append_only,
            name=name,
            on_error=on_error,
            source=source,
            detail={"source": source.fingerprint()},
        )
        return Stream(self, node)


class Stream:
    """Rows with named, typed columns and integer weights."""

    def __init__(self, flow: Flow, node: Node) -> None:
        self.flow = flow
        self.node = node

    @property
    def schema(self) -> dict[str, pl.DataType]:
        """Names and Polars types of the columns."""
        return dict(self.node.schema)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.node.id} {show(self.schema)}>"

    # Stateless, a Python call per row.

    def map(
        self,
        fn: Callable[[Any], Any],
        schema: Any = None,
        *,
        name: str | None = None,
        on_error: OnError | None = None,
    ) -> Stream:
        """One row for each row.  `fn` must give the same answer for equal rows; the weight is kept.

        `fn` gets a named tuple (the bare value when the only column is `value`) and returns a
        tuple or dict with the columns of `schema` (default: the same columns), or a bare value
        when that is one column.
        """
        node = stateless.rows(self.flow, self.node, "map", ops.MapRows, fn, schema, name, on_error)
        return Stream(self.flow, node)

    def flat_map(
        self,
        fn: Callable[[Any], Any],
        schema: Any = None,
        *,
        name: str | None = None,
        on_error: OnError | None = None,
    ) -> Stream:
        """Any number of rows for each row; see `map`."""
        node = stateless.rows(self.flow, self.node, "flat_map", ops.FlatMapRows, fn, schema, name, on_error)
        return Stream(self.flow, node)

    def filter(
        self,
        predicate: pl.Expr | Callable[[Any], Any],
        *,
        name: str | None = None,
        on_error: OnError | None = None,
    ) -> Self:
        """The rows for which a Polars expression, or a Python function of the row, is true (null is not)."""
        node = stateless.filtered(self.flow, self.node, predicate, name, on_error)
        return type(self)(self.flow, node)

    def branch(
        self, predicate: pl.Expr | Callable[[Any], Any], *, name: str | None = None
    ) -> tuple[Self, Self]:
        """Two streams: the rows for which the predicate is true, and all others."""
        yes, no = (None, None) if name is None else (f"{name}-yes", f"{name}-no")
        if isinstance(predicate, pl.Expr):
            other: Any = ~predicate.fill_null(value=False)
        else:
            chosen: Callable[[Any], Any] = predicate

            def other(row: Any) -> bool:
                return not chosen(row)

        return self.filter(predicate, name=yes), self.filter(other, name=no)

    # Stateless, on columns.

    def select(self, *exprs: Any, name: str | None = None, **named: Any) -> Self:
        """New columns from Polars expressions or names, row by row.

        A keyed stream stays keyed while its key's columns are passed on unchanged.
        """
        return self._expressions("select", exprs, named, name)

    def with_columns(self, *exprs: Any, name: str | None = None, **named: Any) -> Self:
        """The columns, and more or other ones from Polars expressions, row by row; see `select`."""
        return self._expressions("with_columns", exprs, named, name)

    def map_batches(
        self,
        fn: Callable[[Any], Any],
        schema: Any = None,
        *,
        weights: bool = False,
        name: str | None = None,
        on_error: OnError | None = None,
    ) -> Stream:
        """An Arrow table for an Arrow table.

        `fn` must treat rows one by one: how rows are cut into tables is not fixed.  With
        `weights=True` the table carries the column `__weight` and so must the result; without, the flow
        is refused where deletions could reach `fn`.
        """
        node = stateless.batches(self.flow, self.node, fn, schema, weights, name, on_error)
        return Stream(self.flow, node)

    def union(self, *others: Stream, name: str | None = None) -> Stream:
        """All rows of several streams with the same columns."""
        for other in others:
            self._check_together(name or "union", other)
        node = stateless.union(self.flow, (self.node, *(other.node for other in others)), name)
        return Stream(self.flow, node)

    def key_by(
        self,
        *columns: str | Callable[[Any], Any],
        type: Any = None,  # noqa: A002 - the word a user expects beside `name`
        column: str = "key",
        name: str | None = None,
        on_error: OnError | None = None,
    ) -> KeyedStream:
        """Bring rows with equal keys together: the distributor, and the start of a region.

        Args:
            columns: one or more columns; or one function of the row, whose result becomes the
                column `column` of Arrow, Polars or Python type `type` (default: string).
        """
        node = self.node
        keys: tuple[str, ...]
        if len(columns) == 1 and callable(columns[0]):
            node = stateless.with_key(self.flow, node, columns[0], type, column, name, on_error)
            keys = (column,)
        else:
            keys = tuple(str(key) for key in columns)
        return KeyedStream(self.flow, stateless.keyed(self.flow, node, keys, name, on_error))

    def distinct(self, *, name: str | None = None) -> KeyedStream:
        """Each row once, while its weights add up to more than zero."""
        keys = [column for column, dtype in self.schema.items() if is_key_type(dtype)]
        if not keys:
            raise FlowError(
                f"operator {name or 'distinct'!r}: no column of {show(self.schema)} can be a key; "
                "add one with key_by"
            )
        return self.key_by(*keys).distinct(name=name)

    def output(self, name: str, sink: Sink | None = None) -> None:
        """Write the stream's changes to a sink (default: Parquet files inside the job directory)."""
        check_name("output", name)
        if sink is not None and not isinstance(sink, Sink):
            raise FlowError(
                f"output {name!r}: expected a sink such as ab.parquet(…), got {type(sink).__name__}"
            )
        sink = sink or parquet()
        described = sink.fingerprint()
        for other, node in self.flow.outputs.items():
            # Files are named after step and worker alone: two outputs would overwrite each other's.
            if described.get("path") is not None and node.detail["sink"].get("path") == described["path"]:
                raise FlowError(f"output {name!r}: output {other!r} is kept in {described['path']} already")
        self.flow.add(
            "output",
            "output",
            # The place of rows is nothing to a sink, so an output of a keyed stream needs no exchange.
            (stateless.undistributed(self.node),),
            self.schema,
            self.node.append_only,
            name=name,
            sink=sink,
            detail={"sink": described},
        )

    def _expressions(
        self, kind: str, exprs: tuple[Any, ...], named: dict[str, Any], name: str | None
    ) -> Self:
        node = stateless.expressions(self.flow, self.node, kind, exprs, named, name)
        if self.node.keys and not node.keys:
            # No type can say that it depends on the expressions whether a keyed stream stays one.
            return cast("Self", Stream(self.flow, node))
        return type(self)(self.flow, node)

    def _check_together(self, label: str, other: object) -> None:
        if not isinstance(other, Stream):
            raise FlowError(f"operator {label!r}: expected a stream, got {type(other).__name__}")
        if other.flow is not self.flow:
            raise FlowError(
                f"operator {label!r}: {other.node.id!r} is a stream of another flow, {other.flow.name!r}"
            )


class KeyedStream(Stream):
    """A stream whose rows with equal keys are in one place, so that operators can keep state for each key."""

    @property
    def keys(self) -> tuple[str, ...]:
        return self.node.keys

    def count(self, *, name: str | None = None) -> KeyedStream:
        """Rows of each key: the key's columns and `count`."""
        return self._aggregate("count", {"count": agg.count()}, name)

    def sum(self, column: str, *, name: str | None = None) -> KeyedStream:
        """Exact sum of a column for each key, as `sum_COLUMN`; null where there is no value."""
        return self._aggregate("sum", {f"sum_{column}": agg.sum(column)}, name)

    def min(self, column: str, *, name: str | None = None) -> KeyedStream:
        """Least value of a column for each key, as `min_COLUMN`."""
        return self._aggregate("min", {f"min_{column}": agg.min(column)}, name)

    def max(self, column: str, *, name: str | None = None) -> KeyedStream:
        """Greatest value of a column for each key, as `max_COLUMN`."""
        return self._aggregate("max", {f"max_{column}": agg.max(column)}, name)

    def mean(self, column: str, *, name: str | None = None) -> KeyedStream:
        """Mean of a column for each key, as `mean_COLUMN`."""
        return self._aggregate("mean", {f"mean_{column}": agg.mean(column)}, name)

    def aggregate(self, *, name: str | None = None, **aggregates: agg.Aggregate) -> KeyedStream:
        """Several aggregates at once: `aggregate(n=ab.count(), total=ab.sum("x"))`."""
        return self._aggregate("aggregate", aggregates, name)

    def reduce(
        self,
        column: str,
        fn: Callable[..., Any],
        *,
        weights: bool = False,
        name: str | None = None,
        on_error: OnError | None = None,
    ) -> KeyedStream:
        """Fold a column of each key with `fn(so_far, value)`, in the order of arrival; gives `reduce_COLUMN`.

        With `weights=True`, `fn(so_far, value, weight)`, and `so_far` is None at first; without, the flow is
        refused where deletions could reach it.
        """
        return self._keyed(stateful.reduced(self.flow, self.node, column, fn, weights, name, on_error))

    def distinct(self, *, name: str | None = None) -> KeyedStream:
        """Each row once, while its weights add up to more than zero."""
        return self._keyed(stateful.deduplicated(self.flow, self.node, name))

    def join(
        self, other: KeyedStream, how: How = "inner", *, suffix: str = "_right", name: str | None = None
    ) -> KeyedStream:
        """Join on the keys, incrementally on both sides.

        Args:
            how: inner, left, full, semi or anti.  Null keys match nothing, as in SQL.
            suffix: for columns of `other` whose name this stream also has.
        """
        label = name or "join"
        self._check_together(label, other)
        if not isinstance(other, KeyedStream):
            raise FlowError(f"operator {label!r}: key the other stream first, with key_by")
        return self._keyed(stateful.joined(self.flow, self.node, other.node, how, suffix, name))

    def stateful_map(
        self,
        fn: Callable[..., Any],
        schema: Any,
        *,
        initial: Any = None,
        weights: bool = False,
        name: str | None = None,
        on_error: OnError | None = None,
    ) -> KeyedStream:
        """`fn(state, row) -> (state, rows)` for each row of a key, in the order of arrival per input partition.

        The result has the key's columns and those of `schema`.  `state` is `initial` at first; None forgets
        the key.  It is stored as MessagePack: None, booleans, numbers, strings, bytes, dates, timestamps,
        decimals, lists and dicts of them.  With `weights=True`, `fn(state, row, weight)` returns (row, weight)
        pairs.
        """
        node = stateful.mapped(self.flow, self.node, fn, schema, initial, weights, name, on_error)
        return self._keyed(node)

    def stateful_map_batches(
        self,
        fn: Callable[..., Any],
        schema: Any,
        state: Any,
        *,
        weights: bool = False,
        name: str | None = None,
        on_error: OnError | None = None,
    ) -> KeyedStream:
        """`fn(rows, state) -> (out, new_state)`, each an Arrow table, for all rows of a batch of keys.

        `state` has the key's columns and those of the argument `state` for keys that have state; `new_state`
        replaces it for all keys of the batch.  `out` has the key's columns and those of `schema`.
        """
        node = stateful.batch_mapped(self.flow, self.node, fn, schema, state, weights, name, on_error)
        return self._keyed(node)

    def _aggregate(self, kind: str, aggregates: dict[str, agg.Aggregate], name: str | None) -> KeyedStream:
        return self._keyed(stateful.aggregated(self.flow, self.node, kind, aggregates, name))

    def _keyed(self, node: Node) -> KeyedStream:
        return KeyedStream(self.flow, node)
