"""An input in batches: the batches themselves, what may see them, and that results do not depend on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inprocess import InProcess
from richflow import build, write_input

import anabranch as ab
from anabranch.flow.plan import Channel, Plan, make_plan
from anabranch.model.ids import OperatorId
from anabranch.spark import streaming

EMPTY = pl.DataFrame(schema={"n": pl.Int64()})


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_crowded", {})


def stream_of(*channels: int, ordered: bool = False) -> streaming.Stream:
    made = [Channel(n, "exchange", OperatorId("by"), 0, 1, ("n",), OperatorId("sum")) for n in channels]
    return streaming.Stream(
        "flow", ordered, (), tuple((one, OperatorId("rows")) for one in made), frozenset()
    )


@given(st.lists(st.integers(0, 12), max_size=8), st.one_of(st.none(), st.integers(1, 9)))
def test_batches_hold_the_rows_in_turn(heights: list[int], limit: int | None) -> None:
    ends = [sum(heights[: place + 1]) for place in range(len(heights))]
    frames = [
        pl.DataFrame({"n": range(end - height, end)}, schema=EMPTY.schema)
        for height, end in zip(heights, ends, strict=True)
    ]
    batches = streaming.Batches(stream_of(0), iter(frames), EMPTY)
    batches.limit = limit
    found = list(batches)
    assert pl.concat(found).get_column("n").to_list() == list(range(sum(heights)))
    assert all(batch.n_chunks() == 1 for batch in found)
    if limit is None:
        assert len(found) == 1
    else:
        assert all(batch.height <= limit for batch in found)


def test_small_frames_share_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "BATCH", 10)
    frames = [pl.DataFrame({"n": range(height)}) for height in (3, 3, 3, 3, 25, 1)]
    found = [batch.height for batch in streaming.Batches(stream_of(0), frames, EMPTY)]
    assert found == [9, 3, 10, 10, 6]


def test_a_batch_is_given_away_before_more_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "BATCH", 3)
    read = 0

    def frames() -> Any:
        nonlocal read
        for _ in range(5):
            read += 1
            yield pl.DataFrame({"n": [1, 2, 3]})

    next(iter(streaming.Batches(stream_of(0), frames(), EMPTY)))
    assert read <= 2


def test_rows_stay_together_where_order_counts_or_nothing_is_added_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streaming, "BATCH", 3)
    frame = pl.DataFrame({"n": range(10)})
    for stream in (stream_of(), stream_of(0, ordered=True)):
        assert [batch.height for batch in streaming.Batches(stream, [frame], EMPTY)] == [10]


def heights(rows: int, keys: dict[int, int]) -> list[int]:
    """The batches of a step whose channels have as many keys each."""
    stream = stream_of(*keys)
    batches = streaming.Batches(stream, [pl.DataFrame({"n": range(rows)})], EMPTY)
    found = []
    for batch in batches:
        found.append(batch.height)
        for channel, _ in stream.aggregates:
            batches.learn(channel, batch, batch.head(keys[channel.number]))
    return found


def test_the_rest_and_the_next_steps_are_taken_at_once_where_keys_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streaming, "BATCH", 16)
    assert heights(64, {0: 2}) == [16] * 4
    assert heights(64, {0: 3, 1: 1}) == [16, 48]
    assert heights(64, {0: 3, 1: 1}) == [64]
    assert heights(4, {0: 4, 1: 1}) == [4]
    assert heights(64, {0: 2, 1: 1}) == [64]
    assert heights(64, {0: 2, 1: 1}) == [16] * 4


def plan_of(root: Path, shape: Any) -> tuple[Plan, streaming.Stream]:
    flow = ab.Flow("flow")
    shape(flow.input("rows", ab.files(root, format="jsonl", schema={"k": int, "v": int})))
    plan = make_plan(flow)
    return plan, streaming.behind(plan.operator(OperatorId("rows")), plan)


def test_only_partials_remain_of_rows_that_are_summed(tmp_path: Path) -> None:
    def shape(rows: Any) -> None:
        rows.filter(pl.col("v") > 0).select("k", "v").key_by("k").sum("v").output("sums")

    _, stream = plan_of(tmp_path, shape)
    assert [one.node.kind for one in stream.operators] == ["filter", "select"]
    assert [operator for _, operator in stream.aggregates] == [stream.operators[-1].node.id]
    assert stream.whole == frozenset()


def test_what_an_output_a_union_or_a_join_takes_is_kept(tmp_path: Path) -> None:
    def shape(rows: Any) -> None:
        rows.key_by("k").sum("v").output("sums")
        positive = rows.filter(pl.col("v") > 0, name="positive")
        positive.output("plain")
        small = rows.filter(pl.col("v") < 9, name="small")
        small.union(positive).key_by("k").count().output("counts")
        rows.select("k", name="keys").key_by("k").join(positive.key_by("k"), how="semi").output("joined")

    plan, stream = plan_of(tmp_path, shape)
    names = {plan.operator(operator).node.name for operator in stream.whole}
    assert names == {"positive", "small", "keys"}
    assert [operator for _, operator in stream.aggregates] == ["rows"]


@pytest.mark.parametrize(("batch", "shrinks"), [(1, 0), (7, 0), (7, 2), (50, 8)])
def test_the_same_bits_whatever_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, shrinks: int
) -> None:
    write_input(tmp_path / "in", seed=11)
    flow = build(tmp_path / "in")
    jobs = [InProcess(flow, tmp_path / f"job{n}", workers, 8) for n, workers in enumerate((1, 1, 3))]
    while jobs[0].planner.backlog(jobs[0].progress.positions):
        slices = jobs[0].cut(150)
        seen = []
        for job, size in zip(jobs, (1 << 30, batch, batch), strict=True):
            monkeypatch.setattr(streaming, "BATCH", size)
            monkeypatch.setattr(streaming, "_SHRINKS", shrinks)
            commit = job.commit(slices, job.attempt(slices))
            seen.append({name: (out["rows"], out["hash"]) for name, out in commit["outputs"].items()})
        assert seen[0] == seen[1] == seen[2]


def test_an_error_behind_a_later_batch_names_operator_and_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "BATCH", 2)
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.jsonl").write_text("".join(f'{{"k": 1, "v": {v}}}\n' for v in (1, 2, 3, 0, 5)))
    flow = ab.Flow("flow")
    rows = flow.input("rows", ab.files(source, format="jsonl", schema={"k": int, "v": int}))
    halves = rows.map(lambda row: (row.k, 6 // row.v), schema={"k": int, "h": int}, name="halves")
    halves.key_by("k").sum("h").output("sums")
    with pytest.raises(ab.RecordError, match=r"halves.*step 0.*ZeroDivisionError"):
        InProcess(flow, tmp_path / "job").step()
