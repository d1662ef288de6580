"""Every mistake in a flow is told when it is built, with the operator's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl
import pytest

import anabranch as ab
from anabranch.errors import FlowError
from anabranch.flow.plan import make_plan

Schema = dict[str, Any]
COLUMNS: Schema = {"id": int, "name": str, "price": float, "tags": pl.List(pl.Int64())}


def source(schema: Schema | None = None, weight: str | None = None) -> Any:
    return ab.iterable([], schema=COLUMNS if schema is None else schema, weight=weight)


def stream(schema: Schema | None = None) -> ab.Stream:
    return ab.Flow("f").input("rows", source(schema))


def deleting() -> ab.Stream:
    return ab.Flow("f").input("rows", source({"id": int, "price": float, "w": int}, weight="w"))


def passing(value: Any) -> Any:
    return value


Build = Callable[[], object]

MISUSES: dict[str, tuple[Build, str]] = {
    # Names.
    "flow name": (lambda: ab.Flow("no spaces"), r"flow 'no spaces'"),
    "flow name type": (lambda: ab.Flow(3), r"flow 3"),  # type: ignore[arg-type]
    "input name": (lambda: ab.Flow("f").input("1st", source()), r"input '1st'"),
    "operator name": (lambda: stream().map(passing, name="a.b"), r"map 'a.b'"),
    "operator named twice": (
        lambda: stream().map(passing, name="again").map(passing, name="again"),
        r"map 'again'.*already has an operator",
    ),
    "named like an input": (lambda: stream().filter(passing, name="rows"), r"filter 'rows'.*already has"),
    "output name": (lambda: stream().output("x/y"), r"output 'x/y'"),
    "output dead_letters": (lambda: stream().output("dead_letters"), r"output 'dead_letters'.*already has"),
    # Sources and sinks.
    "no source": (lambda: ab.Flow("f").input("rows", [1, 2]), r"input 'rows'.*source.*list"),  # type: ignore[arg-type]
    "no sink": (lambda: stream().output("out", "path"), r"output 'out'.*sink.*str"),  # type: ignore[arg-type]
    # Errors.
    "on_error of a flow": (lambda: ab.Flow("f", on_error="ignore"), r"flow 'f'.*on_error='ignore'"),  # type: ignore[arg-type]
    "on_error None of a flow": (lambda: ab.Flow("f", on_error=None), r"flow 'f'.*on_error=None"),  # type: ignore[arg-type]
    "on_error of an operator": (
        lambda: stream().map(passing, name="m", on_error="skip"),  # type: ignore[arg-type]
        r"operator 'm'.*on_error='skip'",
    ),
    # Functions and schemas.
    "map without a function": (lambda: stream().map(7, name="m"), r"operator 'm'.*function.*int"),  # type: ignore[arg-type]
    "filter without a function": (lambda: stream().filter("id > 1", name="m"), r"operator 'm'.*function"),  # type: ignore[arg-type]
    "flat_map with a schema of nonsense": (
        lambda: stream().flat_map(passing, schema={"x": object}, name="m"),
        r"operator 'm'.*'x'.*unsupported type",
    ),
    "map with a hidden column": (
        lambda: stream().map(passing, schema={"__x": int}),
        r"operator 'map'.*'__x'",
    ),
    "map_batches with an empty schema": (
        lambda: stream().map_batches(passing, schema={}),
        r"operator 'map_batches'.*at least one column",
    ),
    # Expressions.
    "unknown column in select": (lambda: stream().select("nope", name="s"), r"operator 's'.*nope"),
    "unknown column in filter": (
        lambda: stream().filter(pl.col("nope") > 1, name="s"),
        r"operator 's'.*nope",
    ),
    "no expression": (lambda: stream().select(3, name="s"), r"operator 's'.*expression.*got 3"),
    "nothing selected": (lambda: stream().select(name="s"), r"operator 's'.*at least one"),
    "column selected twice": (
        lambda: stream().select("id", pl.col("name").alias("id")),
        r"operator 'select'.*id",
    ),
    "sum in with_columns": (
        lambda: stream().with_columns(total=pl.col("id").sum(), name="s"),
        r"operator 's'.*row by row",
    ),
    "shift in select": (
        lambda: stream().select(pl.col("id").shift(1), name="s"),
        r"operator 's'.*row by row",
    ),
    "predicate that is a number": (
        lambda: stream().filter(pl.col("id") + 1, name="s"),
        r"operator 's'.*boolean",
    ),
    "types that do not fit": (
        lambda: stream().with_columns(x=pl.col("id") + pl.col("tags").list.join("")),
        r"operator 'with_columns'",
    ),
    # Union.
    "union of other columns": (
        lambda: (rows := stream()).union(rows.select("id"), name="u"),
        r"operator 'u'.*same columns.*price.*'select_1'",
    ),
    "union of other types": (
        lambda: (rows := stream({"a": int})).union(rows.select(pl.col("a").cast(pl.Int32))),
        r"operator 'union'.*Int64.*Int32",
    ),
    "union with another flow": (
        lambda: stream().union(stream(), name="u"),
        r"operator 'u'.*another flow, 'f'",
    ),
    "union with no stream": (lambda: stream().union(source(), name="u"), r"operator 'u'.*expected a stream"),
    # Keys.
    "unknown key": (lambda: stream().key_by("nope", name="k"), r"operator 'k'.*no column 'nope'.*id: Int64"),
    "float key": (lambda: stream().key_by("price", name="k"), r"operator 'k'.*'price' of type Float64"),
    "list key": (lambda: stream().key_by("id", "tags"), r"operator 'key_by'.*'tags' of type List"),
    "no key": (lambda: stream().key_by(name="k"), r"operator 'k'.*at least one column"),
    "key twice": (lambda: stream().key_by("id", "id", name="k"), r"operator 'k'.*twice"),
    "key function of unknown type": (
        lambda: stream().key_by(passing, type=object, name="k"),
        r"operator 'k'.*type",
    ),
    "key function of float": (
        lambda: stream().key_by(passing, type=float, name="k"),
        r"operator 'k'.*Float64 cannot be a key",
    ),
    "key function over a column": (
        lambda: stream().key_by(passing, column="id", name="k"),
        r"operator 'k'.*'id' exists already",
    ),
    "key function into a hidden column": (
        lambda: stream().key_by(passing, column="__k", name="k"),
        r"operator 'k'.*'__k'",
    ),
    "distinct without a key": (
        lambda: stream({"x": float}).distinct(name="d"),
        r"operator 'd'.*no column of.*Float64",
    ),
    # Aggregates.
    "sum of an unknown column": (lambda: stream().key_by("id").sum("nope", name="a"), r"operator a.*'nope'"),
    "sum of text": (lambda: stream().key_by("id").sum("name", name="a"), r"operator a.*must be a number"),
    "max of a list": (lambda: stream().key_by("id").max("tags", name="a"), r"operator a.*no order"),
    "no aggregates": (lambda: stream().key_by("id").aggregate(name="a"), r"operator 'a'.*at least one"),
    "no aggregate": (lambda: stream().key_by("id").aggregate(name="a", n=3), r"operator a.*'n'.*not 3"),  # type: ignore[arg-type]
    "aggregate named like the key": (
        lambda: stream().key_by("id").aggregate(name="a", id=ab.count()),
        r"operator 'a'.*'id' is taken",
    ),
    "hidden aggregate": (
        lambda: stream().key_by("id").aggregate(name="a", __n=ab.count()),
        r"operator 'a'.*'__n' is taken",
    ),
    "reduce of an unknown column": (
        lambda: stream().key_by("id").reduce("no", max, name="r"),
        r"operator 'r'.*'no'",
    ),
    "reduce without a function": (
        lambda: stream().key_by("id").reduce("price", "max", name="r"),  # type: ignore[arg-type]
        r"operator 'r'.*function",
    ),
    "reduce over its key's name": (
        lambda: stream({"reduce_x": int, "x": int}).key_by("reduce_x").reduce("x", max, name="r"),
        r"operator 'r'.*'reduce_x' is taken",
    ),
    # Joins.
    "join with an unkeyed stream": (
        lambda: (rows := stream()).key_by("id").join(rows, name="j"),  # type: ignore[arg-type]
        r"operator 'j'.*key the other",
    ),
    "join with no stream": (
        lambda: stream().key_by("id").join(7, name="j"),
        r"operator 'j'.*expected a stream",
    ),  # type: ignore[arg-type]
    "join with another flow": (
        lambda: stream().key_by("id").join(stream().key_by("id"), name="j"),
        r"operator 'j'.*another flow",
    ),
    "join of differently typed keys": (
        lambda: (rows := stream()).key_by("id").join(rows.key_by("name"), name="j"),
        r"operator 'j'.*differ in type.*Int64.*String",
    ),
    "join of keys of different number": (
        lambda: (rows := stream()).key_by("id").join(rows.key_by("id", "name"), name="j"),
        r"operator 'j'.*differ in type",
    ),
    "join how": (
        lambda: (rows := stream().key_by("id")).join(rows, how="outer", name="j"),  # type: ignore[arg-type]
        r"operator 'j'.*how='outer'.*full",
    ),
    "join with a suffix that does not help": (
        lambda: (rows := stream().key_by("id")).join(rows, suffix="", name="j"),
        r"operator 'j'.*suffix ''",
    ),
    # Functions with state.
    "stateful_map without a schema": (
        lambda: stream().key_by("id").stateful_map(passing, None, name="s"),
        r"operator 's'.*name the columns",
    ),
    "stateful_map that gives the key": (
        lambda: stream().key_by("id").stateful_map(passing, {"id": int}, name="s"),
        r"operator 's'.*'id' is there anyway",
    ),
    "stateful_map without a function": (
        lambda: stream().key_by("id").stateful_map(None, {"x": int}, name="s"),  # type: ignore[arg-type]
        r"operator 's'.*function",
    ),
    "stateful_map_batches with the key in its state": (
        lambda: stream().key_by("id").stateful_map_batches(passing, {"x": int}, {"id": int}, name="s"),
        r"operator 's'.*'id' is there anyway",
    ),
    # Deletions.
    "deletions into map_batches": (
        lambda: deleting().map_batches(passing, name="u"),
        r"operator 'u'.*'rows'.*weights=True",
    ),
    "deletions into reduce": (
        lambda: deleting().key_by("id").reduce("price", max, name="u"),
        r"operator 'u'.*deletions.*weights=True",
    ),
    "deletions into stateful_map": (
        lambda: stream().key_by("id").count(name="counts").stateful_map(passing, {"x": int}, name="u"),
        r"operator 'u'.*through 'counts'",
    ),
    "deletions into stateful_map_batches": (
        lambda: stream().key_by("id").count().stateful_map_batches(passing, {"x": int}, {"y": int}, name="u"),
        r"operator 'u'.*deletions",
    ),
    "deletions of an outer join": (
        lambda: (rows := stream().key_by("id")).join(rows, how="left", name="j").map_batches(passing),
        r"operator 'map_batches'.*through 'j'",
    ),
    # The whole.
    "no input": (lambda: make_plan(ab.Flow("f")), r"flow 'f' has no input"),
    "no output": (lambda: make_plan(stream().flow), r"flow 'f' has no output"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_is_told_by_name(misuse: str) -> None:
    build, message = MISUSES[misuse]
    with pytest.raises(FlowError, match=message):
        build()


def test_two_outputs_in_one_directory(tmp_path: Any) -> None:
    rows = stream()
    rows.output("first", ab.parquet(tmp_path / "out"))
    rows.output("second", ab.parquet(tmp_path / "other"))
    with pytest.raises(FlowError, match=r"output 'third'.*'first'.*out already"):
        rows.output("third", ab.jsonl(tmp_path / "x" / ".." / "out"))


def test_two_outputs_of_one_name() -> None:
    rows = stream()
    rows.output("out")
    with pytest.raises(FlowError, match=r"output 'out'.*already has an output"):
        rows.output("out")


def test_an_output_may_be_called_like_an_operator() -> None:
    stream().key_by("id").count(name="counts").output("counts")


def test_deletions_are_allowed_where_the_function_is_given_the_weight() -> None:
    keyed = deleting().key_by("id")
    keyed.reduce("price", max, weights=True)
    keyed.stateful_map(passing, {"x": int}, weights=True)
    keyed.stateful_map_batches(passing, {"x": int}, {"y": int}, weights=True)
    deleting().map_batches(passing, weights=True)


def test_what_can_delete_is_known() -> None:
    rows = stream().key_by("id")
    assert rows.distinct().node.append_only
    assert rows.join(rows).node.append_only
    assert not rows.join(rows, how="anti").node.append_only
    assert not rows.max("price").node.append_only
    assert rows.stateful_map(passing, {"x": int}).node.append_only
    assert not rows.stateful_map(passing, {"x": int}, weights=True).node.append_only
    assert not rows.union(rows.select("id", "name", "price", "tags"), deleting_like(rows)).node.append_only


def deleting_like(rows: ab.Stream) -> ab.Stream:
    return rows.map_batches(passing, weights=True)


def test_a_keyed_stream_stays_keyed_while_its_key_passes() -> None:
    rows = stream().key_by("id")
    assert isinstance(rows.filter(pl.col("id") > 1), ab.KeyedStream)
    assert isinstance(rows.select("id", "price"), ab.KeyedStream)
    assert isinstance(rows.with_columns(x=1), ab.KeyedStream)
    for unkeyed in (
        rows.select("price"),
        rows.with_columns(id=pl.col("id") + 1),
        rows.select(id=pl.col("id") * 1),
        rows.map(passing),
        rows.union(rows),
    ):
        assert not isinstance(unkeyed, ab.KeyedStream)
        assert unkeyed.node.keys == ()


def test_a_stream_shows_itself() -> None:
    assert repr(stream({"a": int}).key_by("a")) == "<KeyedStream key_by_1 [a: Int64]>"
