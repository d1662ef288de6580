"""A keyed sum on a loaded state, at a given rate or as fast as it can: what the steps of one window of time took.

The state is loaded first, in large steps and without checkpoints; then the same job goes on with its default step size.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from pyspark import SparkContext

import anabranch as ab
from anabranch.flow.plan import make_plan
from anabranch.log.steplog import Progress
from anabranch.runtime.coordinator import Coordinator
from anabranch.runtime.observe import Silent, StepDone
from anabranch.runtime.settings import Settings
from anabranch.spark.session import spark_context
from bench.harness import scratch
from bench.ours.common import MASTER, answer

_LOAD_STEP = 1_000_000


def flow_of(keys: int, rate: float | None) -> ab.Flow:
    """The sum over an input with every key once, and one of random keys without end."""
    value = ab.uniform_int(-1000, 1000)
    flow = ab.Flow("steady")
    every = flow.input("every", ab.generator(rows=keys, columns={"key": ab.index(), "value": value}))
    columns = {"key": ab.uniform_int(0, keys), "value": value}
    drawn = flow.input("drawn", ab.generator(rate=rate, columns=columns))
    every.union(drawn).key_by("key").sum("value").output("sums")
    return flow


class Window(Silent):
    """Keeps the steps that end in the window and asks for a stop behind it."""

    def __init__(self, job: Path, warm_up: float, seconds: float) -> None:
        self.job = job
        self.warm_up = warm_up
        self.seconds = seconds
        self.kept: list[StepDone] = []
        self.checkpoints = 0
        self.coordinator: Coordinator | None = None
        self._begun: float | None = None
        self._before: int | None = None

    def step(self, done: StepDone, progress: Progress) -> None:
        now = time.monotonic()
        if self._begun is None:
            self._begun = now
        if now - self._begun < self.warm_up:
            return
        if self._before is None:
            self._before = self._newest()
        self.kept.append(done)
        if now - self._begun >= self.warm_up + self.seconds:
            self.checkpoints = self._newest() - self._before
            assert self.coordinator is not None
            self.coordinator.request_stop()

    def _newest(self) -> int:
        return max((int(one.parent.name) for one in self.job.glob("checkpoints/*/manifest")), default=0)


def go(flow: ab.Flow, job: Path, listener: Silent, context: SparkContext, **settings: Any) -> None:
    coordinator = Coordinator(make_plan(flow), job, Settings(workers=2, **settings), listener, context)
    if isinstance(listener, Window):
        listener.coordinator = coordinator
    coordinator.run()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("keys", type=int)
    parser.add_argument("--rate", type=float, help="rows a second; without it, as fast as they are taken")
    parser.add_argument("--checkpoint-seconds", type=float, help="without it, there are no checkpoints")
    parser.add_argument("--warm-up", type=float, default=15.0, help="seconds before the window")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the window")
    args = parser.parse_args()
    with scratch("ours-steady") as root, spark_context("bench", MASTER, {}, root / "spark.log") as context:
        job = root / "job"
        # Both inputs share a step evenly.
        go(
            flow_of(args.keys, None), job, Silent(), context, checkpoint_seconds=None, target_seconds=60.0,
            first_step_rows=_LOAD_STEP, max_step_rows=_LOAD_STEP, steps=math.ceil(2 * args.keys / _LOAD_STEP) + 1,
        )  # fmt: skip
        window = Window(job, args.warm_up, args.seconds)
        flow = flow_of(args.keys, args.rate)
        go(flow, job, window, context, checkpoint_seconds=args.checkpoint_seconds)
    kept = window.kept
    answer(
        steps=len(kept),
        checkpoints=window.checkpoints,
        rows_per_second=sum(one.rows for one in kept) / sum(one.seconds for one in kept),
        median_ms=1000 * statistics.median(one.seconds for one in kept),
        p99_ms=1000 * float(np.percentile([one.seconds for one in kept], 99)),
        commit_ms=1000 * statistics.median(one.commit_seconds for one in kept),
        output_ms=1000 * statistics.median(one.output_seconds for one in kept),
        commit_share=statistics.median(
            (one.commit_seconds + one.output_seconds) / one.seconds for one in kept
        ),
    )


if __name__ == "__main__":
    main()
