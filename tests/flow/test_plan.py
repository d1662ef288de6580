"""From graphs to stages: depths, channels, regions, order, ids, fingerprints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import anabranch as ab
from anabranch.flow.plan import Plan, make_plan


def rows(flow: ab.Flow, name: str = "rows") -> ab.Stream:
    return flow.input(name, ab.generator(rows=10))


def depths(plan: Plan) -> dict[str, int]:
    return {p.node.id: p.depth for p in plan.operators}


def regions(plan: Plan) -> dict[str, str]:
    return {p.node.id: p.region for p in plan.operators if p.region is not None}


def check_invariants(plan: Plan) -> None:
    """PLAN-1 and PLAN-3, and that a plan's order is one in which it can be run."""
    channels = {channel.number: channel for channel in plan.channels}
    assert sorted(channels) == list(range(len(channels)))
    done: set[str] = set()
    used: set[int] = set()
    for planned in plan.operators:
        assert len(planned.feeds) == len(planned.node.inputs)
        for feed, parent in zip(planned.feeds, planned.node.inputs, strict=True):
            assert parent.id in done
            if isinstance(feed, int):
                channel = channels[feed]
                used.add(feed)
                assert channel.producer == parent.id
                assert channel.start == plan.operator(parent.id).depth < channel.end == planned.depth
                assert (channel.kind == "exchange") == (parent.role == "key_by")
                assert channel.keys == parent.keys
                assert channel.combine in (None, planned.node.id)
            else:
                assert feed == parent.id
                assert plan.operator(parent.id).depth == planned.depth
                # Rows of a distributor are nowhere but in its channels.
                assert parent.role != "key_by"
        done.add(planned.node.id)
    assert used == set(channels)
    assert plan.depth == max(p.depth for p in plan.operators)
    assert [p.origin for p in plan.operators] == list(range(len(plan.operators)))


def test_a_flow_without_keys_is_one_stage() -> None:
    flow = ab.Flow("f")
    rows(flow).filter(pl.col("key") > 1).map(lambda row: row).output("out")
    plan = make_plan(flow)
    assert plan.depth == 0
    assert plan.channels == ()
    check_invariants(plan)


def test_two_keyed_operators_in_one_region_cost_one_stage() -> None:
    flow = ab.Flow("f")
    keyed = rows(flow).key_by("key")
    keyed.count(name="counts").filter(pl.col("count") > 1).distinct(name="many").output("many")
    keyed.sum("value", name="sums").output("sums")
    plan = make_plan(flow)
    assert plan.depth == 1
    assert regions(plan) == dict.fromkeys(("counts", "many", "sums"), "counts")
    check_invariants(plan)


def test_two_regions_of_one_depth_cost_one_stage() -> None:
    flow = ab.Flow("f")
    stream = rows(flow)
    stream.key_by("key").count(name="by_key").output("a")
    stream.key_by("value").count(name="by_value").output("b")
    plan = make_plan(flow)
    assert plan.depth == 1
    assert regions(plan) == {"by_key": "by_key", "by_value": "by_value"}
    assert [channel.keys for channel in plan.channels] == [("key",), ("value",)]
    check_invariants(plan)


def test_regions_that_meet_in_a_later_stage_stay_two() -> None:
    flow = ab.Flow("f")
    stream = rows(flow)
    left = stream.key_by("key").count(name="left").key_by("count")
    right = stream.key_by("value").count(name="right").key_by("count")
    left.join(right, name="both").output("out")
    plan = make_plan(flow)
    assert regions(plan) == {"left": "left", "right": "right", "both": "both"}
    assert plan.regions(1) == ["left", "right"]
    assert plan.regions(2) == ["both"]
    check_invariants(plan)


def test_re_keying_costs_a_stage_each() -> None:
    flow = ab.Flow("f")
    stream: ab.Stream = rows(flow)
    for _ in range(4):
        stream = stream.key_by("key").count().with_columns(key=pl.col("count")).select("key")
    stream.output("out")
    plan = make_plan(flow)
    assert plan.depth == 4
    assert [(c.start, c.end, c.kind) for c in plan.channels] == [(d, d + 1, "exchange") for d in range(4)]
    check_invariants(plan)


def test_distributors_in_a_row_exchange_once() -> None:
    flow = ab.Flow("f")
    rows(flow).key_by("key").key_by("value").key_by(lambda row: "x", column="k").count().output("out")
    plan = make_plan(flow)
    assert plan.depth == 1
    assert [channel.keys for channel in plan.channels] == [("k",)]
    assert [p.node.kind for p in plan.operators] == ["input", "key_function", "key_by", "count", "output"]
    check_invariants(plan)


def test_an_output_behind_a_distributor_needs_no_exchange() -> None:
    flow = ab.Flow("f")
    rows(flow).key_by("key").output("out")
    plan = make_plan(flow)
    assert (plan.depth, plan.channels) == (0, ())


