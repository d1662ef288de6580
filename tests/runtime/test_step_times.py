"""What a step says of its own duration."""

from __future__ import annotations

from pathlib import Path

from pyspark import SparkContext

import anabranch as ab
from anabranch.log.steplog import Progress
from anabranch.runtime.steploop import _slowest
from anabranch.runtime.observe import Silent, StepDone
from anabranch.runtime.run import run
from anabranch.spark.spec import Report


class Watcher(Silent):
    def __init__(self) -> None:
        self.steps: list[StepDone] = []

    def step(self, done: StepDone, progress: Progress) -> None:
        self.steps.append(done)


def test_commit_and_outputs_are_parts_of_a_step(spark: SparkContext, tmp_path: Path) -> None:
    flow = ab.Flow("sums")
    rows = flow.input("rows", ab.generator(rows=2_000, keys=10))
    rows.key_by("key").sum("value").output("sums")
    watcher = Watcher()
    run(
        flow,
        tmp_path / "job",
        workers=2,
        until_idle=True,
        max_step_rows=1_000,
        context=spark,
        listener=watcher,
    )
    assert len(watcher.steps) == 2
    for done in watcher.steps:
        assert done.commit_seconds > 0
        assert done.output_seconds > 0
        assert done.commit_seconds + done.output_seconds < done.seconds


def test_the_slowest_worker_is_the_one_with_the_largest_sum_over_its_stages() -> None:
    reports = [
        Report(worker, stage, "host", 1, seconds={"output": seconds, "run": 9.0})  # type: ignore[arg-type]
        for worker, stage, seconds in [(0, 0, 0.5), (0, 1, 0.25), (1, 0, 0.5)]
    ]
    reports.append(Report(1, 1, "host", 1, seconds={"run": 9.0}))  # type: ignore[arg-type]
    assert _slowest(reports, "output") == 0.75
    assert _slowest([], "output") == 0.0
