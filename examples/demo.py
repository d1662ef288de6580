"""The main job: a stateful flow on embedded Spark that changes its number of workers on the way, checked row by row.

Half of the input is read by two workers; then the job is stopped and goes on with four. The result is
compared with plain Python over the same rows.
"""

import shutil
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import anabranch as ab
from anabranch.cli.display import human
from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.observe import Silent
from anabranch.runtime.outputs import table

JOB = Path("demo-job")
ROWS = 12_000_000
KEYS = 20_000

source = ab.generator(rows=ROWS, keys=KEYS, partitions=8, seed=7)
flow = ab.Flow("demo")
events = flow.input("events", source)
totals = events.key_by("key").aggregate(n=ab.count(), total=ab.sum("value"), top=ab.max("value"))
totals.output("totals")
sizes = totals.select("n").key_by("n").count()
sizes.output("sizes")


class Watch(Silent):
    """Prints a line every half second, and stops the first run halfway."""

    def __init__(self, halfway: bool) -> None:
        self.halfway = halfway
        self.last = 0.0

    def started(self, layout, progress):
        print(f"  {len(layout.workers)} workers, {len(layout.shards)} shards, at step {progress.next_step}")

    def step(self, done, progress):
        if self.halfway and progress.input_rows >= ROWS // 2:
            JobDir(JOB).ask_to_stop()
        if time.monotonic() - self.last > 0.5:
            self.last = time.monotonic()
            bar = "█" * int(30 * progress.input_rows / ROWS)
            rate, rows = human(done.rows / done.seconds), human(progress.input_rows)
            milliseconds = f"{done.seconds * 1000:4.0f} ms"
            print(f"  step {done.step:4d}  {bar:<30} {rows:>5} rows  {rate:>5} rows/s  {milliseconds}")

    def fault(self, step, attempt, error):
        print(f"  step {step}, attempt {attempt} failed: {error}")


def oracle():
    """The same totals by plain Python."""
    n, total, top = Counter(), Counter(), defaultdict(int)
    for available in source.discover({}):
        piece = source.cut(available, ROWS, 1 << 60)
        for frame in source.read(piece, lambda *bad: None):
            for key, value in zip(frame["key"].to_list(), frame["value"].to_list(), strict=True):
                n[key] += 1
                total[key] += value
                top[key] = max(top[key], value)
    return {key: (n[key], total[key], top[key]) for key in n}


def main():
    shutil.rmtree(JOB, ignore_errors=True)
    print(
        f"{ROWS:,} events, {KEYS:,} keys: count, sum and max for each key, then how many keys have each count"
    )
    print("with 2 workers, up to the middle:")
    ab.run(flow, JOB, workers=2, until_idle=True, listener=Watch(halfway=True))
    print("the same job, with 4 workers, to the end:")
    progress = ab.run(flow, JOB, workers=4, until_idle=True, listener=Watch(halfway=False))
    print(
        f"{progress.next_step} steps, {progress.input_rows:,} rows in, {progress.output_rows:,} changes out"
    )
    expected = oracle()
    jobdir = JobDir(JOB)
    found = {row["key"]: (row["n"], row["total"], row["top"]) for row in table(jobdir, "totals").to_dicts()}
    sizes_found = {row["n"]: row["count"] for row in table(jobdir, "sizes").to_dicts()}
    wrong = sum(found.get(key) != value for key, value in expected.items()) + len(
        found.keys() - expected.keys()
    )
    wrong += sizes_found != Counter(n for n, _, _ in expected.values())
    print(
        f"compared with plain Python: {len(expected):,} keys, {wrong} differ: {'EXACT' if not wrong else 'WRONG'}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
