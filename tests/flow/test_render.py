"""Plans as people and programs read them."""

from __future__ import annotations

import json

import polars as pl

import anabranch as ab
from anabranch.flow.plan import make_plan
from anabranch.flow.render import as_json, as_text


def flow() -> ab.Flow:
    made = ab.Flow("shop")
    orders = made.input("orders", ab.generator(rows=10))
    counts = orders.filter(pl.col("value") > 3, name="large").key_by("key").count(name="counts")
    counts.output("counts")
    orders.select("key", count=pl.col("value")).union(counts, name="all").output("all")
    return made


def test_as_text() -> None:
    plan = make_plan(flow())
    assert as_text(plan).splitlines() == [
        f"flow shop  fingerprint {plan.fingerprint[:16]}",
        "",
        "stage 0",
        "  orders (input)  [id: Int64, key: Int64, value: Int64]",
        "  large (filter)  ← orders  [id: Int64, key: Int64, value: Int64]",
        "  select_1 (select)  ← orders  [key: Int64, count: Int64]",
        "  ↓ channel 0 to stage 1: key_by_1 by key, combined for counts",
        "  ↓ channel 1 to stage 1: select_1 stays on its worker",
        "",
        "stage 1",
        "  counts (count)  ← channel 0  region counts  [key: Int64, count: Int64]",
        "  counts.output (output)  ← counts  [key: Int64, count: Int64]",
        "  all (union)  ← channel 1, counts  [key: Int64, count: Int64]",
        "  all.output (output)  ← all  [key: Int64, count: Int64]",
    ]


def test_as_json() -> None:
    plan = make_plan(flow())
    shown = json.loads(json.dumps(as_json(plan)))
    assert shown["flow"] == "shop"
    assert shown["fingerprint"] == plan.fingerprint
    assert shown["stages"] == 2
    by_id = {operator["id"]: operator for operator in shown["operators"]}
    assert by_id["large"] | {"expr": ""} == {
        "id": "large",
        "name": "large",
        "kind": "filter",
        "inputs": ["orders"],
        "schema": {"id": "Int64", "key": "Int64", "value": "Int64"},
        "keys": [],
        "append_only": True,
        "depth": 0,
        "region": None,
        "ordered": False,
        "expr": "",
    }
    assert by_id["counts"]["aggregates"] == {"count": ["count", None]}
    assert by_id["counts"]["region"] == "counts"
    assert by_id["counts.output"]["name"] == "counts"
    assert by_id["orders"]["source"]["kind"] == "generator"
    assert shown["channels"][0] == {
        "number": 0,
        "kind": "exchange",
        "from": "key_by_1",
        "from_stage": 0,
        "to_stage": 1,
        "keys": ["key"],
        "combined_for": "counts",
    }
    assert shown["channels"][1]["kind"] == "forward"
