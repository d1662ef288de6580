"""One run under an open load, in a process of its own: steady, 2 → 4 → 3 workers by one strategy, steady again.

`anabranch run` is started as a user would; every worker has a logical host of its own (`--hosts one` puts all on one), so
that state really moves. All keys are in state, and a checkpoint is made, before the load begins. What is reported
follows from the records in the job directory after the flow has stopped, and from the memory of its processes.
With `--capacity` the load is as much as the flow takes, nothing is rescaled, and the answer is rows a second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from anabranch.log.steplog import StepLog
from anabranch.model.ids import Epoch, Step
from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.jobhandle import Job
from bench.harness import ROOT, PeerFailed, inherited, scratch
from bench.openloop import Latencies, Schedule, Seen, judge, seen, timeline
from bench.ours.common import answer
from bench.ours.rescale_bytes import keys_of, layouts_of, minimum_bytes
from bench.ours.rescale_flow import BEGIN_VARIABLE, KEYS_VARIABLE, PARTITIONS
from bench.ours.state_size import anonymous_bytes
from bench.weather import CALM, Weather

INPUT = "drawn"
WORKERS = (2, 4, 3)
_MASTER = "local[4]"
"""A slot for each worker of the largest layout. There are two cores all the same."""
_SETTLE = 2.0
_LOOK = 0.05


class Running:
    """A flow that runs, and the load that it gets."""

    def __init__(self, root: Path, child: subprocess.Popen[bytes]) -> None:
        self.root = root
        self.child = child
        self.job_path = root / "job"

    @property
    def job(self) -> Job:
        return Job(self.job_path)

    def wait(self, what: str, rows: int, timeout: float = 900) -> None:
        """Until so many rows were taken."""
        deadline = time.monotonic() + timeout
        while JobDir(self.job_path).status().get("input_rows", 0) < rows:
            if self.child.poll() is not None or time.monotonic() > deadline:
                raise PeerFailed(f"waited in vain for {what}; the flow said\n{self.said()}")
            time.sleep(_LOOK)

    def said(self) -> str:
        return (self.root / "run.log").read_text(errors="replace")[-3000:]

    def begin(self, rate: float | None) -> float:
        """Let the load begin; when it did."""
        start = time.time()
        hidden = self.root / "begin.new"
        hidden.write_text(json.dumps({"start": start, "rate": rate}))
        hidden.rename(self.root / "begin")
        return start

    def rest(self, seconds: float) -> None:
        """Nothing happens; but a flow that died is noticed."""
        try:
            self.child.wait(seconds)
        except subprocess.TimeoutExpired:
            return
        raise PeerFailed(f"the flow ended by itself; it said\n{self.said()}")


@contextlib.contextmanager
def running(root: Path, args: argparse.Namespace) -> Iterator[Running]:
    """The flow, with all keys in state and no load yet; killed at the end if it has not stopped."""
    hosts = 1 if args.hosts == "one" else WORKERS[0]
    command = [sys.executable, "-m", "anabranch.cli.main", "run", "bench/ours/rescale_flow.py:flow"]
    command += ["--dir", str(root / "job"), "--workers", str(WORKERS[0]), "--hosts", str(hosts)]
    command += ["--master", _MASTER, "--checkpoint-every", args.checkpoint_every]
    variables = {KEYS_VARIABLE: str(args.keys), BEGIN_VARIABLE: str(root / "begin")}
    with (root / "run.log").open("wb") as out:
        child = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env={**inherited(), **variables}
        )
    flow = Running(root, child)
    try:
        flow.wait("all keys to be in state", args.keys)
        flow.job.checkpoint(timeout=600)
        yield flow
    finally:
        if child.poll() is None:
            for process in [*psutil.Process(child.pid).children(recursive=True), psutil.Process(child.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        child.wait()


class Memory(threading.Thread):
    """Looks a few times a second at the memory of a process and all below it.

    `rss` is what is resident, with the pages of LMDB's maps once for every process that has them mapped; `anonymous`
    is what no file backs.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.root = psutil.Process(pid)
        self.samples: list[tuple[float, int, int]] = []
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.25):
            resident = anonymous = 0
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in [self.root, *self.root.children(recursive=True)]:
                    with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                        resident += process.memory_info().rss
                        anonymous += anonymous_bytes(process.pid)
            self.samples.append((time.time(), resident, anonymous))

    def peak(self, low: float, high: float) -> dict[str, int]:
        inside = [sample for sample in self.samples if low <= sample[0] <= high]
        return {
            "rss": max((sample[1] for sample in inside), default=0),
            "anonymous": max((sample[2] for sample in inside), default=0),
        }


def steps_of(directory: Path, schedule: Schedule, since: float) -> tuple[list[Seen], dict[int, int]]:
    """The steps that were visible from a time on, and the bytes of state that each of them moved."""
    jobdir = JobDir(directory)
    log = StepLog(jobdir.log)
    steps: list[Seen] = []
    moved: dict[int, int] = {}
    for commit in log.commits():
        plan = log.plan(Step(commit["step"]), Epoch(commit["epoch"]))
        assert plan is not None, f"step {commit['step']} has no plan"
        # The record itself says when it was made up. It exists, and the step is visible, since it got its name.
        (path,) = directory.glob(f"log/*/{commit['step']:012d}.commit")
        visible = os.stat(path).st_ctime
        if visible < since:
            continue
        described = {
            "step": commit["step"],
            "seconds": commit["seconds"],
            "layout": commit["layout"],
            "inputs": {name: {"ranges": pieces} for name, pieces in plan["slices"].items()},
        }
        steps.append(seen(described, visible, schedule, INPUT))
        moved[commit["step"]] = commit.get("moved_bytes", 0)
    return steps, moved


