"""Nodes of operators that keep state for each key: from keyed nodes and a user's arguments, checked, to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

from anabranch.errors import FlowError
from anabranch.flow.checks import check_column, check_deletions, check_function, keyed_out_schema
from anabranch.flow.graph import Graph
from anabranch.flow.node import Node
from anabranch.operators import aggregates as agg
from anabranch.operators.aggregate import AggregateKernel
from anabranch.operators.distinct import DistinctKernel
from anabranch.operators.join import How, JoinKernel
from anabranch.operators.kernel import OnError, Schema, StatefulKernel
from anabranch.operators.reduce import ReduceKernel
from anabranch.operators.stateful_batches import StatefulBatchesKernel
from anabranch.operators.stateful_map import StatefulMapKernel


def aggregated(
    graph: Graph, node: Node, kind: str, aggregates: Mapping[str, agg.Aggregate], name: str | None
) -> Node:
    label = name or kind
    if not aggregates:
        raise FlowError(f"operator {label!r}: give at least one aggregate, such as n=ab.count()")
    for column in aggregates:
        if column in node.keys or column.startswith("__"):
            raise FlowError(
                f"operator {label!r}: the result column {column!r} is taken; call it something else, as in "
                "aggregate(n=ab.count())"
            )
    agg.check(aggregates, node.schema, label)
    kernel = AggregateKernel(node.keys, node.schema, aggregates, node.append_only)
    detail = {"aggregates": {out: [a.kind, a.column] for out, a in aggregates.items()}}
    # A group's row is replaced when its aggregate changes, so deletions begin here.
    return _stateful(graph, (node,), kind, kernel, kernel.output_schema, False, name, None, detail)


def reduced(
    graph: Graph,
    node: Node,
    column: str,
    fn: Callable[..., Any],
    weights: bool,
    name: str | None,
    on_error: OnError | None,
) -> Node:
    label = name or "reduce"
    check_function(label, fn)
    check_column(label, node.schema, column)
    check_deletions(label, node, weights)
    if f"reduce_{column}" in node.keys:
        raise FlowError(f"operator {label!r}: the result column 'reduce_{column}' is taken by the key")
    kernel = ReduceKernel(node.keys, node.schema, column, fn, f"reduce_{column}", weights)
    detail = {"column": column, "weights": weights}
    return _stateful(graph, (node,), "reduce", kernel, kernel.output_schema, False, name, on_error, detail)


def deduplicated(graph: Graph, node: Node, name: str | None) -> Node:
    kernel = DistinctKernel(node.keys, node.schema, node.append_only)
    return _stateful(graph, (node,), "distinct", kernel, node.schema, node.append_only, name, None, {})


def joined(graph: Graph, left: Node, right: Node, how: How, suffix: str, name: str | None) -> Node:
    label = name or "join"
    mine = [left.schema[key] for key in left.keys]
    theirs = [right.schema[key] for key in right.keys]
    if mine != theirs:
        raise FlowError(
            f"operator {label!r}: the keys differ in type: {list(left.keys)} is {_types(mine)}, "
            f"{list(right.keys)} is {_types(theirs)}"
        )
    if how not in get_args(How):
        raise FlowError(f"operator {label!r}: how={how!r}; choose inner, left, full, semi or anti")
    try:
        kernel = JoinKernel(left.keys, right.keys, left.schema, right.schema, how, suffix)
    except FlowError as error:
        raise FlowError(f"operator {label!r}: {error}") from None
    append_only = how == "inner" and left.append_only and right.append_only
    detail = {"how": how, "suffix": suffix}
    return _stateful(
        graph, (left, right), "join", kernel, kernel.output_schema, append_only, name, None, detail
    )


def mapped(
    graph: Graph,
    node: Node,
    fn: Callable[..., Any],
    schema: Any,
    initial: Any,
    weights: bool,
    name: str | None,
    on_error: OnError | None,
) -> Node:
    label = name or "stateful_map"
    check_function(label, fn)
    check_deletions(label, node, weights)
    out = keyed_out_schema(label, schema, node.keys)
    kernel = StatefulMapKernel(node.keys, node.schema, out, fn, weights, initial)
    return _stateful(
        graph,
        (node,),
        "stateful_map",
        kernel,
        kernel.output_schema,
        not weights,
        name,
        on_error,
        {"weights": weights},
    )


def batch_mapped(
    graph: Graph,
    node: Node,
    fn: Callable[..., Any],
    schema: Any,
    state: Any,
    weights: bool,
    name: str | None,
    on_error: OnError | None,
) -> Node:
    label = name or "stateful_map_batches"
    check_function(label, fn)
    check_deletions(label, node, weights)
    out = keyed_out_schema(label, schema, node.keys)
    kept = keyed_out_schema(label, state, node.keys)
    kernel = StatefulBatchesKernel(node.keys, node.schema, out, kept, fn, weights)
    # Stored states are rows of these columns: with others, they could not be read.
    detail = {"weights": weights, "state": {column: str(dtype) for column, dtype in kept.items()}}
    return _stateful(
        graph,
        (node,),
        "stateful_map_batches",
        kernel,
        kernel.output_schema,
        not weights,
        name,
        on_error,
        detail,
    )


def _stateful(
    graph: Graph,
    inputs: tuple[Node, ...],
    kind: str,
    kernel: StatefulKernel,
    schema: Schema,
    append_only: bool,
    name: str | None,
    on_error: OnError | None,
    detail: dict[str, Any],
) -> Node:
    return graph.add(
        "stateful",
        kind,
        inputs,
        schema,
        append_only,
        name=name,
        on_error=on_error,
        keys=inputs[0].keys,
        stateful=kernel,
        detail=detail,
    )


def _types(dtypes: list[Any]) -> str:
    return "[" + ", ".join(map(str, dtypes)) + "]"
