"""Faults under a running flow: the step is run again by itself, and the result is as if nothing had happened."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext

import anabranch as ab
from anabranch import crash
from anabranch.errors import AnabranchError, RecordError
from anabranch.model.ids import Step
from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.observe import Silent
from anabranch.runtime.outputs import table
from anabranch.runtime.run import run
from anabranch.spark.shards import SYNCED

ROWS = 20_000
KEYS = 50


class Faults(Silent):
    def __init__(self) -> None:
        self.seen: list[AnabranchError] = []

    def fault(self, step: Step, attempt: int, error: AnabranchError) -> None:
        self.seen.append(error)


def counting_flow(accident: Callable[[], None], flag: Path) -> ab.Flow:
    """Counts by key; behind the count, in the last stage, the accident happens once."""

    def once(row: Any) -> Any:
        try:
            os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return row
        accident()
        return row

    flow = ab.Flow("faulty")
    rows = flow.input("rows", ab.generator(rows=ROWS, keys=KEYS, seed=5))
    rows.key_by("key").count().map(once).output("counts")
    return flow


def expected() -> Counter[int]:
    source = ab.generator(rows=ROWS, keys=KEYS, seed=5)
    counts: Counter[int] = Counter()
    for available in source.discover({}):
        for frame in source.read(source.cut(available, ROWS, 1 << 40), lambda *bad: None):
            counts.update(frame["key"].to_list())
    return counts


def check(job: Path) -> None:
    found = {row["key"]: row["count"] for row in table(JobDir(job), "counts").to_dicts()}
    assert found == expected()


def test_a_killed_python_process(spark: SparkContext, tmp_path: Path) -> None:
    faults = Faults()
    flow = counting_flow(lambda: os.kill(os.getpid(), signal.SIGKILL), tmp_path / "done")
    run(flow, tmp_path / "job", workers=2, until_idle=True, context=spark, listener=faults)
    assert len(faults.seen) == 1
    assert JobDir(tmp_path / "job").status()["faults"][0]["step"] == 0
    check(tmp_path / "job")


def test_a_lost_shuffle_file(spark: SparkContext, tmp_path: Path) -> None:
    # More workers than slots: the first tasks of the last stage take the files away from the later ones.
    folder = spark.getConf().get("spark.local.dir")

    def lose() -> None:
        for path in Path(folder).rglob("shuffle_*"):
            path.unlink(missing_ok=True)

    faults = Faults()
    flow = counting_flow(lose, tmp_path / "done")
    run(flow, tmp_path / "job", workers=12, until_idle=True, context=spark, listener=faults)
    assert faults.seen
    check(tmp_path / "job")


def test_a_function_that_raises_stops_the_flow_and_shows_nothing(spark: SparkContext, tmp_path: Path) -> None:
    def explode() -> None:
        raise ValueError("no such luck")

    flow = counting_flow(explode, tmp_path / "done")
    with pytest.raises(RecordError, match=r"map_1.*no such luck"):
        run(flow, tmp_path / "job", workers=2, until_idle=True, context=spark)
    job = JobDir(tmp_path / "job")
    assert job.status()["state"] == "failed"
    assert table(job, "counts").is_empty()
    # The state that the failed step had written is rolled back when the flow goes on.
    run(flow, tmp_path / "job", workers=3, until_idle=True, context=spark)
    check(tmp_path / "job")


def test_a_python_process_killed_in_an_orderly_stop(
    spark: SparkContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "left"
    left.mkdir()
    (left / "0").touch()
    monkeypatch.setitem(spark.environment, crash.VARIABLE, f"{SYNCED}={left}")
    faults = Faults()
    flow = counting_flow(lambda: None, tmp_path / "done")
    run(flow, tmp_path / "job", workers=2, until_idle=True, context=spark, listener=faults)
    assert not list(left.iterdir())
    assert len(faults.seen) == 1
    assert JobDir(tmp_path / "job").status()["state"] == "stopped"
    check(tmp_path / "job")
