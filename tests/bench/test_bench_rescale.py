"""The analysis of the rescaling benchmark, on runs made up so that the answer is known."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import anabranch as ab
from anabranch.model.ids import HostId, PartitionId, ShardId
from anabranch.model.layout import FixedSharding, initial_layout
from anabranch.model.layout import rescale as rescaled_layout
from bench import rescale
from bench.harness import Options
from bench.openloop import Latencies, Schedule, Seen, Span, judge, seen, silence, timeline
from bench.ours import rescale_flow
from bench.ours.rescale_bytes import minimum_bytes
from bench.ours.rescale_price import share
from bench.rescale import Run, bytes_row, kept_row, latency_rows, summary, typical
from bench.weather import stolen

RATE = 1000.0
SCHEDULE = Schedule(start=100.0, rate=RATE, partitions=4)


def run(visible: Sequence[float]) -> list[Seen]:
    """Steps that become visible at these times, each with all that arrived up to 0.1 s before, in four partitions."""
    steps, taken = [], 0
    for number, when in enumerate(visible):
        end = int((when - 0.1 - SCHEDULE.start) * RATE) // 4
        ranges = [{"partition": str(part), "start": taken, "end": end} for part in range(4)]
        record = {
            "step": number,
            "seconds": 0.2,
            "layout": 0,
            "inputs": {"drawn": {"ranges": ranges if end > taken else []}},
        }
        steps.append(seen(record, when, SCHEDULE, "drawn"))
        taken = max(taken, end)
    return steps


def every(seconds: float, low: float, high: float) -> list[float]:
    return [low + seconds * number for number in range(round((high - low) / seconds))]


def test_rows_of_a_step_arrived_when_the_schedule_says() -> None:
    record = {
        "step": 7,
        "seconds": 0.2,
        "layout": 3,
        "inputs": {
            "drawn": {"ranges": [{"partition": "2", "start": 10, "end": 20}]},
            "every": {"ranges": []},
        },
    }
    found = seen(record, 101.0, SCHEDULE, "drawn")
    # Row 10 of partition 2 is row 42 of all, and row 19 is row 78.
    assert found.spans == (Span(101.0, pytest.approx(100.042), pytest.approx(100.078), 10),)
    assert found.highest == pytest.approx(0.958)
    assert seen(record, 101.0, SCHEDULE, "other").spans == ()


def test_quantiles_weigh_steps_by_their_rows() -> None:
    quick = Span(visible=1.0, first=0.9, last=1.0, rows=900)
    slow = Span(visible=5.0, first=3.0, last=4.0, rows=100)
    both = Latencies([quick, slow])
    assert both.quantile(0.45) == pytest.approx(0.05)
    assert both.quantile(0.95) == pytest.approx(1.5)
    assert both.quantile(1.0) == pytest.approx(2.0)
    assert both.above(0.5) == pytest.approx(0.1)
    assert both.above(3.0) == 0.0


def test_no_rows_have_no_quantile() -> None:
    assert math.isnan(Latencies([]).quantile(0.5))
    assert Latencies([]).ccdf() == []


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 2), st.integers(1, 50)), min_size=1, max_size=8),
    st.floats(0.01, 0.99),
)
def test_quantiles_are_those_of_the_single_rows(made: list[tuple[float, float, int]], share: float) -> None:
    """Against every row by itself; two rows of a span are at most its width / rows apart."""
    spans, rows, apart = [], [], 1e-5
    for low, width, count in made:
        spans.append(Span(visible=100.0, first=100.0 - low - width, last=100.0 - low, rows=count))
        rows += [low + width * (row + 0.5) / count for row in range(count)]
        apart = max(apart, width / count)
    rows.sort()
    found = Latencies(spans)
    below = sum(row <= found.quantile(share) + apart for row in rows)
    above = sum(row >= found.quantile(share) - apart for row in rows)
    assert below >= share * len(rows) - 1
    assert above >= (1 - share) * len(rows) - 1


def test_the_ccdf_falls_from_all_rows_to_the_slowest() -> None:
    curve = Latencies([Span(visible=1.0, first=0.0, last=0.5, rows=1000)]).ccdf()
    latencies, shares = zip(*curve, strict=True)
    assert list(latencies) == sorted(latencies)
    assert list(shares) == sorted(shares, reverse=True)
    assert (shares[0], shares[-1]) == (1.0, 0.001)
    assert latencies[-1] == pytest.approx(1.0, abs=1e-3)


def test_a_slice_of_the_timeline_has_the_rows_that_arrived_in_it() -> None:
    steps = run([*every(0.2, 100.2, 104.0), 106.0, *every(0.2, 106.2, 108.0)])
    bins = timeline(steps, SCHEDULE)
    whole = [one for one in bins if one.at < 7.5]
    assert [one.at for one in whole] == [0.25 * number for number in range(30)]
    assert [one.rows for one in whole] == pytest.approx([250.0] * 30, abs=8)
    # Those who arrive when the outage begins wait for its end; those who arrive later wait less.
    waits = [one.highest for one in bins if 4.0 <= one.at <= 5.5]
    assert waits[0] == pytest.approx(2.0, abs=0.1)
    assert waits == sorted(waits, reverse=True)
    assert max(one.highest for one in bins if one.at < 3.5) < 0.35


def test_a_migration_that_nobody_notices_has_ratio_one() -> None:
    steps = run(every(0.2, 100.2, 140.0))
    found = judge(steps, SCHEDULE, began=115.0, ended=120.0)
    assert found.ratio == pytest.approx(1.0, abs=0.05)
    assert found.kept == pytest.approx(1.0, abs=0.05)
    assert found.silent == pytest.approx(0.2)


def test_a_migration_pays_for_the_rows_that_it_made_wait_beyond_its_end() -> None:
    steps = run([*every(0.2, 100.2, 115.0), *every(0.2, 118.0, 140.0)])
    # It ended when the long step was visible; who arrived meanwhile is in the next ones.
    found = judge(steps, SCHEDULE, began=114.9, ended=117.9)
    assert found.highest == pytest.approx(3.2, abs=0.25)
    assert found.before == pytest.approx(0.3, abs=0.02)
    assert found.after == pytest.approx(0.3, abs=0.02)
    assert found.ratio > 9
    assert found.silent == pytest.approx(3.2, abs=0.05)
    assert found.lowest == 0.0


def test_the_higher_steady_window_counts() -> None:
    # Steps are twice as long behind the migration.
    steps = run([*every(0.2, 100.2, 115.0), *every(0.4, 115.0, 140.0)])
    found = judge(steps, SCHEDULE, began=113.0, ended=115.0)
    assert found.after > found.before
    assert found.steady == found.after


def test_a_backlog_that_grows_is_throughput_that_was_not_kept() -> None:
    times = every(0.2, 100.2, 140.0)
    steps = run(times)
    # From 110 to 114, steps take only half of what arrives.
    halved = [
        Seen(
            step.step,
            step.visible,
            step.seconds,
            step.layout,
            tuple(Span(one.visible, one.first, one.last, one.rows // 2) for one in step.spans),
        )
        if 110 <= step.visible < 114
        else step
        for step in steps
    ]
    assert judge(halved, SCHEDULE, began=110.0, ended=113.7).kept == pytest.approx(0.5, abs=0.08)


def test_a_run_without_a_steady_window_is_not_judged() -> None:
    steps = run(every(0.2, 100.2, 110.0))
    with pytest.raises(ValueError, match="no steady window"):
        judge(steps, SCHEDULE, began=101.0, ended=109.0)
    with pytest.raises(ValueError, match="no step became visible"):
        judge(steps, SCHEDULE, began=111.0, ended=112.0)


def test_silence_is_the_longest_gap_that_touches_the_span() -> None:
    assert silence([0.0, 1.0, 5.0, 6.0, 20.0], began=4.0, ended=5.5) == 4.0
    assert silence([0.0, 1.0], began=3.0, ended=4.0) == 0.0


# From runs to rows.


def migration(
    ratio: float = 1.5, moved: int = 100, minimum: int = 100, kept: float = 1.0, **more: Any
) -> Run:
    return {
        "from": 2,
        "to": 4,
        "seconds": 4.0,
        "highest": 0.3 * ratio,
        "ratio": ratio,
        "kept": kept,
        "silent": 0.2,
        "longest_step": 0.3,
        "longest_calm_step": 0.3,
        "longest_moving_step": 0.25,
        "longest_calm_moving_step": 0.25,
        "stolen": 0.0,
        "bytes_moved": moved,
        "minimum_bytes": minimum,
        "memory": {"rss": 10**9, "anonymous": 10**8},
        **more,
    }


def made(strategy: str, *migrations: Run) -> Run:
    return {"strategy": strategy, "keys": 10, "rate": 1000.0, "faults": 0, "migrations": list(migrations)}


def test_the_row_of_latency_is_the_median_of_the_runs_own_ratios() -> None:
    runs = [made("fluid", migration(ratio)) for ratio in (1.2, 9.0, 1.4)]
    (row,) = latency_rows("fluid", runs)
    assert row.name == "fluid, 2 → 4: highest latency, migration vs steady"
    assert (row.ratio, row.holds) == (1.4, True)
    (row,) = latency_rows("fluid", [made("fluid", migration(2.1))])
    assert not row.holds


def test_the_worse_way_counts_for_throughput_and_bytes() -> None:
    run = made("hot", migration(kept=1.0, moved=100), migration(kept=0.9, moved=120))
    assert kept_row("hot", [run]).ratio == pytest.approx(0.9)
    assert not kept_row("hot", [run]).holds
    assert bytes_row("hot", [run]).ratio == pytest.approx(1.2)


def test_the_typical_run_is_the_median_by_its_worse_way() -> None:
    runs = [made("hot", migration(a), migration(b)) for a, b in ((1.0, 3.0), (1.1, 1.2), (2.0, 1.0))]
    assert typical(runs) is runs[2]


def test_every_strategy_is_run_and_only_the_unnoticed_ones_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ours(script: str, *args: Any, timeout: float) -> Run:
        told = dict(zip(args[1::2], args[2::2], strict=False))
        if "--capacity" in args:
            return {"rows_per_second": 2000.0}
        assert told["--rate"] == 1000.0
        asked.append(told["--strategy"])
        return made(told["--strategy"], migration(), migration(**{"from": 4, "to": 3}))

    monkeypatch.setattr(rescale, "ours", ours)
    suite = rescale.Suite(keys=1000, rate=None)
    rows = suite.latency(Options(quick=False, rounds=3, only=()))
    assert asked == [*rescale.STRATEGIES, "fluid", "hot", "fluid", "hot"]
    assert [run["strategy"] for run in suite.measured["runs"]] == list(rescale.STRATEGIES)
    assert len(rows) == 4 + 2 + 4
    assert all(row.holds for row in rows)


def test_all_steps_count_for_growth_and_undisturbed_ones_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, int]] = []

    def ours(script: str, keys: int, *args: Any, timeout: float) -> Run:
        strategy = args[1]
        asked.append((strategy, keys))
        # Two runs in three of the larger state were held up.
        held = 2.0 if keys == 5000 and asked.count((strategy, keys)) != 2 else 0.3
        return made(strategy, migration(longest_step=held, longest_moving_step=held), migration())

    monkeypatch.setattr(rescale, "ours", ours)
    benchmarks = rescale.Suite(keys=1000, rate=None).benchmarks()
    options = Options(quick=False, rounds=3, only=())
    rows = [row for name in ("growth-fluid", "growth-hot") for row in benchmarks[name](options)]
    assert asked == [(strategy, keys) for strategy in ("fluid", "hot") for keys in (5000, 1000) * 3]
    assert [row.holds for row in rows] == [False, False]
    assert rows[0].ratio == pytest.approx(2.0 / 0.3)
    assert "longest step of a migration, undisturbed: 300 vs 300 ms, 1.00" in capsys.readouterr().out


def test_what_was_stolen_is_a_share_of_all_processors_time() -> None:
    samples = [(10.0, 5.0), (10.5, 5.0), (11.0, 5.4), (11.5, 5.4)]
    assert stolen(samples, 10.0, 10.5, 2) == 0.0
    assert stolen(samples, 10.5, 11.0, 2) == pytest.approx(0.4)
    assert stolen(samples, 10.75, 11.5, 2) == pytest.approx(0.2 / 1.5)
    assert stolen([], 10.0, 11.0, 2) == 0.0


def test_the_summary_has_a_line_for_each_migration() -> None:
    lines = summary([made("fluid", migration(), migration())]).splitlines()
    assert len(lines) == 3
    assert len({len(line) for line in lines}) == 1


# What the figures stand on.


def test_the_minimum_is_the_bytes_of_keys_whose_host_changes() -> None:
    hosts = [HostId(f"host-{number}") for number in range(4)]
    before = initial_layout(2, hosts[:2], FixedSharding(8))
    after = rescaled_layout(before, 4, hosts, FixedSharding(8))
    hashes = np.array([(shard << 61) + 5 for shard in range(8)], dtype=np.uint64)
    sizes = np.array([10**shard for shard in range(8)], dtype=np.int64)
    moving = [s for s in range(8) if before.host_of_shard(ShardId(s)) != after.host_of_shard(ShardId(s))]
    assert len(moving) == 4
    assert minimum_bytes(hashes, sizes, before, after) == sum(10**shard for shard in moving)
    assert minimum_bytes(hashes, sizes, before, before) == 0


def test_a_split_of_shards_alone_requires_no_byte() -> None:
    host = [HostId("a"), HostId("b")]
    before = initial_layout(2, host, FixedSharding(8))
    after = rescaled_layout(before, 2, host, FixedSharding(16))
    hashes = np.arange(0, 2**64, 2**56, dtype=np.uint64)
    assert minimum_bytes(hashes, np.ones(len(hashes), dtype=np.int64), before, after) == 0


def test_rows_come_when_a_file_says_so_and_go_on_by_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(rescale_flow, "time", lambda: now[0])
    columns = {"key": ab.uniform_int(0, 10)}
    source = rescale_flow.Scheduled(str(tmp_path / "begin"), columns)
    assert source.discover({}) == []
    (tmp_path / "begin").write_text(json.dumps({"start": 1000.0, "rate": 400.0}))
    now[0] = 1001.0
    assert sum(one.rows for one in source.discover({})) == 400
    # A process that starts later finds what has come meanwhile.
    now[0] = 1010.0
    later = rescale_flow.Scheduled(str(tmp_path / "begin"), columns)
    taken = {PartitionId(str(part)): 100 for part in range(4)}
    assert sum(one.rows for one in later.discover(taken)) == 3600


def test_a_profile_counts_what_the_part_calls_once() -> None:
    outer, inner, stage, caller = (
        ("f.py", n, name) for n, name in enumerate(("outer", "inner", "stage", "main"))
    )
    stats = {
        stage: (1, 1, 6.0, 10.0, {caller: (1, 1, 6.0, 10.0)}),
        outer: (1, 1, 1.0, 3.0, {stage: (1, 1, 1.0, 3.0)}),
        # Half of its time on behalf of `outer`, in whose time it is already.
        inner: (2, 2, 4.0, 4.0, {outer: (1, 1, 2.0, 2.0), stage: (1, 1, 2.0, 2.0)}),
    }
    assert share(stats, lambda one: one == stage, lambda one: one in (outer, inner)) == pytest.approx(0.5)
    with pytest.raises(LookupError, match="none of the functions"):
        share(stats, lambda one: one == stage, lambda one: False)
