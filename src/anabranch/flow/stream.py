"""`Flow`, `Stream` and `KeyedStream`: what a user types.

Every call checks its arguments against the schema at once and raises `FlowError` with the
operator's name, so that a flow that could be built can also be run.

>>> import anabranch as ab
>>> flow = ab.Flow("totals")
>>> orders = flow.input("orders", ab.generator(rows=100, keys=5))
>>> totals = orders.key_by("key").aggregate(n=ab.count(), total=ab.sum("value"))
>>> totals.output("totals", ab.memory([]))
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import polars as pl

from anabranch.connect.sinks import parquet
from anabranch.connect.sink import Sink
from anabranch.connect.source import Source
from anabranch.errors import FlowError
from anabranch.flow.node import Node, Role
from anabranch.model.hashing import is_key_type
from anabranch.model.ids import OperatorId
from anabranch.model.types import to_dtype, to_schema
from anabranch.operators import aggregates as agg
from anabranch.operators import rowwise
from anabranch.operators import stateless as ops
from anabranch.operators.aggregate import AggregateKernel
from anabranch.operators.distinct import DistinctKernel
from anabranch.operators.join import How, JoinKernel
from anabranch.operators.kernel import OnError, Schema, StatefulKernel, StatelessKernel
from anabranch.operators.reduce import ReduceKernel
from anabranch.operators.stateful_batches import StatefulBatchesKernel
from anabranch.operators.stateful_map import StatefulMapKernel

DEAD_LETTERS = "dead_letters"
"""Name of the output that every flow has for records that were set aside."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,99}")


