"""Bytes of a full checkpoint, and of those after some keys changed; as they lie on disk, manifests included."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import anabranch as ab
from anabranch.spark.session import spark_context
from bench.harness import scratch
from bench.ours.common import MASTER, answer
from bench.ours.keyed_sum import flow_over
from bench.ours.state_size import write

_STEP = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("keys", type=int)
    parser.add_argument(
        "--changed", type=int, default=10_000, help="keys that change between two checkpoints"
    )
    parser.add_argument("--checkpoints", type=int, default=5, help="how many of them")
    args = parser.parse_args()
    rng = np.random.default_rng(5)
    with scratch("ours-changed") as root, spark_context("bench", MASTER, {}, root / "spark.log") as context:
        data, job = root / "in", root / "job"
        plain = {"workers": 2, "until_idle": True, "context": context}
        loaded = {"target_seconds": 60.0, "first_step_rows": _STEP, "max_step_rows": _STEP}
        for number, start in enumerate(range(0, args.keys, _STEP)):
            write(data / f"load-{number:03d}.parquet", np.arange(start, min(start + _STEP, args.keys)))
        flow = flow_over(data)
        # Without undo records, which would bring checkpoints before all keys are there.
        ab.run(flow, job, checkpoint_seconds=None, **plain, **loaded)
        # A run ends with a checkpoint of what is new.
        ab.run(flow, job, checkpoint_seconds=3600.0, **plain)
        full = newest_bytes(job)
        written = []
        for number in range(args.checkpoints):
            write(data / f"more-{number:03d}.parquet", rng.choice(args.keys, args.changed, replace=False))
            ab.run(flow, job, checkpoint_seconds=3600.0, **plain)
            written.append(newest_bytes(job))
        answer(full=full, written=written)


def newest_bytes(job: Path) -> int:
    newest = max(one.parent for one in job.glob("checkpoints/*/manifest"))
    return sum(one.stat().st_size for one in newest.iterdir())


if __name__ == "__main__":
    main()
