"""Steps of 1,000 rows on a loaded state: the median from planning a step to its commit record."""

from __future__ import annotations

import argparse
from pathlib import Path

import anabranch as ab
from bench.harness import scratch
from bench.ours.common import MASTER, Steps, answer
from bench.ours.keyed_sum import flow_over


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path, help="a file with every key, then files of 1,000 rows")
    parser.add_argument("--warm-up", type=int, default=150, help="steps before the measured ones")
    args = parser.parse_args()
    with scratch("ours-step") as root:
        steps = Steps()
        ab.run(
            flow_over(args.data), root / "job", workers=2, until_idle=True, max_step_rows=1000, listener=steps, master=MASTER
        )  # fmt: skip
        answer(median_ms=steps.median_ms(skip=args.warm_up), steps=len(steps.done) - args.warm_up)


if __name__ == "__main__":
    main()
