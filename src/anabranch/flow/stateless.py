"""Nodes of operators without state: from a node and a user's arguments, checked, to the next node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import polars as pl

from anabranch.errors import FlowError
from anabranch.flow.checks import (
    check_deletions,
    check_function,
    check_keys,
    out_dtype,
    out_schema,
    show,
)
from anabranch.flow.graph import Graph
from anabranch.flow.node import Node
from anabranch.model.types import check_name as check_column_name
from anabranch.operators import rowwise
from anabranch.operators import stateless as ops
from anabranch.operators.kernel import OnError, StatelessKernel

Function = Callable[[Any], Any]


def rows(
    graph: Graph,
    node: Node,
    kind: str,
    kernel: Callable[..., StatelessKernel],
    fn: Function,
    schema: Any,
    name: str | None,
    on_error: OnError | None,
) -> Node:
    """`map` and `flat_map`: any columns may change, so the result is keyed no more."""
    label = name or kind
    check_function(label, fn)
    out = out_schema(label, schema, node.schema)
    return graph.add(
        "stateless",
        kind,
        (node,),
        out,
        node.append_only,
        name=name,
        on_error=on_error,
        stateless=kernel(fn, node.schema, out),
    )


def filtered(
    graph: Graph, node: Node, predicate: pl.Expr | Function, name: str | None, on_error: OnError | None
) -> Node:
    label = name or "filter"
    kernel: StatelessKernel
    if isinstance(predicate, pl.Expr):
        rowwise.check_predicate(predicate, node.schema, label)
        kernel = ops.FilterExpr(predicate)
        detail = {"expr": str(predicate)}
    else:
        check_function(label, predicate)
        kernel = ops.FilterRows(predicate, node.schema)
        detail = {}
    return graph.add(
        "stateless",
        "filter",
        (node,),
        node.schema,
        node.append_only,
        name=name,
        on_error=on_error,
        keys=node.keys,
        stateless=kernel,
        detail=detail,
    )


def expressions(
    graph: Graph, node: Node, kind: str, exprs: Sequence[Any], named: Mapping[str, Any], name: str | None
) -> Node:
    """`select` and `with_columns`; the result stays keyed while the key's columns pass unchanged."""
    label = name or kind
    keep = kind == "with_columns"
    parsed = [_expression(label, expr) for expr in exprs]
    parsed += [
        (_expression(label, expr) if isinstance(expr, str | pl.Expr) else pl.lit(expr)).alias(column)
        for column, expr in named.items()
    ]
    if not parsed:
        raise FlowError(f"operator {label!r}: give at least one Polars expression or column's name")
    schema = rowwise.check_rowwise(parsed, node.schema, label, keep=keep)
    passed = all(key in schema and rowwise.passes_through(parsed, key, keep=keep) for key in node.keys)
    return graph.add(
        "stateless",
        kind,
        (node,),
        schema,
        node.append_only,
        name=name,
        keys=node.keys if passed else (),
        stateless=ops.WithColumns(parsed) if keep else ops.SelectExprs(parsed),
        detail={"exprs": [str(expr) for expr in parsed]},
    )


def batches(
    graph: Graph,
    node: Node,
    fn: Function,
    schema: Any,
    weights: bool,
    name: str | None,
    on_error: OnError | None,
) -> Node:
    label = name or "map_batches"
    check_function(label, fn)
    check_deletions(label, node, weights)
    out = out_schema(label, schema, node.schema)
    return graph.add(
        "stateless",
        "map_batches",
        (node,),
        out,
        node.append_only and not weights,
        name=name,
        on_error=on_error,
        stateless=ops.MapBatches(fn, node.schema, out, weights),
        detail={"weights": weights},
    )


def union(graph: Graph, nodes: tuple[Node, ...], name: str | None) -> Node:
    first = nodes[0]
    for other in nodes[1:]:
        if other.schema != first.schema:
            raise FlowError(
                f"operator {name or 'union'!r}: all streams must have the same columns; {first.id!r} has "
                f"{show(first.schema)}, {other.id!r} has {show(other.schema)}"
            )
    return graph.add(
        "union", "union", nodes, first.schema, all(node.append_only for node in nodes), name=name
    )


def keyed(
    graph: Graph, node: Node, keys: tuple[str, ...], name: str | None, on_error: OnError | None
) -> Node:
    """The distributor.  Behind another one it takes that one's place: rows travel once."""
    check_keys(name or "key_by", node.schema, keys)
    origin = undistributed(node)
    return graph.add(
        "key_by",
        "key_by",
        (origin,),
        node.schema,
        node.append_only,
        name=name,
        on_error=on_error,
        keys=keys,
        detail={"keys": list(keys)},
    )


def with_key(
    graph: Graph,
    node: Node,
    fn: Function,
    spec: Any,
    column: str,
    name: str | None,
    on_error: OnError | None,
) -> Node:
    """The column that a function makes of each row, to key by."""
    label = name or "key_by"
    dtype = out_dtype(label, str if spec is None else spec)
    try:
        check_column_name(column)
    except FlowError as error:
        raise FlowError(f"operator {label!r}: {error}") from None
    if column in node.schema:
        raise FlowError(
            f"operator {label!r}: the key's column {column!r} exists already; choose another with column=…"
        )
    schema = {**node.schema, column: dtype}
    check_keys(label, schema, (column,))
    origin = undistributed(node)
    return graph.add(
        "stateless",
        "key_function",
        (origin,),
        schema,
        node.append_only,
        name=None if name is None else f"{name}-key",
        on_error=on_error,
        stateless=ops.AddKey(fn, node.schema, column, dtype),
        detail={"column": column},
    )


def undistributed(node: Node) -> Node:
    """The node whose rows a distributor distributes, for those who do not care where the rows are."""
    return node.inputs[0] if node.role == "key_by" else node


def _expression(label: str, expr: Any) -> pl.Expr:
    if isinstance(expr, str):
        return pl.col(expr)
    if not isinstance(expr, pl.Expr):
        raise FlowError(f"operator {label!r}: expected a Polars expression or a column's name, got {expr!r}")
    return expr
