"""Bytewax's `stateful_map` as a running sum per key, its recovery store on, with two workers.

Every way of running it (two threads of one process or two processes; each epoch interval) is a run of its own
with fresh recovery partitions; the fastest is reported. Bytewax's keys are strings, so the data set should
have string keys: converting numbers would be charged to Bytewax.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import bytewax.operators as op
import pyarrow.parquet as pq
from bytewax._bytewax import cli_main
from bytewax.dataflow import Dataflow
from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.recovery import RecoveryConfig, init_db_dir

WORKERS = 2

Item = tuple[str, int]


class Span:
    """When this process produced its first row, when it ended, and how many rows its sinks were given."""

    def __init__(self) -> None:
        self.first = float("inf")
        self.rows = 0


SPAN = Span()


class Files(StatefulSourcePartition[Item, int]):
    """Some of the files, in order; the state is the number of batches that were read."""

    def __init__(self, files: list[Path], batch: int, done: int) -> None:
        self.batches = (
            (part["key"].to_pylist(), part["value"].to_pylist())
            for file in files
            for part in pq.ParquetFile(file).iter_batches(batch, columns=["key", "value"])
        )
        self.done = done
        for _ in range(done):
            next(self.batches)

    def next_batch(self) -> list[Item]:
        if SPAN.first == float("inf"):
            SPAN.first = time.time()
        keys, values = next(self.batches)
        self.done += 1
        return list(zip(keys, values, strict=True))

    def snapshot(self) -> int:
        return self.done


class Source(FixedPartitionedSource[Item, int]):
    def __init__(self, files: list[Path], batch: int) -> None:
        self.files = files
        self.batch = batch

    def list_parts(self) -> list[str]:
        return [str(part) for part in range(WORKERS)]

    def build_part(self, step_id: str, for_part: str, resume_state: int | None) -> Files:
        return Files(self.files[int(for_part) :: WORKERS], self.batch, resume_state or 0)


class Counter(StatelessSinkPartition[Any]):
    def write_batch(self, items: list[Any]) -> None:
        SPAN.rows += len(items)


class Count(DynamicSink[Any]):
    def build(self, step_id: str, worker_index: int, worker_count: int) -> Counter:
        return Counter()


def running_sum(total: int | None, value: int) -> tuple[int, int]:
    total = value if total is None else total + value
    return total, total


def worker(args: argparse.Namespace) -> None:
    """One process of a run; prints its span."""
    flow = Dataflow("running_sum")
    files = sorted(args.data.glob("*.parquet"))[: args.files]
    rows = op.input("read", flow, Source(files, args.batch))
    op.output("count", op.stateful_map("sum", rows, running_sum), Count())
    addresses = args.addresses.split(",") if args.addresses else None
    cli_main(
        flow,
        workers_per_process=1 if addresses else WORKERS,
        process_id=args.process if addresses else None,
        addresses=addresses,
        epoch_interval=timedelta(seconds=args.epoch),
        recovery_config=RecoveryConfig(args.recovery),
    )
    print(json.dumps({"first": SPAN.first, "last": time.time(), "rows": SPAN.rows}))


def run(args: argparse.Namespace, mode: str, epoch: float, batch: int) -> float:
    """Rows per second from the first row read to the last epoch recorded."""
    recovery = Path(tempfile.mkdtemp(prefix="bench-bytewax-"))
    try:
        init_db_dir(recovery, WORKERS)
        command = [
            sys.executable,
            __file__,
            str(args.data),
            "--files",
            str(args.files),
            "--recovery",
            str(recovery),
        ]
        command += ["--epoch", str(epoch), "--batch", str(batch)]
        extra = [["--process", "0"]]
        if mode == "processes":
            addresses = ",".join(f"127.0.0.1:{port}" for port in free_ports(WORKERS))
            extra = [["--addresses", addresses, "--process", str(number)] for number in range(WORKERS)]
        children = [subprocess.Popen([*command, *more], stdout=subprocess.PIPE) for more in extra]
        spans = [json.loads(child.communicate()[0].splitlines()[-1]) for child in children]
        rows = sum(span["rows"] for span in spans)
        return rows / (max(span["last"] for span in spans) - min(span["first"] for span in spans))
    finally:
        shutil.rmtree(recovery, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(held.getsockname()[1]) for held in sockets]
    for held in sockets:
        held.close()
    return ports


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--files", type=int, default=8, help="files of the data set to read")
    parser.add_argument("--modes", default="threads,processes")
    parser.add_argument("--epochs", default="1,10", help="epoch intervals to try, in seconds")
    parser.add_argument("--batches", default="1000", help="rows per source batch to try")
    for option in ("--process", "--batch"):
        parser.add_argument(option, type=int, help=argparse.SUPPRESS)
    for option in ("--addresses", "--recovery"):
        parser.add_argument(option, help=argparse.SUPPRESS)
    parser.add_argument("--epoch", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process is not None:
        worker(args)
        return
    tried = {
        (mode, float(epoch), int(batch)): run(args, mode, float(epoch), int(batch))
        for mode in args.modes.split(",")
        for epoch in args.epochs.split(",")
        for batch in args.batches.split(",")
    }
    best = max(tried, key=lambda way: tried[way])
    result = {
        "rows_per_second": tried[best],
        "mode": best[0],
        "epoch_seconds": best[1],
        "batch": best[2],
        "tried": {
            f"{mode}, epoch {epoch:g} s, batch {batch}": round(v) for (mode, epoch, batch), v in tried.items()
        },
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