def test_a_diamond_over_different_depths_gets_a_forward_channel() -> None:
    flow = ab.Flow("f")
    counts = rows(flow).key_by("key").count(name="counts")
    deep = counts.key_by("count").sum("key", name="deep").select(key="count", count="sum_key")
    counts.union(deep, name="both").output("out")
    plan = make_plan(flow)
    assert depths(plan)["both"] == 2
    forward = [channel for channel in plan.channels if channel.kind == "forward"]
    assert [(c.producer, c.start, c.end, c.combine) for c in forward] == [("counts", 1, 2, None)]
    check_invariants(plan)


def test_a_forward_channel_serves_all_its_consumers() -> None:
    flow = ab.Flow("f")
    stream = rows(flow).select("key")
    deep = stream.key_by("key").distinct().select("key")
    stream.union(deep, name="first").output("a")
    deep.union(stream, name="second").output("b")
    plan = make_plan(flow)
    assert [(c.producer, c.kind) for c in plan.channels] == [
        ("key_by_1", "exchange"),
        ("select_1", "forward"),
    ]
    check_invariants(plan)


def test_an_exchange_may_skip_stages() -> None:
    flow = ab.Flow("f")
    stream = rows(flow)
    deep = stream.key_by("key").count().key_by("count").sum("key", name="deep")
    deep.join(stream.key_by("key", name="raw"), name="met").output("out")
    plan = make_plan(flow)
    skipping = [channel for channel in plan.channels if channel.producer == "raw"]
    assert [(c.start, c.end, c.kind) for c in skipping] == [(0, 2, "exchange")]
    check_invariants(plan)


def test_a_self_join_reads_one_channel_twice() -> None:
    flow = ab.Flow("f")
    keyed = rows(flow).key_by("key")
    keyed.join(keyed, name="self").output("out")
    plan = make_plan(flow)
    assert plan.operator(plan.operators[2].node.id).feeds == (0, 0)
    assert len(plan.channels) == 1
    check_invariants(plan)


def test_operators_that_lead_nowhere_are_left_out() -> None:
    flow = ab.Flow("f")
    stream = rows(flow)
    stream.key_by("key").count().key_by("count").sum("key")
    stream.output("out")
    rows(flow, "unused")
    plan = make_plan(flow)
    assert [p.node.id for p in plan.operators] == ["rows", "out.output", "unused"]
    assert plan.depth == 0
    assert list(plan.inputs) == ["rows", "unused"]
    assert list(plan.outputs) == ["out"]


def test_partials_travel_only_to_those_right_behind_a_distributor() -> None:
    flow = ab.Flow("f")
    keyed = rows(flow).key_by("key")
    keyed.count(name="direct").output("a")
    keyed.filter(pl.col("value") > 5).sum("value", name="filtered").output("b")
    keyed.max("value", name="maxima").select("key", top="max_value").count(name="behind").output("c")
    keyed.reduce("value", max, name="reduced").output("d")
    keyed.stateful_map(lambda state, row: (state, []), {"x": int}, name="mapped").output("e")
    plan = make_plan(flow)
    assert {c.combine for c in plan.channels} == {None, "direct", "maxima"}
    # Rows as they are travel once, whoever wants them.
    assert len(plan.channels) == 3
    check_invariants(plan)


def test_each_aggregate_has_partials_of_its_own() -> None:
    flow = ab.Flow("f")
    keyed = rows(flow).key_by("key")
    keyed.count(name="counts").output("a")
    keyed.sum("value", name="sums").output("b")
    assert [c.combine for c in make_plan(flow).channels] == ["counts", "sums"]


def test_order_is_asked_for_only_where_it_counts() -> None:
    flow = ab.Flow("f")
    stream = rows(flow)
    other = rows(flow, "other")
    mapped = stream.map(lambda row: row, name="mapped").union(
        other.filter(pl.col("key") > 1, name="few"), name="u"
    )
    mapped.key_by("key", name="k").stateful_map(
        lambda state, row: (state, []), {"x": int}, name="last"
    ).output("a")
    stream.key_by("value", name="v").count(name="counts").output("b")
    plan = make_plan(flow)
    ordered = {p.node.id for p in plan.operators if p.ordered}
    assert ordered == {"rows", "mapped", "other", "few", "u", "k"}


def test_order_begins_anew_behind_an_operator_that_needs_none() -> None:
    flow = ab.Flow("f")
    counts = rows(flow).key_by("key", name="k").count(name="counts")
    counts.key_by("count", name="c").reduce("key", lambda a, b, w: b, weights=True, name="r").output("out")
    ordered = {p.node.id for p in make_plan(flow).operators if p.ordered}
    assert ordered == {"counts", "c"}


def test_ids_are_names_or_places() -> None:
    flow = ab.Flow("f")
    stream = rows(flow)
    stream.map(lambda row: row).map(lambda row: row, name="map_2").map(lambda row: row).output("out")
    assert [node.id for node in flow.nodes] == ["rows", "map_1", "map_2", "map_3", "out.output"]


