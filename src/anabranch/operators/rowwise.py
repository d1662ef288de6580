"""Whether Polars expressions work row by row.

A batch is an accident: where it is cut depends on the number of workers.  An expression that looks at
other rows (`sum`, `sort`, `shift`, `over`) would give other results at another scale, so the flow refuses
it when it is built.

Two tests, for neither is enough.  The expression's tree: Polars knows of each node, though not of what is
below it, whether it can be run in pieces.  And a sample: five rows at once, reversed, and one by one must
give the same; that also covers what Polars cannot tell without columns (`pl.all()`, Python functions in
expressions).
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from anabranch.errors import FlowError
from anabranch.model.types import to_schema
from anabranch.operators.kernel import Schema

_ADVICE = "expressions must work row by row; key the stream and use a stateful operator instead"


def check_rowwise(
    exprs: Sequence[pl.Expr], schema: Schema, operator_name: str, *, keep: bool = False
) -> dict[str, pl.DataType]:
    """The columns that the expressions make of a stream with this schema.

    Args:
        exprs: what is selected, or, with `keep`, added to the columns.
        schema: the stream's columns.
        operator_name: for messages.
        keep: whether the stream's columns remain, as `with_columns` means it.

    Raises:
        FlowError: an expression fits neither columns nor types, looks at other rows than its own,
            or makes a column that a stream cannot have.
    """
    try:
        made = pl.DataFrame(schema=dict(schema)).select(exprs).schema
    except (pl.exceptions.PolarsError, TypeError, ValueError) as error:
        shown = ", ".join(f"{name}: {dtype}" for name, dtype in schema.items())
        raise FlowError(f"operator {operator_name!r}: {error}; the stream has ({shown})") from None
    for expr in exprs:
        _check_tree(expr, schema, operator_name)
    _check_sample(exprs, schema, operator_name)
    columns = {**schema, **made} if keep else dict(made)
    try:
        return to_schema(columns)
    except FlowError as error:
        raise FlowError(f"operator {operator_name!r}: {error}") from None


def check_predicate(expr: pl.Expr, schema: Schema, operator_name: str) -> None:
    """Refuse what is not one boolean for each row.

    Raises:
        FlowError: as `check_rowwise`, or the expression makes something else than booleans.
    """
    made = check_rowwise([expr], schema, operator_name)
    if list(made.values()) != [pl.Boolean()]:
        found = ", ".join(str(dtype) for dtype in made.values())
        raise FlowError(
            f"operator {operator_name!r}: a predicate must make one column of booleans; found {found}"
        )


def passes_through(exprs: Sequence[pl.Expr], column: str, *, keep: bool = False) -> bool:
    """Whether a column of the result is the column of the same name, unchanged.

    Never wrongly true; wrongly false for some ways to write a copy.
    """
    touched = [expr for expr in exprs if _may_make(expr, column)]
    return (keep or bool(touched)) and all(_is_copy(expr, column) for expr in touched)


def _may_make(expr: pl.Expr, column: str) -> bool:
    name = expr.meta.output_name(raise_if_undetermined=False)
    return name is None or name == column or expr.meta.has_multiple_outputs()


def _is_copy(expr: pl.Expr, column: str) -> bool:
    if expr.meta.is_column_selection(allow_aliasing=False):
        return True
    return not expr.meta.has_multiple_outputs() and expr.meta.undo_aliases().meta.eq(pl.col(column))


def _check_tree(expr: pl.Expr, schema: Schema, operator_name: str) -> None:
    nodes = [expr]
    while nodes:
        node = nodes.pop()
        if node.meta.is_literal():
            continue
        try:
            fine = node.meta.is_row_separable() and (
                node.meta.is_length_preserving() or node.meta.is_scalar()
            )
        except pl.exceptions.PolarsError:
            fine = True  # Needs the columns to tell: left to the sample.
        if not fine:
            raise FlowError(f"operator {operator_name!r}: {node} does not work row by row; {_ADVICE}")
        try:
            nodes += node.meta.pop(schema=dict(schema))
        except pl.exceptions.PolarsError:
            continue


def _check_sample(exprs: Sequence[pl.Expr], schema: Schema, operator_name: str) -> None:
    sample = pl.DataFrame([_sample(name, dtype) for name, dtype in schema.items()])
    try:
        whole = _spread(sample, exprs)
        back = _spread(sample.reverse(), exprs).reverse()
        single = pl.concat([_spread(sample[i : i + 1], exprs) for i in range(sample.height)])
    except pl.exceptions.ShapeError as error:
        raise FlowError(f"operator {operator_name!r}: {error}; {_ADVICE}") from None
    except Exception:  # noqa: BLE001
        return  # A strict cast or a user's function may not like the sample's values.
    if not (whole.equals(single) and whole.equals(back)):
        shown = ", ".join(str(expr) for expr in exprs)
        raise FlowError(
            f"operator {operator_name!r}: the result of {shown} for a row depends on other rows; {_ADVICE}"
        )


def _spread(frame: pl.DataFrame, exprs: Sequence[pl.Expr]) -> pl.DataFrame:
    out = frame.select(exprs)
    if out.height == 1:
        return pl.concat([out] * frame.height)
    if out.height != frame.height:
        raise pl.exceptions.ShapeError(f"{frame.height} rows became {out.height}")
    return out


def _sample(name: str, dtype: pl.DataType) -> pl.Series:
    if isinstance(dtype, pl.String):
        return pl.Series(name, ["b c", "a", "a", None, "12"])
    if isinstance(dtype, pl.Binary):
        return pl.Series(name, [b"b", b"a", b"a", None, b"12"])
    if dtype.is_nested():
        return pl.Series(name, [None] * 5, dtype=dtype)
    return pl.Series(name, [7, 0, 0, None, 9]).cast(dtype)
