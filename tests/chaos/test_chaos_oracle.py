"""The oracle itself: literal inputs and results, and what must hold for any."""

from __future__ import annotations

import ast
from collections import Counter
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chaos
from chaos.feed import random_rows
from chaos.flows import random_flow
from chaos.oracle import Oracle, ZSet

Row = tuple[Any, ...]


def run(node: dict[str, Any], *steps: list[tuple[Row, int]], inputs: int = 1) -> list[dict[Row, int]]:
    """The changes that one operator gives in each step; all of its inputs are the same stream."""
    description = {
        "inputs": {"in": {}},
        "nodes": [{"op": "input", "input": "in", "of": []}, {**node, "of": [0] * inputs}],
        "outputs": {"out": 1},
    }
    oracle = Oracle(description)
    return [dict(oracle.step({"in": step})["out"]) for step in steps]


def row(a: Any = 1, s: Any = "pen", n: Any = 0, x: Any = 0.5, d: Any = None) -> Row:
    return (a, s, n, x, d)


def test_stateless_operators() -> None:
    two = [(row(n=5), 1), (row(n=None), -1)]
    assert run({"op": "filter", "column": "n", "mod": 3, "rest": 2}, two) == [{row(n=5): 1}]
    assert run({"op": "branch", "column": "n", "mod": 3, "rest": 2, "side": False}, two) == [
        {row(n=None): -1}
    ]
    assert run({"op": "map", "kind": "shift"}, two) == [{row(n=6): 1, row(n=None): -1}]
    assert run({"op": "map", "kind": "rekey"}, two) == [{row(5, "p", 5): 1, row(0, "p", None): -1}]
    assert run({"op": "flat_map"}, two) == [{row(n=5): 1, row(n=6): 1}]
    assert run({"op": "with"}, two) == [{row(n=9, x=2.0): 1, row(n=None, x=2.0): -1}]
    assert run({"op": "batches"}, two) == [{row(n=5): 2, row(n=None): -2}]
    assert run({"op": "union"}, two, inputs=2) == [{row(n=5): 2, row(n=None): -2}]


def test_distinct() -> None:
    changes = run({"op": "distinct", "keys": None}, [(row(), 2)], [(row(), -1)], [(row(), -1)])
    assert changes == [{row(): 1}, {}, {row(): -1}]


def test_aggregates_are_exact_and_retracted() -> None:
    slots = {"s": ["max", "s"], "n": ["count", None], "x": ["sum", "x"], "d": ["min", "d"]}
    node = {"op": "aggregate", "keys": ["a"], "made": False, "slots": slots}
    cent = Decimal("0.01")
    first, second, third = run(
        node,
        [(row(x=1e16, d=cent), 1), (row(x=1.0, s="zoo"), 1), (row(x=-1e16), 1)],
        [(row(x=1.0, s="zoo"), -1)],
        [(row(x=1e16, d=cent), -1), (row(x=-1e16), -1)],
    )
    assert first == {(1, "zoo", 3, 1.0, cent): 1}
    assert second == {(1, "zoo", 3, 1.0, cent): -1, (1, "pen", 2, 0.0, cent): 1}
    assert third == {(1, "pen", 2, 0.0, cent): -1}


def test_an_aggregate_without_values_is_null_and_a_mean_divides_by_weight() -> None:
    slots = {"s": ["min", "s"], "n": ["sum", "n"], "x": ["mean", "n"], "d": ["sum", "d"]}
    node = {"op": "aggregate", "keys": ["a"], "made": False, "slots": slots}
    assert run(node, [(row(s=None, n=None), 2)]) == [{(1, None, None, None, None): 1}]
    assert run(node, [(row(n=1), 2), (row(n=5), 1)]) == [{(1, "pen", 7, 7 / 3, None): 1}]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("inner", {row(n=3): 4}),
        ("left", {row(n=3): 4, (None, "ink", 4, None, None): 1}),
        ("full", {row(n=3): 4, (None, "ink", 4, None, None): 1, (None, "ink", None, 0.5, None): 1}),
        ("semi", {row(n=3): 2}),
        ("anti", {row(None, "ink", 4): 1}),
    ],
)
def test_joins_of_a_stream_with_itself(how: str, expected: dict[Row, int]) -> None:
    take = {"n": "left", "x": "right", "d": "left"}
    node = {"op": "join", "keys": ["a", "s"], "how": how, "take": take}
    assert run(node, [(row(n=3), 2), (row(None, "ink", 4), 1)], inputs=2) == [expected]


