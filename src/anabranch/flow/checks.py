"""What every call of the flow API checks, and how it says what is wrong.

A message names the operator by the name that the user gave it, or by what was called.
"""

from __future__ import annotations

import re
from typing import Any

import polars as pl

from anabranch.errors import FlowError
from anabranch.flow.node import Node
from anabranch.model.hashing import is_key_type
from anabranch.model.types import to_dtype, to_schema
from anabranch.operators.kernel import Schema

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,99}")


def check_name(what: str, name: object) -> None:
    """Refuse what cannot name a flow, an operator or an output: names become files and tables."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise FlowError(
            f"{what} {name!r}: a name begins with a letter and has letters, digits, '_' and '-', at most 100"
        )


def check_on_error(label: str, on_error: object) -> None:
    if on_error not in ("stop", "dead_letter"):
        raise FlowError(f"{label}: on_error={on_error!r}; choose 'stop' or 'dead_letter'")


def check_function(label: str, fn: object) -> None:
    if not callable(fn):
        raise FlowError(f"operator {label!r}: expected a function, got {type(fn).__name__}")


def check_column(label: str, schema: Schema, column: object) -> None:
    if column not in schema:
        raise FlowError(f"operator {label!r}: no column {column!r}; the stream has {show(schema)}")


def check_keys(label: str, schema: Schema, keys: tuple[str, ...]) -> None:
    """Refuse keys that are not there, there twice, or of a type that has no stable hash."""
    if not keys:
        raise FlowError(f"operator {label!r}: name at least one column, or give a function")
    for key in keys:
        check_column(label, schema, key)
        if not is_key_type(schema[key]):
            raise FlowError(
                f"operator {label!r}: column {key!r} of type {schema[key]} cannot be a key; keys are integers, "
                "strings, bytes, booleans, dates, timestamps and decimals"
            )
    if len(set(keys)) != len(keys):
        raise FlowError(f"operator {label!r}: column named twice in {list(keys)}")


def check_deletions(label: str, node: Node, weights: bool) -> None:
    """Refuse a function that knows nothing of weights where deletions could reach it."""
    if not weights and not node.append_only:
        raise FlowError(
            f"operator {label!r}: deletions can reach it (through {node.id!r}) and its function is not given "
            "the weight; pass weights=True and treat the weight in the function"
        )


def out_schema(label: str, spec: Any, default: Schema | None) -> dict[str, pl.DataType]:
    """The schema that a user wrote down, or the default where there is one."""
    if spec is None and default is not None:
        return dict(default)
    if spec is None:
        raise FlowError(f"operator {label!r}: name the columns that the function gives, beside the key's")
    try:
        return to_schema(spec)
    except FlowError as error:
        raise FlowError(f"operator {label!r}: {error}") from None


def keyed_out_schema(label: str, spec: Any, keys: tuple[str, ...]) -> dict[str, pl.DataType]:
    """The columns that a stateful function gives beside its key's."""
    schema = out_schema(label, spec, None)
    for key in keys:
        if key in schema:
            raise FlowError(f"operator {label!r}: the key's column {key!r} is there anyway; leave it out")
    return schema


def out_dtype(label: str, spec: Any) -> pl.DataType:
    try:
        return to_dtype(spec)
    except FlowError as error:
        raise FlowError(f"operator {label!r}: {error}") from None


def show(schema: Schema) -> str:
    return "[" + ", ".join(f"{name}: {dtype}" for name, dtype in schema.items()) + "]"
