"""Random flows as plain JSON values, from which both the flow and its oracle are built.

    {"name": …, "inputs": {NAME: {"kind": …, "weights": bool, …}},
     "nodes": [{"op": …, "of": [place of a node before it, …], …}], "outputs": {NAME: place of a node}}

Every stream has the same columns, so that any operator can follow any other: `a` Int64, `s` String, `n` Int64,
`x` Float64, `d` Decimal(38, 2), all nullable.  An operator with a result of its own is followed by a `select`
that brings it back to these columns.

A function that is not given weights may only stand where no deletion can come, and one that depends on the order of
rows only where that order is documented: behind one input, through stateless operators.  `append` and `ordered` of a
`Drawn` node keep account of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

Description = dict[str, Any]

COLUMNS = ("a", "s", "n", "x", "d")
KINDS = ("jsonl", "parquet", "text", "iterable", "generator")
HOWS = ("inner", "left", "full", "semi", "anti")
SLOTS: dict[str, list[tuple[str, str | None]]] = {
    "a": [("count", None), ("min", "a"), ("max", "n"), ("sum", "n")],
    "s": [("min", "s"), ("max", "s")],
    "n": [("count", None), ("sum", "n"), ("min", "n"), ("max", "n"), ("sum", "a")],
    "x": [("sum", "x"), ("mean", "x"), ("min", "x"), ("max", "x"), ("mean", "n")],
    "d": [("sum", "d"), ("min", "d"), ("max", "d")],
}
"""What may fill a column behind an aggregate: (kind, of column)."""

_KEYS: tuple[tuple[str, ...], ...] = (("a",), ("s",), ("a", "s"))
_GROUPS = {("a",): 25, ("s",): 6, ("a", "s"): 120}
_MOST = 20_000
"""Rows that a join may be expected to give: the oracle is plain Python."""


@dataclass(frozen=True)
class Drawn:
    """A node, and what is known of its stream."""

    node: dict[str, Any]
    append: bool
    ordered: bool
    size: float
    depth: int


def random_flow(rng: Random, rows: int = 600) -> Description:
    """Draw a flow whose inputs will have about `rows` rows each."""
    inputs = _inputs(rng, rows)
    nodes = [
        Drawn({"op": "input", "input": name, "of": []}, not one["weights"], True, rows, 0)
        for name, one in inputs.items()
    ]
    wanted = len(nodes) + rng.randint(4, 9)
    while len(nodes) < wanted:
        drawn = _draw(rng, nodes)
        if drawn is not None:
            nodes.append(drawn)
    used = {place for one in nodes for place in one.node["of"]}
    ends = [place for place in range(len(nodes)) if place not in used]
    # Some streams in the middle are outputs, too: of one stream, or of a stream that others are made from.
    ends += rng.sample(sorted(used), min(len(used), rng.randint(0, 2)))
    return {
        "name": "chaos",
        "inputs": inputs,
        "nodes": [one.node for one in nodes],
        "outputs": {f"out{number}": place for number, place in enumerate(ends)},
    }


def _inputs(rng: Random, rows: int) -> dict[str, dict[str, Any]]:
    kinds = rng.sample(KINDS, 2) + ([rng.choice(KINDS)] if rng.random() < 0.3 else [])
    if not {"jsonl", "parquet", "iterable"} & set(kinds):
        kinds[0] = rng.choice(("jsonl", "parquet", "iterable"))
    inputs = {}
    for number, kind in enumerate(kinds):
        weights = kind in ("jsonl", "parquet", "iterable") and rng.random() < 0.6
        one: dict[str, Any] = {"kind": kind, "weights": weights}
        if kind == "generator":
            one |= {"seed": rng.randrange(1000), "partitions": rng.randint(1, 3)}
            one |= {"rows": rows, "rate": rng.choice((50, 100))}
        if kind == "text":
            one["bad"] = rng.random() < 0.5
        inputs[f"{kind}{number}"] = one
    return inputs


def _draw(rng: Random, nodes: list[Drawn]) -> Drawn | None:
    """One more node over those that are there, or None where the dice asked for something impossible."""
    # The newest are likelier: chains rather than a bush.
    at = len(nodes) - 1 - min(int(rng.expovariate(0.5)), len(nodes) - 1)
    of = nodes[at]
    node: dict[str, Any]
    op = rng.choice(
        ["filter", "branch", "map", "flat_map", "with", "batches", "union", "union", "distinct", "distinct"]
        + ["aggregate", "aggregate", "join", "self_join"] * 2
        + ["reduce", "stateful_map", "stateful_batches"] * 2
    )
    if op in ("filter", "branch", "map", "flat_map", "with", "batches"):
        return _stateless(rng, op, at, of)
    if of.depth >= 3 and op != "union":
        return None
    if op == "union":
        other = rng.randrange(len(nodes))
        more = nodes[other]
        node = {"op": "union", "of": [at, other]}
        return Drawn(node, of.append and more.append, False, of.size + more.size, max(of.depth, more.depth))
    keys: tuple[str, ...] = rng.choice(_KEYS)
    below = of.depth + 1
    if op == "distinct":
        chosen = None if rng.random() < 0.5 else list(keys)
        return Drawn({"op": "distinct", "of": [at], "keys": chosen}, of.append, False, of.size, below)
    if op == "aggregate":
        # A function may make the key; it then stands in the column `s`.
        made = rng.random() < 0.2
        keys = ("s",) if made else keys
        slots: dict[str, Any] = {
            column: list(rng.choice(SLOTS[column])) for column in COLUMNS if column not in keys
        }
        node = {
            "op": "aggregate",
            "of": [at],
            "keys": list(keys),
            "made": made,
            "slots": slots,
        }
        return Drawn(node, False, False, min(2 * of.size, 60 * _GROUPS[keys]), below)
    if op in ("join", "self_join"):
        return _join(rng, op, at, nodes, keys)
    weighted = not (of.append and of.ordered) or rng.random() < 0.3
    node = {"op": op, "of": [at], "keys": list(keys), "weights": weighted}
    return Drawn(node, op != "reduce" and not weighted, False, 2 * of.size, below)


def _stateless(rng: Random, op: str, at: int, of: Drawn) -> Drawn:
    node: dict[str, Any] = {"op": op, "of": [at]}
    size = of.size
    if op in ("filter", "branch"):
        modulus = rng.randint(2, 4)
        node |= {"column": rng.choice(("a", "n")), "mod": modulus, "rest": rng.randrange(modulus)}
        node |= {"by": rng.choice(("expr", "fn"))}
        if op == "branch":
            node["side"] = rng.random() < 0.5
        size *= 0.6
    elif op == "map":
        node["kind"] = rng.choice(("shift", "rekey"))
    # Functions on batches are given weights here, so that their result may have deletions.
    return Drawn(node, of.append and op != "batches", of.ordered, size, of.depth)


def _join(rng: Random, op: str, at: int, nodes: list[Drawn], keys: tuple[str, ...]) -> Drawn | None:
    other = at if op == "self_join" else rng.randrange(len(nodes))
    left, right = nodes[at], nodes[other]
    if right.depth >= 3:
        return None
    how = rng.choice(HOWS)
    size = left.size if how in ("semi", "anti") else left.size * right.size / _GROUPS[keys]
    if size > _MOST:
        return None
    take = {column: rng.choice(("left", "right")) for column in COLUMNS if column not in keys}
    node = {"op": "join", "of": [at, other], "keys": list(keys), "how": how, "take": take}
    append = how == "inner" and left.append and right.append
    return Drawn(node, append, False, max(size, left.size), max(left.depth, right.depth) + 1)
