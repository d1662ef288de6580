"""A CPU-bound flow (a Python function that computes for every row) with a given number of workers on two cores."""

from __future__ import annotations

import argparse
import zlib
from typing import Any

import anabranch as ab
from bench.harness import scratch
from bench.ours.common import MASTER, Steps, answer


def work(row: Any) -> tuple[int, int]:
    value = row.value
    for _ in range(20):
        value = zlib.crc32(value.to_bytes(8, "little"))
    return row.key, value & 0xFFFF


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workers", type=int)
    parser.add_argument("--rows", type=int, default=8_000_000)
    args = parser.parse_args()
    with scratch("ours-scale") as root:
        flow = ab.Flow("scale")
        rows = flow.input("rows", ab.generator(rows=args.rows, keys=10_000))
        rows.map(work, schema={"key": int, "value": int}).key_by("key").sum("value").output("sums")
        steps = Steps()
        ab.run(
            flow, root / "job", workers=args.workers, until_idle=True, target_seconds=60.0, max_step_rows=1_000_000,
            first_step_rows=1_000_000, listener=steps, master=MASTER,
        )  # fmt: skip
        answer(rows_per_second=steps.rate(skip=2))


if __name__ == "__main__":
    main()
