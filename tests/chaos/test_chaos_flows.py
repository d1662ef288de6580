"""Random flows: the same for the same seed, accepted by the engine, and rich enough to be worth the trouble."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest

import anabranch as ab
from anabranch.flow.plan import make_plan
from chaos.build import build, follow
from chaos.feed import Feed, random_rows
from chaos.flows import COLUMNS, HOWS, KINDS, random_flow
from chaos.records import Inputs


def test_a_seed_is_a_flow() -> None:
    assert random_flow(Random(7)) == random_flow(Random(7))
    assert random_flow(Random(7)) != random_flow(Random(8))


def test_a_description_is_plain_json() -> None:
    drawn = [random_flow(Random(seed)) for seed in range(50)]
    assert json.loads(json.dumps(drawn)) == drawn


def test_flows_have_everything_in_them() -> None:
    drawn = [random_flow(Random(seed)) for seed in range(300)]
    nodes = [node for one in drawn for node in one["nodes"]]
    assert {one["kind"] for flow in drawn for one in flow["inputs"].values()} == set(KINDS)
    operators = Counter(node["op"] for node in nodes)
    assert min(operators.values()) > 20, operators
    joins = Counter(node["how"] for node in nodes if node["op"] == "join")
    assert set(joins) == set(HOWS)
    assert any(node["of"][0] == node["of"][1] for node in nodes if node["op"] == "join")
    kinds = {kind for node in nodes if node["op"] == "aggregate" for kind, _ in node["slots"].values()}
    assert kinds == {"count", "sum", "min", "max", "mean"}
    for op in ("reduce", "stateful_map", "stateful_batches"):
        assert {node["weights"] for node in nodes if node["op"] == op} == {True, False}
    assert all(flow["outputs"] for flow in drawn)
    assert any(len(flow["outputs"]) > 2 for flow in drawn)


@pytest.mark.parametrize("seed", range(40))
def test_the_engine_takes_every_flow(seed: int, tmp_path: Path) -> None:
    """Deletions never reach a function without weights: the engine would refuse the flow."""
    description = random_flow(Random(seed))
    Feed(tmp_path, description["inputs"], 100, Random(seed))
    flow = build(description, tmp_path)
    assert isinstance(flow, ab.Flow)
    plan = make_plan(flow)
    assert set(plan.outputs) == set(description["outputs"])
    for node in plan.outputs.values():
        assert list(node.schema) == list(COLUMNS)


def test_regions_follow_one_another(tmp_path: Path) -> None:
    depths = []
    for seed in range(40):
        root = tmp_path / str(seed)
        description = random_flow(Random(seed))
        Feed(root, description["inputs"], 100, Random(seed))
        depths.append(make_plan(build(description, root)).depth)
    assert max(depths) >= 3
    assert sum(depth >= 2 for depth in depths) > 15


def test_rows_delete_what_came_before() -> None:
    rows = random_rows(Random(3), 500, weights=True)
    total: Counter[tuple[object, ...]] = Counter()
    for row in rows:
        total[row[:5]] += row[5]
    assert sum(row[5] < 0 for row in rows) > 100
    assert sum(weight == 0 for weight in total.values()) > 50
    assert all(row[5] == 1 for row in random_rows(Random(3), 500, weights=False))


def test_what_was_given_is_what_is_there(tmp_path: Path) -> None:
    inputs = {kind: {"kind": kind, "weights": kind != "text"} for kind in KINDS if kind != "generator"}
    feed = Feed(tmp_path, inputs, 200, Random(5))
    given: dict[str, Counter[tuple[object, ...]]] = {name: Counter() for name in inputs}
    assert len(feed) > 20
    while (gift := feed.give()) is not None:
        given[gift.input].update(row[:5] for row in gift.rows)
    there = Inputs(tmp_path, inputs)
    slices = {
        name: [{"partition": key, "start": 0, "end": end} for key, end in ends.items()]
        for name, ends in there.ends().items()
    }
    found, bad = there.read(slices)
    assert bad == 0
    assert {name: Counter(row for row, _ in rows) for name, rows in found.items()} == given
    assert len(there.ends()["jsonl"]) > 3


def test_an_iterable_goes_on_behind_what_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "items").write_text('{"a": 1, "d": null}\n{"a": 2, "d": "0.50"}\n{"a": 3, "d": null}\nEND\n')
    assert [item[0] for item in follow(tmp_path / "items", ["a", "d"])(1)] == [2, 3]
