"""Steps of 1,000 and of 100,000 rows on a state of so many keys; memory and bytes written beside them.

The state is loaded first; then files of random keys are added, and the same job goes on over them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

import anabranch as ab
from anabranch.log.steplog import Progress
from anabranch.runtime.observe import StepDone
from bench.harness import scratch
from bench.ours.common import MASTER, Steps, answer


class Watched(Steps):
    """Also looks at Spark's Python processes: bytes they have written, and memory that is not page cache."""

    def __init__(self, skip: int) -> None:
        super().__init__()
        self.skip = skip
        self.written: list[int] = []
        self.private = 0

    def step(self, done: StepDone, progress: Progress) -> None:
        super().step(done, progress)
        workers = python_processes()
        self.written.append(sum(process.io_counters().write_bytes for process in workers))
        self.private = max(self.private, sum(anonymous_bytes(process.pid) for process in workers))

    @property
    def bytes_per_step(self) -> float:
        return (self.written[-1] - self.written[self.skip]) / (len(self.written) - 1 - self.skip)


def anonymous_bytes(pid: int) -> int:
    """Resident memory that no file backs: LMDB's map is page cache, whoever has it mapped."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def python_processes() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [process for process in found if process.name().startswith("python")]


def write(path: Path, keys: np.ndarray[Any, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}")
    pq.write_table(pa.table({"key": keys, "value": np.ones(len(keys), dtype=np.int64)}), hidden)
    hidden.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("keys", type=int)
    parser.add_argument("--small-steps", type=int, default=120)
    parser.add_argument("--large-steps", type=int, default=30)
    args = parser.parse_args()
    rng = np.random.default_rng(5)
    skip = 10
    with scratch("ours-state") as root:
        data = root / "in"
        for number, start in enumerate(range(0, args.keys, 1_000_000)):
            write(data / f"load-{number:03d}.parquet", np.arange(start, min(start + 1_000_000, args.keys)))

        def run(name: str, listener: Steps, rows: int) -> None:
            flow = ab.Flow("state_size")
            flow.input("rows", ab.files(data, format="parquet")).key_by("key").sum("value").output("sums")
            ab.run(
                flow, root / "job", workers=2, until_idle=True, target_seconds=60.0, max_step_rows=rows,
                first_step_rows=rows, listener=listener, master=MASTER,
            )  # fmt: skip

        # In steps like those that are measured: larger ones leave a file of more, and emptier, pages behind.
        run("load", Steps(), 100_000)
        small, large = Watched(skip), Watched(skip)
        for number in range(args.small_steps + skip):
            write(data / f"small-{number:04d}.parquet", rng.integers(0, args.keys, 1_000))
        run("small", small, 1_000)
        for number in range(args.large_steps + skip):
            write(data / f"wide-{number:04d}.parquet", rng.integers(0, args.keys, 100_000))
        run("large", large, 100_000)
        answer(
            small_ms=small.median_ms(skip),
            large_ms=large.median_ms(skip),
            small_bytes=small.bytes_per_step,
            large_bytes=large.bytes_per_step,
            small_memory=small.private,
            large_memory=large.private,
        )


if __name__ == "__main__":
    main()
