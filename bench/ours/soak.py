"""Many small steps: what grows?  Samples over the run of heap after GC, Python's memory, open files, shuffle files."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import psutil
from pyspark import SparkContext

import anabranch as ab
from anabranch.log.steplog import Progress
from anabranch.runtime.observe import Silent, StepDone
from anabranch.spark.session import spark_context
from bench.harness import scratch
from bench.ours.common import MASTER, answer

_SAMPLES = 40


class Sampler(Silent):
    def __init__(self, context: SparkContext, local: Path, every: int) -> None:
        self.context = context
        self.local = local
        self.every = every
        self.samples: list[dict[str, float]] = []

    def step(self, done: StepDone, progress: Progress) -> None:
        if done.step % self.every == 0:
            self.samples.append(self.look())
            print(f"step {done.step}: {self.samples[-1]}", flush=True)

    def look(self) -> dict[str, float]:
        jvm: Any = self.context._jvm
        for _ in range(2):
            jvm.java.lang.System.gc()
        runtime = jvm.java.lang.Runtime.getRuntime()
        me = psutil.Process()
        processes = [me, *me.children(recursive=True)]
        python = [process for process in processes if process.name().startswith("python")]
        return {
            "driver_heap": runtime.totalMemory() - runtime.freeMemory(),
            "python_memory": sum(process.memory_full_info().uss for process in python),
            "open_files": sum(process.num_fds() for process in processes),
            "shuffle_files": sum(1 for _ in self.local.rglob("shuffle_*")),
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    args = parser.parse_args()
    with scratch("ours-soak") as root:
        local = root / "local"
        with spark_context("soak", MASTER, {"spark.local.dir": str(local)}, root / "spark.log") as context:
            flow = ab.Flow("soak")
            rows = flow.input("rows", ab.generator(keys=10_000))
            rows.key_by("key").sum("value").output("sums")
            sampler = Sampler(context, local, max(1, args.steps // _SAMPLES))
            ab.run(
                flow,
                root / "job",
                workers=2,
                steps=args.steps,
                max_step_rows=200,
                context=context,
                listener=sampler,
            )
    # The first quarter is warm-up; then the end is compared with the beginning.
    kept = sampler.samples[len(sampler.samples) // 4 :]
    third = max(1, len(kept) // 3)
    answer(
        steps=args.steps,
        **{
            name: [
                statistics.median(sample[name] for sample in kept[:third]),
                statistics.median(sample[name] for sample in kept[-third:]),
            ]
            for name in kept[0]
        },
    )


if __name__ == "__main__":
    main()
