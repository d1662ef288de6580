"""What can be computed of a group, and of which columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import polars as pl

from anabranch.errors import FlowError
from anabranch.operators.kernel import Schema

Kind = Literal["count", "sum", "min", "max", "mean"]


@dataclass(frozen=True, slots=True)
class Aggregate:
    """What to compute of a group; made by `count`, `sum`, `min`, `max` and `mean`."""

    kind: Kind
    column: str | None = None


def count() -> Aggregate:
    """The number of rows, by weight."""
    return Aggregate("count")


def sum(column: str) -> Aggregate:  # noqa: A001
    """The exact sum of a column: Int64 for integers, Decimal(38, scale) for decimals, Float64 for floats."""
    return Aggregate("sum", column)


def min(column: str) -> Aggregate:  # noqa: A001
    """The smallest value of a column that has a positive weight; NaN is larger than any number."""
    return Aggregate("min", column)


def max(column: str) -> Aggregate:  # noqa: A001
    """The largest value of a column that has a positive weight; NaN is larger than any number."""
    return Aggregate("max", column)


def mean(column: str) -> Aggregate:
    """The sum of a column over the weight of its values, as Float64."""
    return Aggregate("mean", column)


def check(aggregates: Mapping[str, Aggregate], schema: Schema, operator_name: str) -> dict[str, pl.DataType]:
    """The type of every result.

    Raises:
        FlowError: a column that is not there or of a type that cannot be aggregated so.
    """
    if not aggregates:
        raise FlowError(
            f"operator {operator_name}: nothing to aggregate; give at least one, as in total=ab.sum(…)"
        )
    return {name: _result_type(name, one, schema, operator_name) for name, one in aggregates.items()}


def _result_type(name: str, aggregate: Aggregate, schema: Schema, operator_name: str) -> pl.DataType:
    if not isinstance(aggregate, Aggregate):
        raise FlowError(
            f"operator {operator_name}: {name!r} must be one of ab.count(), ab.sum(), ab.min(), ab.max() and "
            f"ab.mean(), not {aggregate!r}"
        )
    if aggregate.kind == "count":
        return pl.Int64()
    dtype = schema.get(aggregate.column or "")
    if dtype is None:
        raise FlowError(
            f"operator {operator_name}: {aggregate.kind} of column {aggregate.column!r}, which is not there; "
            f"the columns are {', '.join(map(repr, schema))}"
        )
    if aggregate.kind in ("min", "max"):
        if dtype.is_nested():
            raise FlowError(
                f"operator {operator_name}: {aggregate.kind} of column {aggregate.column!r}: "
                f"values of type {dtype} have no order"
            )
        return dtype
    if not dtype.is_numeric():
        raise FlowError(
            f"operator {operator_name}: {aggregate.kind} of column {aggregate.column!r}: "
            f"it must be a number, and is {dtype}"
        )
    if aggregate.kind == "mean" or dtype.is_float():
        return pl.Float64()
    return pl.Decimal(38, dtype.scale) if isinstance(dtype, pl.Decimal) else pl.Int64()
