"""Flows that really run: on, stopped, gone on with, over growing and over bad input."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext

import anabranch as ab
from anabranch.errors import JobDirError, RecordError
from anabranch.log.steplog import Progress, StepLog
from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.observe import Silent, StepDone
from anabranch.runtime.outputs import changes, output_names, table
from anabranch.runtime.run import run
from anabranch.storage import open_storage

WAIT = 60.0


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def words_flow(lines: Path, sink: Any = None) -> ab.Flow:
    flow = ab.Flow("words")
    words = flow.input("lines", ab.files(lines, format="text")).flat_map(str.split)
    words.key_by("value").count().output("counts", sink)
    return flow


def found_counts(job: Path) -> dict[str, int]:
    return {row["value"]: row["count"] for row in table(JobDir(job), "counts").to_dicts()}


class Watcher(Silent):
    def __init__(self) -> None:
        self.steps: list[StepDone] = []
        self.idles = 0
        self.idle_now = threading.Event()

    def step(self, done: StepDone, progress: Progress) -> None:
        self.idle_now.clear()
        self.steps.append(done)

    def idle(self, progress: Progress) -> None:
        self.idles += 1
        self.idle_now.set()


class Running:
    """A flow in a thread of its own, stopped at the end."""

    def __init__(self, flow: ab.Flow, job: Path, context: SparkContext, **settings: Any) -> None:
        self.job = JobDir(job)
        self.watcher = Watcher()
        self.result: Progress | BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(flow, job, context, settings))

    def _run(self, flow: ab.Flow, job: Path, context: SparkContext, settings: dict[str, Any]) -> None:
        try:
            self.result = run(flow, job, context=context, listener=self.watcher, **settings)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.result = error

    def __enter__(self) -> Running:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.thread.is_alive():
            wait_for(lambda: not self.thread.is_alive() or self.job.status()["state"] in ("running", "idle"))
            self.job.ask_to_stop()
        self.thread.join(WAIT)
        assert not self.thread.is_alive()


def test_some_steps_and_then_the_rest_with_other_workers(spark: SparkContext, tmp_path: Path) -> None:
    def flow() -> ab.Flow:
        made = ab.Flow("sums")
        rows = made.input("rows", ab.generator(rows=30_000, keys=100, seed=3, partitions=3))
        rows.key_by("key").aggregate(n=ab.count(), total=ab.sum("value")).output("sums")
        return made

    job = tmp_path / "job"
    # So long a target that the limit alone decides.
    limits: dict[str, Any] = {"context": spark, "max_step_rows": 5_000, "target_seconds": 600.0}
    first = run(flow(), job, workers=2, steps=2, **limits)
    assert (first.next_step, first.input_rows) == (2, 10_000)
    assert JobDir(job).status()["state"] == "stopped"
    second = run(flow(), job, workers=3, steps=1, **limits)
    assert (second.next_step, second.input_rows) == (3, 15_000)
    assert run(flow(), job, steps=0, **limits) == second
    last = run(flow(), job, workers=1, until_idle=True, **limits)
    assert (last.next_step, last.input_rows) == (6, 30_000)
    assert StepLog(open_storage(job / "log")).load() == last
    record = JobDir(job).placement()
    assert record is not None
    layout = record.layout
    assert (layout.version, len(layout.workers)) == (2, 1)

    source = ab.generator(rows=30_000, keys=100, seed=3, partitions=3)
    counts: Counter[int] = Counter()
    totals: Counter[int] = Counter()
    for available in source.discover({}):
        for frame in source.read(source.cut(available, 30_000, 1 << 40), lambda *bad: None):
            counts.update(frame["key"].to_list())
            for key, value in zip(frame["key"].to_list(), frame["value"].to_list(), strict=True):
                totals[key] += value
    rows = table(JobDir(job), "sums").to_dicts()
    assert {row["key"]: row["n"] for row in rows} == counts
    assert {row["key"]: row["total"] for row in rows} == totals
    assert {row["__weight"] for row in rows} == {1}
    # The table is what the changes add up to, and they are in the order of steps.
    steps = changes(JobDir(job), "sums")["__step"].to_list()
    assert steps == sorted(steps)
    assert set(steps) == set(range(6))
    assert changes(JobDir(job), "sums", last.next_step).is_empty()


def test_a_growing_directory(spark: SparkContext, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.mkdir()
    (lines / "a.txt").write_text("to be or\n")
    seen: list[dict[str, Any]] = []
    with Running(words_flow(lines, ab.memory(seen)), tmp_path / "job", spark, workers=2) as running:
        wait_for(lambda: len(seen) >= 3)
        assert running.watcher.idle_now.wait(WAIT)
        with open(lines / "a.txt", "a") as file:
            file.write("not to be\n")
        wait_for(lambda: any(row["value"] == "not" for row in seen))
        (lines / "b.txt").write_text("be quick\n")
        wait_for(lambda: any(row["value"] == "quick" for row in seen))
        wait_for(lambda: running.job.status()["state"] == "idle")
        with pytest.raises(JobDirError, match=r"is being run by process"):
            run(words_flow(lines, ab.memory([])), tmp_path / "job", context=spark)
    assert isinstance(running.result, Progress)
    assert running.result.input_rows == 3
    assert running.job.status()["state"] == "stopped"
    assert found_counts(tmp_path / "job") == {"to": 2, "be": 3, "or": 1, "not": 1, "quick": 1}
    # In memory, too, changes add up to the table.
    total: Counter[tuple[str, int]] = Counter()
    for row in seen:
        total[row["value"], row["count"]] += row["__weight"]
    assert {key: 1 for key, weight in total.items() if weight} == {
        ("to", 2): 1,
        ("be", 3): 1,
        ("or", 1): 1,
        ("not", 1): 1,
        ("quick", 1): 1,
    }
    assert running.watcher.idles >= 2


def test_an_idle_flow_wakes_quickly(spark: SparkContext, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.mkdir()
    (lines / "a.txt").write_text("first\n")
    with Running(words_flow(lines), tmp_path / "job", spark, workers=2) as running:
        wait_for(lambda: running.watcher.idle_now.is_set())
        began = time.monotonic()
        (lines / "b.txt").write_text("second\n")
        wait_for(lambda: len(running.watcher.steps) == 2)
        # From the file to the visible step: a bound for a busy machine, not a promise.
        assert time.monotonic() - began < 5
    assert found_counts(tmp_path / "job") == {"first": 1, "second": 1}


def orders_flow(orders: Path, on_error: Any = "stop") -> ab.Flow:
    flow = ab.Flow("orders", on_error=on_error)
    schema = {"id": int, "price": float}
    rows = flow.input("orders", ab.files(orders, format="jsonl", schema=schema))
    rows.map(lambda row: (row.id, 1 / row.price), schema={"id": int, "inverse": float}, name="invert").output(
        "out"
    )
    return flow


def write_orders(orders: Path, *lines: str) -> None:
    orders.mkdir(exist_ok=True)
    (orders / "a.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_a_malformed_record_stops_the_flow(spark: SparkContext, tmp_path: Path) -> None:
    orders = tmp_path / "orders"
    write_orders(orders, '{"id": 1, "price": 2}', '{"id": 2, "price": "dear"}', '{"id": 3, "price": 4}')
    with pytest.raises(RecordError, match=r"input 'orders', step 0, .*a\.jsonl.*line 2.*dear"):
        run(orders_flow(orders), tmp_path / "job", workers=2, until_idle=True, context=spark)
    job = JobDir(tmp_path / "job")
    assert job.status()["state"] == "failed"
    assert "a.jsonl" in job.status()["error"]
    assert changes(job, "out").is_empty()
    assert not list((tmp_path / "job" / "outputs").glob("*/*.parquet"))
    # Mended, it goes on.
    write_orders(orders, '{"id": 1, "price": 2}', '{"id": 2, "price": 5.0}', '{"id": 3, "price": 4}')
    run(orders_flow(orders), tmp_path / "job", until_idle=True, context=spark)
    assert table(job, "out")["id"].to_list() == [1, 2, 3]
    assert job.status()["error"] is None


def test_dead_letters(spark: SparkContext, tmp_path: Path) -> None:
    orders = tmp_path / "orders"
    write_orders(
        orders,
        '{"id": 1, "price": 2}',
        "not json",
        '{"id": 3, "price": 0}',
        '{"id": 4}',
        '{"id": 5, "price": 4}',
    )
    watcher = Watcher()
    run(
        orders_flow(orders, "dead_letter"),
        tmp_path / "job",
        workers=2,
        until_idle=True,
        context=spark,
        listener=watcher,
    )
    job = JobDir(tmp_path / "job")
    assert table(job, "out").select("id", "inverse").rows() == [(1, 0.5), (5, 0.25)]
    letters = table(job, "dead_letters").to_dicts()
    assert Counter(letter["operator"] for letter in letters) == {"orders": 2, "invert": 1}
    by_record = {letter["record"]: letter for letter in letters}
    assert "a.jsonl" in by_record["not json"]["where"]
    assert "line 2" in by_record["not json"]["where"]
    assert "price" in by_record['{"id": 4}']["reason"]
    raised = next(letter for letter in letters if letter["operator"] == "invert")
    assert "ZeroDivisionError" in raised["reason"]
    assert "id=3" in raised["record"]
    assert sum(done.dead_letters for done in watcher.steps) == 3
    assert output_names(job) == ["out", "dead_letters"]


def test_the_console(spark: SparkContext, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "lines"
    lines.mkdir()
    (lines / "a.txt").write_text("a a b\n")
    run(words_flow(lines, ab.console()), tmp_path / "job", workers=2, until_idle=True, context=spark)
    printed = capsys.readouterr().out.splitlines()
    assert sorted(printed) == ["step 0  +1  value='a', count=2", "step 0  +1  value='b', count=1"]
    assert found_counts(tmp_path / "job") == {"a": 2, "b": 1}


def test_a_flow_without_rows(spark: SparkContext, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.mkdir()
    progress = run(words_flow(lines), tmp_path / "job", workers=2, until_idle=True, context=spark)
    assert replace(progress, placement=None) == Progress()
    job = JobDir(tmp_path / "job")
    assert changes(job, "counts").columns == ["value", "count", "__weight", "__step"]
    assert table(job, "counts").columns == ["value", "count", "__weight"]
    assert table(job, "counts").is_empty()
    assert table(job, "dead_letters").columns == ["operator", "where", "record", "reason", "__weight"]
    with pytest.raises(JobDirError, match=r"no output 'nope'; it has counts, dead_letters"):
        table(job, "nope")


def test_logical_hosts_have_state_of_their_own(spark: SparkContext, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.mkdir()
    (lines / "a.txt").write_text(" ".join(f"w{n}" for n in range(200)) + "\n")
    run(words_flow(lines), tmp_path / "job", workers=2, hosts=2, until_idle=True, context=spark)
    (lines / "b.txt").write_text("w0 w1\n")
    run(words_flow(lines), tmp_path / "job", workers=4, until_idle=True, context=spark)
    assert {path.name for path in (tmp_path / "job" / "state").iterdir()} == {"host-0", "host-1"}
    assert found_counts(tmp_path / "job") == {f"w{n}": 2 if n < 2 else 1 for n in range(200)}
    (lines / "c.txt").write_text("w0 w199\n")
    run(words_flow(lines), tmp_path / "job", hosts=1, until_idle=True, context=spark)
    expected = {f"w{n}": 2 if n in (1, 199) else 1 for n in range(200)} | {"w0": 3}
    assert found_counts(tmp_path / "job") == expected