def test_a_match_takes_the_unmatched_row_back() -> None:
    description = {
        "inputs": {"l": {}, "r": {}},
        "nodes": [
            {"op": "input", "input": "l", "of": []},
            {"op": "input", "input": "r", "of": []},
            {"op": "join", "of": [0, 1], "keys": ["a", "s", "n"], "how": "left", "take": dict.fromkeys("xd", "right")},
        ],
        "outputs": {"out": 2},
    }  # fmt: skip
    oracle = Oracle(description)
    assert oracle.step({"l": [(row(), 1)]})["out"] == {row(x=None): 1}
    assert oracle.step({"r": [(row(x=9.0), 3)]})["out"] == {row(x=None): -1, row(x=9.0): 3}


def test_functions_with_state() -> None:
    base = {"keys": ["a", "s"], "weights": False}

    def made(n: Any) -> Row:
        return (1, "pen", n, 0.5, None)

    rows = [(row(n=n), 1) for n in (4, 6, 1, 1, 8)]
    assert run({"op": "stateful_map", **base}, rows[:2], rows[2:]) == [
        {made(2): 1},
        {made(-5): 1, made(0): 1},
    ]
    folded = (4 * 31 + 6) % 1_000_003
    assert run({"op": "reduce", **base}, rows[:1], rows[1:2]) == [
        {made(4): 1},
        {made(4): -1, made(folded): 1},
    ]
    assert run({"op": "stateful_batches", **base}, rows[:2], rows[2:3]) == [{made(10): 1}, {made(11): 1}]
    weighted = {**base, "weights": True}
    back = [(row(n=4), -1)]
    assert run({"op": "stateful_map", **weighted}, rows[:2], back) == [
        {made(2): 1},
        {made(2): -1, made(1): 1},
    ]
    assert run({"op": "reduce", **weighted}, rows[:1], back) == [{made(4): 1}, {made(4): -1}]
    assert run({"op": "stateful_batches", **weighted}, rows[:1], back) == [{made(4): 1}, {made(4): -1}]


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), cut=st.integers(0, 60))
def test_the_cutting_of_steps_does_not_change_the_table(seed: int, cut: int) -> None:
    """True of all operators but those whose result is a row for each step or each order."""
    rng = Random(seed)
    description = random_flow(rng, 60)
    if any(not node.get("weights", True) for node in description["nodes"]):
        return
    rows = {
        name: [(one[:5], one[5]) for one in random_rows(rng, 60, kind["weights"])]
        for name, kind in description["inputs"].items()
    }
    whole, parts = Oracle(description), Oracle(description)
    expected = whole.step(rows)
    first = parts.step({name: many[:cut] for name, many in rows.items()})
    second = parts.step({name: many[cut:] for name, many in rows.items()})
    for name, table in expected.items():
        total: ZSet = Counter(first[name])
        total.update(second[name])
        assert {one: weight for one, weight in total.items() if weight} == table


def test_what_judges_does_not_know_the_engine() -> None:
    folder = Path(chaos.__file__).parent
    todo, seen = ["oracle", "records", "check"], set()
    while todo:
        module = todo.pop()
        seen.add(module)
        for node in ast.walk(ast.parse((folder / f"{module}.py").read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] in ("anabranch", "polars")]
            todo += [n[6:] for n in names if n.startswith("chaos.") and n[6:] not in seen]
    assert seen == {"oracle", "records", "check"}
