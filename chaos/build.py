"""A description as an Anabranch flow."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

import anabranch as ab
from chaos.feed import END
from chaos.flows import COLUMNS, Description

DECIMAL = pl.Decimal(38, 2)
SCHEMA: dict[str, Any] = {
    "a": pl.Int64(),
    "s": pl.String(),
    "n": pl.Int64(),
    "x": pl.Float64(),
    "d": DECIMAL,
}
_FILLERS = {
    "a": pl.lit(7, dtype=pl.Int64),
    "s": pl.lit("made", dtype=pl.String),
    "n": pl.lit(None, dtype=pl.Int64),
    "x": pl.lit(0.5, dtype=pl.Float64),
    "d": pl.lit(None, dtype=DECIMAL),
}
"""What stands in the columns that a function with state does not make."""


def build(description: Description, root: Path) -> ab.Flow:
    """The flow; `root` is where its inputs are."""
    flow = ab.Flow(description["name"], on_error="dead_letter")
    streams: list[ab.Stream] = []
    for node in description["nodes"]:
        if node["op"] == "input":
            name = node["input"]
            streams.append(_input(flow, name, description["inputs"][name], root / name))
        else:
            streams.append(_NODES[node["op"]](node, *(streams[place] for place in node["of"])))
    for name, place in description["outputs"].items():
        streams[place].output(name)
    return flow


def _input(flow: ab.Flow, name: str, one: dict[str, Any], path: Path) -> ab.Stream:
    weight = "w" if one["weights"] else None
    kind = one["kind"]
    if kind == "text":
        lines = flow.input(name, ab.files(path, format="text", schema={"value": str}))
        return lines.map(_parse, schema=SCHEMA)
    if kind == "generator":
        made = ab.generator(
            rows=one["rows"],
            rate=one["rate"],
            partitions=one["partitions"],
            seed=one["seed"],
            columns={"i": ab.index(), "a": ab.uniform_int(0, 24), "n": ab.uniform_int(-5, 30)},
        )
        return flow.input(name, made).map(_dress, schema=SCHEMA)
    if kind == "iterable":
        items = follow(path / "items", [*COLUMNS, "w"] if weight else list(COLUMNS))
        return flow.input(name, ab.iterable(items, schema=SCHEMA, batch=25, weight=weight))
    return flow.input(name, ab.files(path, format=kind, schema=SCHEMA, weight=weight))


def follow(path: Path, names: list[str]) -> Callable[[int], Iterator[tuple[Any, ...]]]:
    """The items of a file of JSON lines that grows, from a given one on, until its line `END`."""

    def items(recorded: int) -> Iterator[tuple[Any, ...]]:
        with open(path, encoding="utf-8") as file:
            seen, rest = 0, ""
            while True:
                rest += file.readline()
                if not rest.endswith("\n"):
                    time.sleep(0.02)
                    continue
                line, rest = rest[:-1], ""
                if line == END:
                    return
                seen += 1
                if seen > recorded:
                    value = json.loads(line)
                    value["d"] = None if value["d"] is None else Decimal(value["d"])
                    yield tuple(value[name] for name in names)

    return items


def _parse(line: str) -> tuple[Any, ...]:
    a, s, n, x, d = line.split("\t")
    return (
        int(a) if a else None,
        s[1:] if s else None,
        int(n) if n else None,
        float.fromhex(x) if x else None,
        Decimal(d) if d else None,
    )


def _dress(row: Any) -> tuple[Any, ...]:
    return (row.a, "pen" if row.i % 3 else "ink", row.n, row.n / 8, Decimal(row.i) / 100)


# Stateless operators.


def _predicate(node: dict[str, Any]) -> Any:
    column, modulus, rest = node["column"], node["mod"], node["rest"]
    if node["by"] == "expr":
        return pl.col(column) % modulus == rest

    def chosen(row: Any) -> bool:
        value = getattr(row, column)
        return value is not None and value % modulus == rest

    return chosen


def _filter(node: dict[str, Any], stream: ab.Stream) -> ab.Stream:
    return stream.filter(_predicate(node))


def _branch(node: dict[str, Any], stream: ab.Stream) -> ab.Stream:
    return stream.branch(_predicate(node))[0 if node["side"] else 1]


def _shift(row: Any) -> Any:
    return row._replace(n=None if row.n is None else row.n + 1)


def _rekey(row: Any) -> Any:
    return row._replace(a=(row.n or 0) % 7, s=(row.s or "none")[:1])


def _map(node: dict[str, Any], stream: ab.Stream) -> ab.Stream:
    return stream.map(_shift if node["kind"] == "shift" else _rekey)


def _copies(row: Any) -> list[Any]:
    return [row._replace(n=row.n + more) for more in range(row.n % 3)] if row.n is not None else []


def _flat_map(node: dict[str, Any], stream: ab.Stream) -> ab.Stream:
    return stream.flat_map(_copies)


def _with(node: dict[str, Any], stream: ab.Stream) -> ab.Stream:
    return stream.with_columns(n=pl.col("n") * 2 - pl.col("a") % 11, x=pl.col("x") * 2.0 + 1.0)


def _heavier(table: pa.Table) -> pa.Table:
    """Weights doubled: +1 becomes +2."""
    doubled = pc.multiply(table["__weight"], 2)
    return table.set_column(table.column_names.index("__weight"), "__weight", doubled)


def _batches(node: dict[str, Any], stream: ab.Stream) -> ab.Stream:
    return stream.map_batches(_heavier, weights=True)


def _union(node: dict[str, Any], left: ab.Stream, right: ab.Stream) -> ab.Stream:
    return left.union(right)


# Operators with state, each brought back to the common columns.


def _distinct(node: dict[str, Any], stream: ab.Stream) -> ab.Stream:
    if node["keys"] is None:
        return stream.distinct()
    return stream.key_by(*node["keys"]).distinct()


def _aggregate(node: dict[str, Any], stream: ab.Stream) -> ab.Stream:
    aggregates: dict[str, Any] = {
        f"r_{column}": ab.count() if kind == "count" else getattr(ab, kind)(of)
        for column, (kind, of) in node["slots"].items()
    }
    keyed = stream.key_by(_made_key, column="key") if node["made"] else stream.key_by(*node["keys"])
    result = keyed.aggregate(**aggregates)
    names = {column: f"r_{column}" for column in node["slots"]} | ({"s": "key"} if node["made"] else {})
    return result.select(*(pl.col(names.get(column, column)).alias(column) for column in COLUMNS))


def _made_key(row: Any) -> str:
    return f"key {(row.n or 0) % 5}"


def _join(node: dict[str, Any], left: ab.Stream, right: ab.Stream) -> ab.Stream:
    joined = left.key_by(*node["keys"]).join(right.key_by(*node["keys"]), how=node["how"])
    if node["how"] in ("semi", "anti"):
        return joined.select(*COLUMNS)
    take = {c: pl.col(c + "_right") if side == "right" else pl.col(c) for c, side in node["take"].items()}
    return joined.select(*(take.get(column, pl.col(column)).alias(column) for column in COLUMNS))


def _reduce(node: dict[str, Any], stream: ab.Stream) -> ab.Stream:
    keyed = stream.key_by(*node["keys"])
    result = keyed.reduce("n", _add if node["weights"] else _fold, weights=node["weights"])
    return _dressed(result, node, pl.col("reduce_n"))


def _fold(so_far: int, value: int | None) -> int:
    return so_far if value is None else (so_far * 31 + value) % 1_000_003


def _add(so_far: int | None, value: int | None, weight: int) -> int | None:
    return ((so_far or 0) + (value or 0) * weight) or None


def _stateful_map(node: dict[str, Any], stream: ab.Stream) -> ab.Stream:
    fn = _tally if node["weights"] else _gaps
    result = stream.key_by(*node["keys"]).stateful_map(fn, schema={"m": int}, weights=node["weights"])
    return _dressed(result, node, pl.col("m"))


def _gaps(state: dict[str, Any] | None, row: Any) -> tuple[dict[str, Any] | None, list[Any]]:
    """The distance to the value before; every fourth row of a key makes it forget."""
    value = row.n or 0
    seen = 1 if state is None else state["seen"] + 1
    gaps = [] if state is None else [value - state["last"]]
    return (None if seen == 4 else {"seen": seen, "last": value}), gaps


def _tally(total: int | None, row: Any, weight: int) -> tuple[int | None, list[tuple[Any, int]]]:
    before, after = total or 0, (total or 0) + weight
    changes = ([(before, -1)] if before else []) + ([(after, 1)] if after else [])
    return after or None, changes


def _stateful_batches(node: dict[str, Any], stream: ab.Stream) -> ab.Stream:
    keys, weights = list(node["keys"]), node["weights"]

    def totals(rows: pa.Table, state: pa.Table) -> tuple[pa.Table, pa.Table]:
        old = {tuple(row[key] for key in keys): row["m"] for row in state.to_pylist()}
        new = dict(old)
        for row in rows.to_pylist():
            key = tuple(row[column] for column in keys)
            new[key] = new.get(key, 0) + (row["n"] or 0) * row.get("__weight", 1)
        kept = [dict(zip(keys, key, strict=True), m=total) for key, total in new.items() if total]
        out = [
            dict(zip(keys, key, strict=True), m=total, __weight=1)
            for key, total in new.items()
            if total or not weights
        ]
        if weights:
            out += [dict(zip(keys, key, strict=True), m=total, __weight=-1) for key, total in old.items()]
        fields = [rows.schema.field(key) for key in keys] + [pa.field("m", pa.int64())]
        marked = [*fields, pa.field("__weight", pa.int64())] if weights else fields
        return pa.Table.from_pylist(out, schema=pa.schema(marked)), pa.Table.from_pylist(
            kept, schema=pa.schema(fields)
        )

    result = stream.key_by(*keys).stateful_map_batches(
        totals, schema={"m": int}, state={"m": int}, weights=weights
    )
    return _dressed(result, node, pl.col("m"))


def _dressed(stream: ab.Stream, node: dict[str, Any], made: pl.Expr) -> ab.Stream:
    columns = {**_FILLERS, **{key: pl.col(key) for key in node["keys"]}, "n": made}
    return stream.select(*(columns[column].alias(column) for column in COLUMNS))


_NODES: dict[str, Callable[..., ab.Stream]] = {
    "filter": _filter,
    "branch": _branch,
    "map": _map,
    "flat_map": _flat_map,
    "with": _with,
    "batches": _batches,
    "union": _union,
    "distinct": _distinct,
    "aggregate": _aggregate,
    "join": _join,
    "reduce": _reduce,
    "stateful_map": _stateful_map,
    "stateful_batches": _stateful_batches,
}