FLOW = """
import anabranch as ab, polars as pl
from anabranch.flow.plan import make_plan
flow = ab.Flow("f")
rows = flow.input("rows", ab.generator(rows=10, columns={"a": ab.words(5), "b": ab.uniform_int(0, 9)}))
keyed = rows.filter(pl.col("a").is_in(["x", "y"])).key_by("KEY")
keyed.aggregate(n=ab.count(), top=ab.max("b")).output("out", ab.jsonl("out"))
keyed.stateful_map_batches(len, {"x": int}, {"STATE": int}).output("state")
print(make_plan(flow).fingerprint)
"""


def fingerprint_in_process(seed: str, key: str = "a", state: str = "s") -> str:
    code = FLOW.replace("KEY", key).replace("STATE", state)
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    first = fingerprint_in_process("1")
    assert len(first) == 64
    assert fingerprint_in_process("2") == first


def build(**changed: Any) -> ab.Flow:
    use = {
        "flow": "f",
        "key": "key",
        "agg": ab.sum("value"),
        "keep": 1,
        "seed": 1,
        "state": int,
        "name": "out",
    }
    use |= changed
    flow = ab.Flow(use["flow"], on_error=use.get("on_error", "stop"))
    stream = flow.input("rows", ab.generator(rows=10, seed=use["seed"], rate=use.get("rate")))
    keyed = stream.filter(pl.col("value") > use["keep"]).key_by(use["key"])
    keyed.aggregate(out=use["agg"]).output(use["name"])
    keyed.stateful_map_batches(use.get("fn", len), {"x": int}, {"s": use["state"]}).output("batches")
    return flow


def test_a_fingerprint_tells_what_state_depends_on() -> None:
    same = make_plan(build()).fingerprint
    assert make_plan(build()).fingerprint == same
    assert make_plan(build(fn=max)).fingerprint == same
    assert make_plan(build(on_error="dead_letter")).fingerprint == same
    assert make_plan(build(rate=5.0)).fingerprint == same


@pytest.mark.parametrize(
    "changed",
    [
        {"flow": "g"},
        {"key": "value"},
        {"agg": ab.max("value")},
        {"agg": ab.sum("id")},
        {"keep": 2},
        {"seed": 2},
        {"state": float},
        {"name": "other"},
    ],
    ids=str,
)
def test_a_changed_flow_has_another_fingerprint(changed: dict[str, Any]) -> None:
    assert make_plan(build(**changed)).fingerprint != make_plan(build()).fingerprint


def test_the_order_of_columns_counts() -> None:
    # Rows are stored column by column, in this order.
    def plan(*columns: str) -> Plan:
        flow = ab.Flow("f")
        source = ab.iterable([], schema={"key": str, **dict.fromkeys(columns, int)})
        flow.input("rows", source).key_by("key").distinct().output("out")
        return make_plan(flow)

    assert plan("a", "b").fingerprint != plan("b", "a").fingerprint


@st.composite
def graphs(draw: st.DrawFn) -> ab.Flow:
    """Random graphs over two integer columns, diamonds and self-joins among them."""
    flow = ab.Flow("random")
    source = ab.generator(rows=1, columns={"a": ab.index(), "b": ab.index()})
    streams: list[ab.Stream] = [flow.input("first", source), flow.input("second", source)]
    for _ in range(draw(st.integers(1, 8))):
        stream = draw(st.sampled_from(streams))
        kind = draw(st.sampled_from(["filter", "count", "sum", "join", "union", "map"]))
        key = draw(st.sampled_from(["a", "b"]))
        if kind == "filter":
            made: ab.Stream = stream.filter(pl.col("a") > 1)
        elif kind == "map":
            made = stream.map(lambda row: row)
        elif kind == "union":
            made = stream.union(draw(st.sampled_from(streams)))
        else:
            keyed = (
                stream if isinstance(stream, ab.KeyedStream) and draw(st.booleans()) else stream.key_by(key)
            )
            if kind == "join":
                other = draw(st.sampled_from(streams))
                other_keyed = other if isinstance(other, ab.KeyedStream) else other.key_by(key)
                joined = keyed.join(other_keyed, how="semi")
                made = joined
            else:
                made = keyed.count() if kind == "count" else keyed.sum("b")
                made = made.select(a=pl.col(made.schema.__iter__().__next__()), b=pl.lit(1, pl.Int64))
        streams.append(made)
    for place, stream in enumerate(streams[2:]):
        if draw(st.booleans()) or place == 0:
            stream.output(f"out{place}")
    return flow


@settings(max_examples=150)
@given(graphs())
def test_any_graph_keeps_the_invariants(flow: ab.Flow) -> None:
    plan = make_plan(flow)
    check_invariants(plan)
    members: dict[str, set[int]] = defaultdict(set)
    for planned in plan.operators:
        assert (planned.region is not None) == (planned.node.stateful is not None)
        if planned.region is not None:
            members[planned.region].add(planned.depth)
            assert planned.depth >= 1
    # A region is of one stage.
    assert all(len(found) == 1 for found in members.values())
