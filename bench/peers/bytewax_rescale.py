"""Bytewax from 2 to 4 workers with a loaded state: stop, start again with recovery; the seconds without output.

A running sum per key. The source first gives every key once, then random keys on a schedule that goes on while nobody
reads, as an open load does. To stop, the source says that it is at its end: the last epoch is then complete and stored, and
nothing has to be replayed. That is the kindest way there is; a killed one goes back to its last stored epoch.
Workers are tried as threads of one process and as processes; each is a run of its own with fresh recovery partitions.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import bytewax.operators as op
from bytewax._bytewax import cli_main
from bytewax.dataflow import Dataflow
from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.recovery import RecoveryConfig, init_db_dir

PARTITIONS = 4
BATCH = 1_000

Item = tuple[str, int]


class Rows(StatefulSourcePartition[Item, int]):
    """One partition: its share of all keys, then random ones by the clock. The state is the number of rows given."""

    def __init__(self, work: Path, number: int, keys: int, given: int) -> None:
        self.work = work
        self.number = number
        self.keys = keys
        self.given = given
        self.load = len(range(number, keys, PARTITIONS))
        self.begin: tuple[float, float] | None = None

    def next_batch(self) -> list[Item]:
        if (self.work / "stop").exists():
            raise StopIteration
        low = self.given
        high = min(low + BATCH, self.load) if low < self.load else min(low + BATCH, self._due())
        self.given = high
        draw = random.Random(low * PARTITIONS + self.number)
        return [
            (str(row * PARTITIONS + self.number if row < self.load else draw.randrange(self.keys)), 1)
            for row in range(low, high)
        ]

    def _due(self) -> int:
        """Rows that have arrived by now."""
        if self.begin is None:
            try:
                told = json.loads((self.work / "begin").read_text())
            except FileNotFoundError:
                return self.given
            self.begin = told["start"], told["rate"] / PARTITIONS
        start, rate = self.begin
        return max(self.given, self.load + int((time.time() - start) * rate))

    def snapshot(self) -> int:
        return self.given


class Source(FixedPartitionedSource[Item, int]):
    def __init__(self, work: Path, keys: int, out: Path) -> None:
        self.work = work
        self.keys = keys
        self.out = out

    def list_parts(self) -> list[str]:
        return [str(part) for part in range(PARTITIONS)]

    def build_part(self, step_id: str, for_part: str, resume_state: int | None) -> Rows:
        (self.out / f"resumed-{for_part}").write_text(str(resume_state or 0))
        return Rows(self.work, int(for_part), self.keys, resume_state or 0)


class Told(StatelessSinkPartition[Any]):
    """Says of every batch when it was there, and how many rows there were in all."""

    def __init__(self, path: Path) -> None:
        self.out = path.open("a")
        self.rows = 0

    def write_batch(self, items: list[Any]) -> None:
        self.rows += len(items)
        self.out.write(f"{time.time()} {self.rows}\n")
        self.out.flush()


class Tell(DynamicSink[Any]):
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def build(self, step_id: str, worker_index: int, worker_count: int) -> Told:
        return Told(self.directory / f"out-{worker_index}")


def running_sum(total: int | None, value: int) -> tuple[int, int]:
    total = value if total is None else total + value
    return total, total


def worker(args: argparse.Namespace) -> None:
    """One process of a run, until its source ends."""
    flow = Dataflow("rescaled")
    rows = op.input("read", flow, Source(args.work, args.keys, args.out))
    op.output("tell", op.stateful_map("sum", rows, running_sum), Tell(args.out))
    addresses = args.addresses.split(",") if args.addresses else None
    cli_main(
        flow,
        workers_per_process=1 if addresses else args.workers,
        process_id=args.process if addresses else None,
        addresses=addresses,
        epoch_interval=timedelta(seconds=args.epoch),
        recovery_config=RecoveryConfig(str(args.work / "recovery")),
    )


@contextlib.contextmanager
def running(args: argparse.Namespace, work: Path, mode: str, workers: int) -> Iterator[Path]:
    """The flow at work; asked to stop at the end, and waited for. Gives the directory that tells of its outputs."""
    out = work / f"told-{workers}"
    out.mkdir()
    (work / "stop").unlink(missing_ok=True)
    command = [
        sys.executable,
        __file__,
        str(args.keys),
        str(args.rate),
        "--work",
        str(work),
        "--out",
        str(out),
    ]
    command += ["--workers", str(workers), "--epoch", str(args.epoch)]
    extra = [["--process", "0"]]
    if mode == "processes":
        addresses = ",".join(f"127.0.0.1:{port}" for port in free_ports(workers))
        extra = [["--addresses", addresses, "--process", str(number)] for number in range(workers)]
    children = [subprocess.Popen([*command, *more]) for more in extra]
    try:
        yield out
    finally:
        (work / "stop").touch()
        for child in children:
            if child.wait(600) != 0:
                raise SystemExit(f"a process of {workers} workers ended with {child.returncode}")


def measure(args: argparse.Namespace, mode: str) -> dict[str, float]:
    work = Path(tempfile.mkdtemp(prefix="bench-bytewax-"))
    try:
        (work / "recovery").mkdir()
        init_db_dir(work / "recovery", PARTITIONS)
        with running(args, work, mode, args.before) as out:
            until(lambda: rows_of(out) >= args.keys)
            # An epoch with the whole state is stored before the load begins.
            time.sleep(2 * args.epoch)
            (work / "begin").write_text(json.dumps({"start": time.time(), "rate": args.rate}))
            time.sleep(args.seconds)
            asked = time.time()
        stopped = time.time()
        last = max(times_of(out))
        shown = rows_of(out)
        with running(args, work, mode, args.after) as out:
            until(lambda: bool(times_of(out)))
            first = min(times_of(out))
        resumed = sum(int(path.read_text()) for path in out.glob("resumed-*"))
        if resumed != shown:
            raise SystemExit(f"it went on behind {resumed} rows and had shown {shown}: that is no clean stop")
        return {
            "seconds": first - last,
            "stopping": stopped - asked,
            "starting": first - stopped,
            "rows": shown,
        }
    finally:
        shutil.rmtree(work, ignore_errors=True)


def rows_of(out: Path) -> int:
    return sum(int(lines[-1][1]) for lines in told(out))


def times_of(out: Path) -> list[float]:
    return [float(line[0]) for lines in told(out) for line in lines]


def told(out: Path) -> list[list[list[str]]]:
    found = [[line.split() for line in path.read_text().splitlines()] for path in out.glob("out-*")]
    # The last line may be half written.
    whole = [[line for line in lines if len(line) == 2] for lines in found]
    return [lines for lines in whole if lines]


def until(condition: Any, timeout: float = 600) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("waited in vain")
        time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(held.getsockname()[1]) for held in sockets]
    for held in sockets:
        held.close()
    return ports


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("keys", type=int)
    parser.add_argument("rate", type=float)
    parser.add_argument("--before", type=int, default=2, help="workers before")
    parser.add_argument("--after", type=int, default=4, help="workers after")
    parser.add_argument("--seconds", type=float, default=10.0, help="of load before the stop")
    parser.add_argument("--epoch", type=float, default=1.0)
    parser.add_argument("--modes", default="threads,processes")
    for option in ("--process", "--workers"):
        parser.add_argument(option, type=int, help=argparse.SUPPRESS)
    for option in ("--work", "--out"):
        parser.add_argument(option, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--addresses", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process is not None:
        worker(args)
        return
    tried = {mode: measure(args, mode) for mode in args.modes.split(",")}
    best = min(tried, key=lambda mode: tried[mode]["seconds"])
    print(json.dumps({**tried[best], "mode": best, "tried": tried}), flush=True)


if __name__ == "__main__":
    main()
