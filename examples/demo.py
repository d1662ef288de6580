"""The main job: a stateful flow under load that is rescaled while it runs, checked row by row.

Rows come at a fixed rate, whether or not the flow keeps up. It begins with two workers on two hosts (logical ones, with
directories of their own, so that state has to move), and is told from another thread, in the middle of it, to go on
with four on four and then with three on three. The result is compared with plain Python over the same rows.

A row's latency counts from the moment at which it was due until it is visible in the output.
"""

import shutil
import sys
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import NamedTuple

import anabranch as ab
from anabranch.cli.display import human
from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.observe import Silent
from anabranch.runtime.outputs import table

JOB = Path("demo-job")
RATE = 10_000
KEYS = 100_000
WARM, STEADY = 8.0, 8.0
MARK_EVERY, MARK_MS = 0.5, 100
MARKS = "▁▂▃▄▅▆▇█"


def events(rate=None):
    return ab.generator(rate=rate, keys=KEYS, partitions=8, seed=7)


flow = ab.Flow("demo")
rows = flow.input("events", events(RATE))
totals = rows.key_by("key").aggregate(n=ab.count(), total=ab.sum("value"), top=ab.max("value"))
totals.output("totals")
sizes = totals.select("n").key_by("n").count()
sizes.output("sizes")


class Seen(NamedTuple):
    """A step, as somebody saw it who waits for its rows."""

    at: float
    latency: float
    """Of its oldest row."""
    seconds: float
    rows: int
    backlog: int


class Watch(Silent):
    """Keeps what is told of each step."""

    def __init__(self):
        self.began = None
        self.running = threading.Event()
        self.over = threading.Event()
        self.seen = []

    def started(self, layout, progress):
        self.began = self.began or time.monotonic()
        self.running.set()

    def step(self, done, progress):
        now = time.monotonic()
        due = self.began + (progress.input_rows - done.rows) / RATE
        self.seen.append(Seen(now, now - due, done.seconds, done.rows, done.backlog_rows))

    def fault(self, step, attempt, error):
        print(f"\nstep {step}, attempt {attempt} failed: {error}")


def show(watch, what, enough):
    """Draw the latency while something goes on; returns the longest step of it."""
    print(f"{what:<32} ", end="", flush=True)
    first, mark = len(watch.seen), time.monotonic() + MARK_EVERY
    shown = first
    while not enough() and not watch.over.is_set():
        time.sleep(max(0.0, mark - time.monotonic()))
        mark += MARK_EVERY
        latest = [seen.latency for seen in watch.seen[shown:]]
        shown += len(latest)
        level = int(max(latest, default=0) * 1000 / MARK_MS)
        print(MARKS[min(level, len(MARKS) - 1)] if latest else "·", end="", flush=True)
    seen = watch.seen[first:]
    latencies = [1000 * one.latency for one in seen] or [float("nan")]
    print(
        f"\n{'':<32} {human(sum(one.rows for one in seen))} rows in {len(seen)} steps; latency: median "
        f"{median(latencies):.0f} ms, highest {max(latencies):.0f} ms; backlog at most "
        f"{human(max((one.backlog for one in seen), default=0))} rows"
    )
    return max((one.seconds for one in seen), default=0.0)


def steady(watch, what, seconds):
    end = time.monotonic() + seconds
    return show(watch, what, lambda: time.monotonic() >= end)


def rescale(watch, job, workers, longest_before):
    """Ask for so many workers, each on a host of its own, and watch the way there."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(job.rescale, workers, hosts=workers)
        longest = show(watch, f"  → {workers} workers on {workers} hosts", asked.done)
    done = asked.result()
    print(
        f"{'':<32} {done['shards_moved']} shards, {human(done['bytes_moved'])}B moved in {done['seconds']:.1f} s, by "
        f"{done['strategy']}; longest step {1000 * longest:.0f} ms (before: {1000 * longest_before:.0f} ms)"
    )


def direct(watch):
    """What happens to the job, from outside; it is stopped in any case."""
    watch.running.wait()
    job = ab.Job(JOB)
    try:
        steady(watch, "2 workers on 2 hosts, warming up", WARM)
        longest = steady(watch, "2 workers on 2 hosts", STEADY)
        rescale(watch, job, 4, longest)
        longest = steady(watch, "4 workers on 4 hosts", STEADY)
        rescale(watch, job, 3, longest)
        steady(watch, "3 workers on 3 hosts", STEADY)
    finally:
        job.stop()


def oracle(positions):
    """The same totals by plain Python."""
    n, total, top = Counter(), Counter(), defaultdict(int)
    source = events()
    for available in source.discover({}):
        piece = source.cut(available, positions[available.partition], 1 << 60)
        for frame in source.read(piece, lambda *bad: None):
            for key, value in zip(frame["key"].to_list(), frame["value"].to_list(), strict=True):
                n[key] += 1
                total[key] += value
                top[key] = max(top[key], value)
    return {key: (n[key], total[key], top[key]) for key in n}


def main():
    shutil.rmtree(JOB, ignore_errors=True)
    print(
        f"{RATE:,} rows a second, {KEYS:,} keys: count, sum and max for each key, then how many keys have each count"
    )
    scale = f"{MARKS[0]} below {MARK_MS} ms, {MARKS[1]} below {2 * MARK_MS} ms, and so on to {MARKS[-1]}"
    print(f"the highest latency of each half second: {scale}; · without a step")
    watch = Watch()
    with ThreadPoolExecutor(1) as pool:
        directed = pool.submit(direct, watch)
        try:
            progress = ab.run(flow, JOB, workers=2, hosts=2, listener=watch)
        finally:
            watch.over.set()
            watch.running.set()
        directed.result()
    layout = ab.Job(JOB).layout()
    print(
        f"{progress.next_step} steps, {progress.input_rows:,} rows in, {progress.output_rows:,} changes out, "
        f"{len(layout['workers'])} workers in the end"
    )
    expected = oracle(progress.positions["events"])
    jobdir = JobDir(JOB)
    found = {row["key"]: (row["n"], row["total"], row["top"]) for row in table(jobdir, "totals").to_dicts()}
    sizes_found = {row["n"]: row["count"] for row in table(jobdir, "sizes").to_dicts()}
    wrong = sum(found.get(key) != value for key, value in expected.items())
    wrong += len(found.keys() - expected.keys())
    wrong += sizes_found != Counter(n for n, _, _ in expected.values())
    wrong += (len(layout["workers"]), len(layout["hosts"])) != (3, 3)
    print(
        f"compared with plain Python: {len(expected):,} keys, {wrong} differ: {'WRONG' if wrong else 'EXACT'}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