def capacity(args: argparse.Namespace) -> None:
    with scratch("ours-rescale") as root, running(root, args) as flow:
        start = flow.begin(None)
        flow.rest(args.warm_up)
        before, began = flow.job.status()["input_rows"], time.time()
        flow.rest(args.steady)
        after = flow.job.status()
        # Written a few times a second: what it says was so when it was written.
        rows, seconds = after["input_rows"] - before, after["updated"] - began
        flow.job.stop(force=True)
    answer(rows_per_second=rows / seconds, seconds=time.time() - start)


def rescaled(args: argparse.Namespace) -> None:
    with scratch("ours-rescale") as root:
        with running(root, args) as flow:
            memory, weather = Memory(flow.child.pid), Weather()
            memory.start()
            weather.start()
            schedule = Schedule(flow.begin(args.rate), args.rate, PARTITIONS)
            flow.rest(args.warm_up + args.steady)
            done: list[dict[str, Any]] = []
            for workers in WORKERS[1:]:
                hosts = 1 if args.hosts == "one" else workers
                done.append(flow.job.rescale(workers, hosts=hosts, strategy=args.strategy, timeout=600))
                # The steady window behind it is as long as it was.
                flow.rest(max(args.steady, done[-1]["seconds"] + 2 * _SETTLE) + _SETTLE)
            ended = time.time()
            for watch in (memory, weather):
                watch.ended.set()
                watch.join()
            faults = flow.job.status()["faults"]
            flow.job.stop(timeout=600)
            flow.child.wait(600)
        since = schedule.start + args.warm_up
        steps, moved = steps_of(flow.job_path, schedule, since)
        steps = [step for step in steps if step.visible <= ended]
        inner = [span for step in steps for span in step.spans]
        answer(
            strategy=args.strategy,
            keys=args.keys,
            rate=args.rate,
            steps=len(steps),
            faults=len(faults),
            migrations=_judged(flow.job_path, args, schedule, steps, moved, done, memory, weather),
            timeline=[list(asdict(one).values()) for one in timeline(steps, schedule)],
            ccdf=Latencies(inner).ccdf(),
            memory=memory.peak(since, ended),
        )


def _judged(
    directory: Path,
    args: argparse.Namespace,
    schedule: Schedule,
    steps: Sequence[Seen],
    moved: dict[int, int],
    done: Sequence[dict[str, Any]],
    memory: Memory,
    weather: Weather,
) -> list[dict[str, Any]]:
    layouts = layouts_of(JobDir(directory))
    hashes, sizes = keys_of(JobDir(directory), layouts[max(layouts)])
    assert len(hashes) == args.keys, f"the shards hold {len(hashes)} keys of {args.keys}"
    found = []
    for one in done:
        began, ended = one["began"], one["began"] + one["seconds"]
        result = judge(steps, schedule, began, ended, _SETTLE)
        before, after = layouts[one["from"]["layout"]], layouts.get(one["layout"])
        if after is None or len(after.workers) != one["to"]["workers"]:
            # A rescaling that did nothing would look splendid.
            raise PeerFailed(
                f"rescaling {one['id']} to {one['to']['workers']} workers says that it is {one['state']}, but the layouts "
                f"that were recorded are {[(v, len(known.workers)) for v, known in layouts.items()]}"
            )
        inside = [step for step in steps if began <= step.visible <= result.ended]
        moving = [step for step in inside if moved.get(step.step)]
        found.append(
            {
                "from": one["from"]["workers"],
                "to": one["to"]["workers"],
                "seconds": one["seconds"],
                "began": began - schedule.start,
                "ended": ended - schedule.start,
                "charged_until": result.ended - schedule.start,
                "highest": result.highest,
                "highest_before": result.before,
                "highest_after": result.after,
                "ratio": result.ratio,
                "kept": result.kept,
                "lowest": result.lowest,
                "silent": result.silent,
                "longest_step": result.longest_step,
                "longest_calm_step": _longest_calm(inside, weather),
                "moving_steps": len(moving),
                "longest_moving_step": max((step.seconds for step in moving), default=0.0),
                "longest_calm_moving_step": _longest_calm(moving, weather),
                "stolen": weather.stolen(began, result.ended),
                "bytes_moved": one["bytes_moved"],
                "minimum_bytes": minimum_bytes(hashes, sizes, before, after),
                "memory": memory.peak(began, result.ended),
                "memory_before": memory.peak(began - (result.ended - began), began),
            }
        )
    return found


def _longest_calm(steps: Sequence[Seen], weather: Weather) -> float:
    """The longest of those that were not held up from outside; of all, where each was."""
    calm = [step for step in steps if weather.stolen(step.visible - step.seconds, step.visible) <= CALM]
    return max((step.seconds for step in calm or steps), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("keys", type=int)
    parser.add_argument("--strategy", default="fluid")
    parser.add_argument("--rate", type=float, help="rows a second")
    parser.add_argument("--capacity", action="store_true", help="measure how many the smaller layout takes")
    parser.add_argument(
        "--hosts", choices=("each", "one"), default="each", help="a host for each worker, or one"
    )
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds of load before anything counts")
    parser.add_argument("--steady", type=float, default=20.0, help="seconds before and after each migration")
    parser.add_argument("--checkpoint-every", default="30s", help="as `anabranch run` takes it")
    args = parser.parse_args()
    if args.capacity:
        capacity(args)
        return
    if args.rate is None:
        parser.error("--rate is needed unless --capacity is measured")
    rescaled(args)


if __name__ == "__main__":
    main()
