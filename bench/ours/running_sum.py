"""A Python `stateful_map` as a running sum per key, one output row per input row."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import anabranch as ab
from bench.harness import scratch
from bench.ours.common import MASTER, Steps, answer


def add(total: int | None, row: Any) -> tuple[int, list[int]]:
    total = (total or 0) + row.value
    return total, [total]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows-per-step", type=int, default=1_000_000)
    args = parser.parse_args()
    with scratch("ours-map") as root:
        flow = ab.Flow("running_sum")
        rows = flow.input("rows", ab.files(args.data, format="parquet"))
        rows.key_by("key").stateful_map(add, schema={"sum": int}).output("sums")
        steps = Steps()
        ab.run(
            flow, root / "job", workers=2, until_idle=True, target_seconds=60.0, max_step_rows=args.rows_per_step,
            first_step_rows=args.rows_per_step, listener=steps, master=MASTER,
        )  # fmt: skip
        answer(rows_per_second=steps.rate(skip=1), steps=len(steps.done))


if __name__ == "__main__":
    main()
