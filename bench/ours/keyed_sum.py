"""Our keyed sum over the same Parquet files: two workers, output to Parquet, synced at every step.

Every step size given is run in one warm Spark; the best is reported.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import anabranch as ab
from anabranch.spark.session import spark_context
from bench.harness import scratch
from bench.ours.common import MASTER, Steps, answer


def flow_over(data: Path) -> ab.Flow:
    flow = ab.Flow("keyed_sum")
    rows = flow.input("rows", ab.files(data, format="parquet"))
    rows.key_by("key").sum("value").output("sums")
    return flow


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows-per-step", default="1000000,4000000,16000000")
    parser.add_argument(
        "--warm-up", type=int, default=6, help="steps of a million rows before anything is measured"
    )
    args = parser.parse_args()
    tried: dict[int, float] = {}
    with scratch("ours-sum") as root, spark_context("bench", MASTER, {}, root / "spark.log") as context:
        plain = {"workers": 2, "until_idle": True, "target_seconds": 60.0, "context": context}
        ab.run(flow_over(args.data), root / "warm", steps=args.warm_up, max_step_rows=1_000_000, **plain)
        for size in (int(text) for text in args.rows_per_step.split(",")):
            steps = Steps()
            # From the first step on as large as allowed: the sizer would otherwise grow towards it.
            ab.run(
                flow_over(args.data), root / str(size), max_step_rows=size, first_step_rows=size,
                max_step_bytes=4 << 30, listener=steps, **plain,
            )  # fmt: skip
            tried[size] = steps.rate(skip=1)
    best = max(tried, key=lambda size: tried[size])
    answer(
        rows_per_second=tried[best],
        rows_per_step=best,
        tried={str(size): round(found) for size, found in tried.items()},
    )


if __name__ == "__main__":
    main()