class Flow:
    """A graph from inputs through operators to outputs.

    Args:
        name: letters, digits, `_` and `-`; names the job in Spark and in the job directory.
        on_error: what a bad record does unless an operator says otherwise: `"stop"` the flow with
            an error that names it, or go to the output `dead_letters` with the reason.
    """

    def __init__(self, name: str, *, on_error: OnError = "stop") -> None:
        _check_name("flow", name)
        _check_on_error(name, on_error)
        self.name = name
        self.on_error: OnError = on_error
        self.nodes: list[Node] = []
        # Numbers the operators of a kind that the user did not name, in the order of building:
        # the id is then a matter of place, the same every time the file is loaded.
        self._counts: dict[str, int] = {}

    def input(self, name: str, source: Source, *, on_error: OnError | None = None) -> Stream:
        """A named input; its rows have the source's columns and weight +1, unless it names a weight column."""
        _check_name("input", name)
        if not isinstance(source, Source):
            raise FlowError(f"input {name!r}: expected a source such as ab.files(…), got {type(source).__name__}")
        node = self._add(
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

    @property
    def inputs(self) -> dict[str, Node]:
        return {node.id: node for node in self.nodes if node.role == "input"}

    @property
    def outputs(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes if node.role == "output"}

    def _add(
        self,
        role: Role,
        kind: str,
        inputs: tuple[Node, ...],
        schema: Schema,
        append_only: bool,
        *,
        name: str | None,
        on_error: OnError | None = None,
        **fields: Any,
    ) -> Node:
        operator = self._operator_id(kind, name)
        _check_on_error(operator, on_error)
        node = Node(
            id=operator,
            name=name or operator,
            role=role,
            kind=kind,
            inputs=inputs,
            schema=dict(schema),
            append_only=append_only,
            on_error=on_error or self.on_error,
            **fields,
        )
        self.nodes.append(node)
        return node

    def _operator_id(self, kind: str, name: str | None) -> OperatorId:
        taken = {node.id for node in self.nodes}
        if name is not None:
            _check_name(kind, name)
            # An output may be called like the operator it shows.
            operator = OperatorId(f"{name}.output" if kind == "output" else name)
            if operator in taken or (kind == "output" and name == DEAD_LETTERS):
                what = "output" if kind == "output" else "operator"
                raise FlowError(f"{kind} {name!r}: the flow {self.name!r} already has an {what} of that name")
            return operator
        while True:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            candidate = OperatorId(f"{kind}_{self._counts[kind]}")
            if candidate not in taken:
                return candidate


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
        columns = ", ".join(f"{name}: {dtype}" for name, dtype in self.schema.items())
        return f"<{type(self).__name__} {self.node.id} [{columns}]>"

    # Stateless, a Python call per row.

    def map(
        self, fn: Callable[[Any], Any], schema: Any = None, *, name: str | None = None, on_error: OnError | None = None
    ) -> Stream:
        """One row for each row.  `fn` must give the same answer for equal rows; the weight is kept.

        `fn` gets a named tuple (the bare value when the only column is `value`) and returns a
        tuple or dict with the columns of `schema` (default: the same columns), or a bare value
        when that is one column.
        """
        return self._rows("map", ops.MapRows, fn, schema, name, on_error)

    def flat_map(
        self, fn: Callable[[Any], Any], schema: Any = None, *, name: str | None = None, on_error: OnError | None = None
    ) -> Stream:
        """Any number of rows for each row; see `map`."""
        return self._rows("flat_map", ops.FlatMapRows, fn, schema, name, on_error)

    def filter(
        self, predicate: pl.Expr | Callable[[Any], Any], *, name: str | None = None, on_error: OnError | None = None
    ) -> Self:
        """The rows for which a Polars expression, or a Python function of the row, is true (null is not)."""
        if isinstance(predicate, pl.Expr):
            label = name or "filter"
            rowwise.check_predicate(predicate, self.schema, label)
            kernel: StatelessKernel = ops.FilterExpr(predicate)
            detail = {"expr": str(predicate)}
        else:
            _check_callable("filter", name, predicate)
            kernel = ops.FilterRows(predicate, self.schema)
            detail = {}
        return self._stateless("filter", kernel, self.schema, name, on_error, detail)

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
        """New columns from Polars expressions or names, row by row."""
        return self._expressions("select", ops.SelectExprs, exprs, named, name)

    def with_columns(self, *exprs: Any, name: str | None = None, **named: Any) -> Self:
        """The columns, and more or other ones from Polars expressions, row by row."""
        return self._expressions("with_columns", ops.WithColumns, exprs, named, name)

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
        _check_callable("map_batches", name, fn)
        self._refuse_deletions("map_batches", name, weights)
        out = self._out_schema("map_batches", name, schema)
        kernel = ops.MapBatches(fn, self.schema, out, weights)
        node = self.flow._add(
            "stateless",
            "map_batches",
            (self.node,),
            out,
            self.node.append_only and not weights,
            name=name,
            on_error=on_error,
            stateless=kernel,
            detail={"weights": weights},
        )
        return Stream(self.flow, node)

    def union(self, *others: Stream, name: str | None = None) -> Stream:
        """All rows of several streams with the same columns."""
        label = name or "union"
        for other in others:
            if other.flow is not self.flow:
                raise FlowError(f"operator {label!r}: a stream of another flow cannot be joined in")
            if other.schema != self.schema:
                raise FlowError(
                    f"operator {label!r}: all streams must have the same columns; {self.node.id!r} has "
                    f"{_show(self.schema)}, {other.node.id!r} has {_show(other.schema)}"
                )
        nodes = (self.node, *(other.node for other in others))
        node = self.flow._add(
            "union", "union", nodes, self.schema, all(n.append_only for n in nodes), name=name
        )
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
        label = name or "key_by"
        if len(columns) == 1 and callable(columns[0]):
            return self._key_by_function(columns[0], type, column, name, on_error)
        keys = tuple(str(key) for key in columns)
        if not keys:
            raise FlowError(f"operator {label!r}: name at least one column, or give a function")
        for key in keys:
            self._check_column(label, key)
            if not is_key_type(self.schema[key]):
                raise FlowError(
                    f"operator {label!r}: column {key!r} of type {self.schema[key]} cannot be a key; keys are integers, "
                    "strings, bytes, booleans, dates, timestamps and decimals"
                )
        if len(set(keys)) != len(keys):
            raise FlowError(f"operator {label!r}: column named twice in {list(keys)}")
        node = self.flow._add(
            "key_by",
            "key_by",
            (self.node,),
            self.schema,
            self.node.append_only,
            name=name,
            on_error=on_error,
            keys=keys,
            detail={"keys": list(keys)},
        )
        return KeyedStream(self.flow, node)

    def distinct(self, *, name: str | None = None) -> KeyedStream:
        """Each row once, while its weights add up to more than zero."""
        keys = [column for column, dtype in self.schema.items() if is_key_type(dtype)]
        if not keys:
            raise FlowError(
                f"operator {name or 'distinct'!r}: no column of {_show(self.schema)} can be a key; add one with key_by"
            )
        return self.key_by(*keys).distinct(name=name)

    def output(self, name: str, sink: Sink | None = None) -> None:
        """Write the stream's changes to a sink (default: Parquet files inside the job directory)."""
        _check_name("output", name)
        if sink is not None and not isinstance(sink, Sink):
            raise FlowError(f"output {name!r}: expected a sink such as ab.parquet(…), got {type(sink).__name__}")
        sink = sink or parquet()
        # The order of rows is nothing to a sink, so an output of a keyed stream needs no exchange.
        origin = self.node.inputs[0] if self.node.role == "key_by" else self.node
        self.flow._add(
            "output",
            "output",
            (origin,),
            self.schema,
            self.node.append_only,
            name=name,
            sink=sink,
            detail={"sink": sink.fingerprint()},
        )

    # Shared.

    def _key_by_function(
        self, fn: Callable[[Any], Any], spec: Any, column: str, name: str | None, on_error: OnError | None
    ) -> KeyedStream:
        label = name or "key_by"
        dtype = to_dtype(spec if spec is not None else str)
        if column in self.schema:
            raise FlowError(
                f"operator {label!r}: the key's column {column!r} exists already; choose another with column=…"
            )
        node = self.flow._add(
            "stateless",
            "key_function",
            (self.node,),
            {**self.schema, column: dtype},
            self.node.append_only,
            name=None if name is None else f"{name}-key",
            on_error=on_error,
            stateless=ops.AddKey(fn, self.schema, column, dtype),
            detail={"column": column},
        )
        return Stream(self.flow, node).key_by(column, name=name, on_error=on_error)

    def _rows(
        self,
        kind: str,
        kernel: Callable[..., StatelessKernel],
        fn: Callable[[Any], Any],
        schema: Any,
        name: str | None,
        on_error: OnError | None,
    ) -> Stream:
        _check_callable(kind, name, fn)
        out = self._out_schema(kind, name, schema)
        node = self.flow._add(
            "stateless",
            kind,
            (self.node,),
            out,
            self.node.append_only,
            name=name,
            on_error=on_error,
            stateless=kernel(fn, self.schema, out),
        )
        return Stream(self.flow, node)

    def _stateless(
        self,
        kind: str,
        kernel: StatelessKernel,
        schema: Schema,
        name: str | None,
        on_error: OnError | None,
        detail: dict[str, Any],
    ) -> Self:
        node = self.flow._add(
            "stateless",
            kind,
            (self.node,),
            schema,
            self.node.append_only,
            name=name,
            on_error=on_error,
            keys=self.node.keys,
            stateless=kernel,
            detail=detail,
        )
        return type(self)(self.flow, node)

    def _expressions(
        self,
        kind: str,
        kernel: Callable[[list[pl.Expr]], StatelessKernel],
        exprs: Sequence[Any],
        named: Mapping[str, Any],
        name: str | None,
    ) -> Self:
        parsed = [pl.col(e) if isinstance(e, str) else e for e in exprs]
        parsed += [(pl.col(e) if isinstance(e, str) else e if isinstance(e, pl.Expr) else pl.lit(e)).alias(n) for n, e in named.items()]
        label = name or kind
        for expr in parsed:
            if not isinstance(expr, pl.Expr):
                raise FlowError(f"operator {label!r}: expected a Polars expression or a column's name, got {expr!r}")
        schema = rowwise.check_rowwise(parsed, self.schema, label, keep=kind == "with_columns")
        result = self._stateless(kind, kernel(parsed), schema, name, None, {"exprs": [str(e) for e in parsed]})
        kept = all(
            key in schema and rowwise.passes_through(parsed, key, keep=kind == "with_columns") for key in self.node.keys
        )
        if not kept:
            result.node.keys = ()
            return Stream(self.flow, result.node)  # type: ignore[return-value]
        return result

    def _out_schema(self, kind: str, name: str | None, spec: Any) -> dict[str, pl.DataType]:
        if spec is None:
            return self.schema
        try:
            return to_schema(spec)
        except FlowError as error:
            raise FlowError(f"operator {name or kind!r}: {error}") from None

    def _check_column(self, label: str, column: str) -> None:
        if column not in self.schema:
            raise FlowError(f"operator {label!r}: no column {column!r}; the stream has {_show(self.schema)}")

    def _refuse_deletions(self, kind: str, name: str | None, weights: bool) -> None:
        if not weights and not self.node.append_only:
            raise FlowError(
                f"operator {name or kind!r}: deletions can reach it (through {self.node.id!r}) and its function is not given "
                "the weight; pass weights=True and treat the weight in the function"
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
        label = name or "reduce"
        _check_callable("reduce", name, fn)
        self._check_column(label, column)
        self._refuse_deletions("reduce", name, weights)
        kernel = ReduceKernel(self.keys, self.schema, column, fn, f"reduce_{column}", weights)
        return self._stateful("reduce", kernel, kernel.output_schema, False, name, on_error, {"column": column})

    def distinct(self, *, name: str | None = None) -> KeyedStream:
        """Each row once, while its weights add up to more than zero."""
        kernel = DistinctKernel(self.keys, self.schema, self.node.append_only)
        return self._stateful("distinct", kernel, self.schema, self.node.append_only, name, None, {})

    def join(
        self, other: KeyedStream, how: How = "inner", *, suffix: str = "_right", name: str | None = None
    ) -> KeyedStream:
        """Join on the keys, incrementally on both sides.

        Args:
            how: inner, left, full, semi or anti.  Null keys match nothing, as in SQL.
            suffix: for columns of `other` whose name this stream also has.
        """
        label = name or "join"
        if not isinstance(other, KeyedStream):
            raise FlowError(f"operator {label!r}: key the other stream first, with key_by")
        if other.flow is not self.flow:
            raise FlowError(f"operator {label!r}: a stream of another flow cannot be joined")
        mine = [self.schema[key] for key in self.keys]
        theirs = [other.schema[key] for key in other.keys]
        if mine != theirs:
            raise FlowError(
                f"operator {label!r}: the keys differ in type: {list(self.keys)} is {mine}, {list(other.keys)} is {theirs}"
            )
        if how not in ("inner", "left", "full", "semi", "anti"):
            raise FlowError(f"operator {label!r}: how={how!r}; choose inner, left, full, semi or anti")
        kernel = JoinKernel(self.keys, other.keys, self.schema, other.schema, how, suffix)
        append_only = how == "inner" and self.node.append_only and other.node.append_only
        return self._stateful(
            "join", kernel, kernel.output_schema, append_only, name, None, {"how": how, "suffix": suffix}, other.node
        )

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

        The result has the key's columns and those of `schema`.  `state` is `initial` at first; None forgets the
        key.  It is stored as MessagePack: None, booleans, numbers, strings, bytes, dates, timestamps, decimals,
        lists and dicts of them.  With `weights=True`, `fn(state, row, weight)` returns (row, weight) pairs.
        """
        _check_callable("stateful_map", name, fn)
        self._refuse_deletions("stateful_map", name, weights)
        out = self._keyed_out_schema("stateful_map", name, schema)
        kernel = StatefulMapKernel(self.keys, self.schema, out, fn, weights, initial)
        return self._stateful(
            "stateful_map", kernel, kernel.output_schema, not weights, name, on_error, {"weights": weights}
        )

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
        _check_callable("stateful_map_batches", name, fn)
        self._refuse_deletions("stateful_map_batches", name, weights)
        out = self._keyed_out_schema("stateful_map_batches", name, schema)
        kept = self._keyed_out_schema("stateful_map_batches", name, state)
        kernel = StatefulBatchesKernel(self.keys, self.schema, out, kept, fn, weights)
        return self._stateful(
            "stateful_map_batches", kernel, kernel.output_schema, not weights, name, on_error, {"weights": weights}
        )

    def _keyed_out_schema(self, kind: str, name: str | None, spec: Any) -> dict[str, pl.DataType]:
        if spec is None:
            raise FlowError(f"operator {name or kind!r}: name the columns that the function gives, beside the key's")
        out = self._out_schema(kind, name, spec)
        for key in self.keys:
            if key in out:
                raise FlowError(f"operator {name or kind!r}: the key's column {key!r} is there anyway; leave it out")
        return out

    def _aggregate(
        self, kind: str, aggregates: Mapping[str, agg.Aggregate], name: str | None
    ) -> KeyedStream:
        label = name or kind
        if not aggregates:
            raise FlowError(f"operator {label!r}: give at least one aggregate, such as n=ab.count()")
        for column in aggregates:
            if column in self.keys or column.startswith("__"):
                raise FlowError(f"operator {label!r}: the result column {column!r} is taken")
        agg.check(aggregates, self.schema, label)
        kernel = AggregateKernel(self.keys, self.schema, aggregates, self.node.append_only)
        detail = {"aggregates": {out: [a.kind, a.column] for out, a in aggregates.items()}}
        return self._stateful(kind, kernel, kernel.output_schema, False, name, None, detail)

    def _stateful(
        self,
        kind: str,
        kernel: StatefulKernel,
        schema: Schema,
        append_only: bool,
        name: str | None,
        on_error: OnError | None,
        detail: dict[str, Any],
        *others: Node,
    ) -> KeyedStream:
        node = self.flow._add(
            "stateful",
            kind,
            (self.node, *others),
            schema,
            append_only,
            name=name,
            on_error=on_error,
            keys=self.keys,
            stateful=kernel,
            detail=detail,
        )
        return KeyedStream(self.flow, node)


def _check_name(what: str, name: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise FlowError(
            f"{what} {name!r}: a name begins with a letter and has letters, digits, '_' and '-', at most 100"
        )


def _check_on_error(operator: str, on_error: OnError | None) -> None:
    if on_error not in (None, "stop", "dead_letter"):
        raise FlowError(f"operator {operator!r}: on_error={on_error!r}; choose 'stop' or 'dead_letter'")


def _check_callable(kind: str, name: str | None, fn: Any) -> None:
    if not callable(fn) or inspect.isclass(fn) and fn is type:
        raise FlowError(f"operator {name or kind!r}: expected a function, got {type(fn).__name__}")


def _show(schema: Schema) -> str:
    return "[" + ", ".join(f"{name}: {dtype}" for name, dtype in schema.items()) + "]"
