"""What live rescaling costs those who wait for output: `make bench-rescale`, `make bench-rescale ARGS=--quick`.

A flow with a million keys of state gets half the load that its smaller layout takes, on a schedule that does not wait for
it, and goes from 2 to 4 to 3 workers by each strategy (`bench/ours/rescale_run.py`). Every claim about latency
compares a run with itself. `bench/openloop.py` says what is charged to a migration.

Besides the usual table this writes `bench/results/rescale-timeline.json`, and from it the plots of `docs/benchmarks.md`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from bench import harness
from bench.harness import (
    ROOT,
    Benchmark,
    Options,
    Row,
    compare,
    figure,
    median,
    options,
    ours,
    peer,
    run_chosen,
)

STRATEGIES = ("stop-start", "sudden", "batched", "fluid", "hot")
UNNOTICED = ("fluid", "hot")
"""Those of which nobody should notice anything; the others are measured once, to compare."""
LONGEST = {"fluid": ("step", "longest step of a migration"), "hot": ("moving_step", "longest switching step")}
"""What must not grow with the state: which of a migration's figures that is, and its name."""
COMMON_RATE = 20_000.0
"""Rows a second that all take with any state, where sides are compared."""
_SILENCE_ROUNDS = 3
"""At most: the peers take minutes, and the sides are far apart."""
_TIMELINE = "rescale-timeline.json"
_TIMEOUT = 1800

harness.PACKAGES.setdefault("plots", ("matplotlib==3.11.2", "numpy==2.4.6"))

Run = dict[str, Any]


@dataclass
class Suite:
    """The benchmarks of one invocation, and what they share."""

    keys: int
    rate: float | None
    """Rows a second; None: half of what the smaller layout takes."""
    _halves: dict[int, float] = field(default_factory=dict)
    _common: dict[tuple[str, int], list[Run]] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    """What is drawn: `runs`, one of each strategy, and `silence`, seconds by name."""

    def half_load(self, keys: int, chosen: Options) -> float:
        if self.rate is not None:
            return self.rate
        if keys not in self._halves:
            window = ("--warm-up", 5, "--steady", 8) if chosen.quick else ("--warm-up", 10, "--steady", 20)
            rounds = 1 if chosen.quick else min(chosen.rounds, 3)
            found = [
                ours("rescale_run", keys, "--capacity", *window, timeout=_TIMEOUT)["rows_per_second"]
                for _ in range(rounds)
            ]
            self._halves[keys] = median(found) / 2
            print(f"half load, {keys:,} keys: {self._halves[keys]:,.0f} rows/s", flush=True)
        return self._halves[keys]

    def run(self, strategy: str, chosen: Options, *, keys: int, rate: float, hosts: str = "each") -> Run:
        window = ("--warm-up", 5, "--steady", 10) if chosen.quick else ("--warm-up", 10, "--steady", 20)
        found = ours(
            "rescale_run", keys, "--strategy", strategy, "--rate", rate, "--hosts", hosts, *window,
            timeout=_TIMEOUT,
        )  # fmt: skip
        print(describe(found), flush=True)
        return found

    def common_run(self, strategy: str, chosen: Options, keys: int, number: int) -> Run:
        """A run at the common rate; one of this number serves all benchmarks that want one."""
        known = self._common.setdefault((strategy, keys), [])
        while len(known) <= number:
            known.append(self.run(strategy, chosen, keys=keys, rate=COMMON_RATE))
        return known[number]

    # The benchmarks.

    def latency(self, chosen: Options) -> list[Row]:
        """Once per strategy, and as often as asked where a claim stands on it; in turn, so that all get the same weather."""
        rate = self.half_load(self.keys, chosen)
        runs: dict[str, list[Run]] = {strategy: [] for strategy in STRATEGIES}
        for number in range(chosen.rounds):
            for strategy in STRATEGIES if number == 0 else UNNOTICED:
                runs[strategy].append(self.run(strategy, chosen, keys=self.keys, rate=rate))
        self.measured["runs"] = [typical(runs[strategy]) for strategy in STRATEGIES]
        print(f"\n{summary(self.measured['runs'])}", flush=True)
        rows = [row for strategy in UNNOTICED for row in latency_rows(strategy, runs[strategy])]
        rows += [kept_row(strategy, runs[strategy]) for strategy in UNNOTICED]
        return rows + [bytes_row(strategy, runs[strategy]) for strategy in STRATEGIES[1:]]

    def one_host(self, chosen: Options) -> list[Row]:
        """Whatever the strategy: workers of one host hand over shards without copying a byte."""
        rate = self.half_load(self.keys, chosen)
        moved = 0
        for strategy in UNNOTICED:
            found = self.run(strategy, chosen, keys=self.keys, rate=rate, hosts="one")
            moved += sum(one["bytes_moved"] for one in found["migrations"])
        return [compare("bytes moved, 2 → 4 → 3 workers of one host", moved, 0.0, "bytes", most=1)]

    def growth(self, strategy: str, chosen: Options) -> list[Row]:
        """At one rate, which leaves steady steps as long with the larger state as with the smaller one, and `hot` hot.

        All steps count. What is printed beside leaves out those that the machine's host held up (`bench/weather.py`).
        """
        which, name = LONGEST[strategy]
        sizes = (5 * self.keys, self.keys)
        # In turn, so that both states get the same weather.
        for number, keys in product(range(chosen.rounds), sizes):
            self.common_run(strategy, chosen, keys, number)
        runs = [self._common[strategy, keys][: chosen.rounds] for keys in sizes]

        def longest(which: str) -> tuple[float, ...]:
            """The longest of a run, and of runs the median."""
            return tuple(
                1000 * median([max(one[which] for one in run["migrations"]) for run in some]) for some in runs
            )

        large, small = longest(f"longest_calm_{which}")
        print(
            f"{strategy}: {name}, undisturbed: {large:.0f} vs {small:.0f} ms, {large / small:.2f}", flush=True
        )
        large, small = longest(f"longest_{which}")
        return [compare(f"{strategy}: {name}, 5 times the keys vs 1", large, small, "ms", most=1.3)]

    def price(self, chosen: Options) -> list[Row]:
        shares = [
            ours("rescale_price", 200_000 if chosen.quick else self.keys)["share"]
            for _ in range(1 if chosen.quick else 3)
        ]
        name = "routing and cursor checks, share of a steady step's CPU"
        return [compare(name, 100 * median(shares), 100.0, "%", most=0.02)]

    def silence(self, chosen: Options) -> list[Row]:
        """The same rescale, 2 → 4, by others: how long nothing comes out."""
        runs: dict[str, list[Run]] = {strategy: [] for strategy in ("stop-start", *UNNOTICED)}
        seconds: dict[str, list[float]] = {}
        for number in range(min(chosen.rounds, _SILENCE_ROUNDS)):
            for strategy, known in runs.items():
                known.append(self.common_run(strategy, chosen, self.keys, number))
                seconds.setdefault(strategy, []).append(known[-1]["migrations"][0]["silent"])
            bytewax = peer("bytewax_rescale", self.keys, COMMON_RATE, timeout=_TIMEOUT)
            seconds.setdefault("Bytewax, stop and start", []).append(bytewax["seconds"])
            spark = peer("spark_rescale", self.keys, COMMON_RATE, timeout=_TIMEOUT)
            seconds.setdefault("Spark, state rewritten offline", []).append(spark["repartition"]["seconds"])
            seconds.setdefault("Spark, fresh checkpoint", []).append(spark["fresh"]["seconds"])
        found = {name: median(values) for name, values in seconds.items()}
        self.measured["silence"] = found
        others = {name: value for name, value in found.items() if name not in STRATEGIES}
        what = "2 → 4, seconds without output"
        rows = [
            compare(f"{what}: stop-start vs {name}", found["stop-start"], value, "s", most=1)
            for name, value in others.items()
        ]
        best = min(others.values())
        rows += [
            compare(f"{what}: {one} vs the best of these", found[one], best, "s", most=1) for one in UNNOTICED
        ]
        # Here few keys change while they are copied.
        return [*rows, bytes_row(f"hot at {COMMON_RATE:,.0f} rows/s", runs["hot"])]

    def benchmarks(self) -> dict[str, Benchmark]:
        return {
            "latency": self.latency,
            "one-host": self.one_host,
            **{f"growth-{strategy}": partial(self.growth, strategy) for strategy in UNNOTICED},
            "price": self.price,
            "silence": self.silence,
        }


# From runs to rows.


def latency_rows(strategy: str, runs: Sequence[Run]) -> list[Row]:
    """Each way by itself: the highest latency in the migration against the steady one of the same run."""
    rows = []
    for place, way in enumerate(runs[0]["migrations"]):
        found = [run["migrations"][place] for run in runs]
        name = f"{strategy}, {way['from']} → {way['to']}: highest latency, migration vs steady"
        row = compare(
            name,
            1000 * median([one["highest"] for one in found]),
            1000 * median([one["highest"] / one["ratio"] for one in found]),
            "ms",
            most=2,
        )
        # The median of the runs' own ratios, not the ratio of two medians.
        ratio = median([one["ratio"] for one in found])
        rows.append(replace(row, ratio=ratio, holds=ratio <= 2))
    return rows


def kept_row(strategy: str, runs: Sequence[Run]) -> Row:
    """The worse of the two ways of each run."""
    kept = median([min(one["kept"] for one in run["migrations"]) for run in runs])
    rate = runs[0]["rate"]
    return compare(
        f"{strategy}: rows made visible in a migration vs rows due", kept * rate, rate, "rows/s", least=0.95
    )


def bytes_row(what: str, runs: Sequence[Run]) -> Row:
    """The worse of the two ways of each run; of runs, the median."""
    worst = [
        max(run["migrations"], key=lambda one: one["bytes_moved"] / one["minimum_bytes"]) for run in runs
    ]
    one = sorted(worst, key=lambda one: one["bytes_moved"] / one["minimum_bytes"])[len(worst) // 2]
    name = f"{what}: bytes moved vs the minimum"
    return compare(name, one["bytes_moved"], one["minimum_bytes"], "bytes", most=1.05)


def typical(runs: Sequence[Run]) -> Run:
    """The run whose worse way is the median of all."""
    ranked = sorted(runs, key=lambda run: max(one["ratio"] for one in run["migrations"]))
    return ranked[len(ranked) // 2]


def describe(run: Run) -> str:
    """A line for each migration, as they are measured."""
    return "\n".join(
        f"  {run['strategy']}, {one['from']} → {one['to']}: {one['seconds']:.1f} s, highest "
        f"{1000 * one['highest']:.0f} ms ({one['ratio']:.2f} of steady), {one['bytes_moved'] / 1e6:.1f} MB of "
        f"{one['minimum_bytes'] / 1e6:.1f}, silent {one['silent']:.2f} s, longest step {1000 * one['longest_step']:.0f} ms "
        f"(undisturbed {1000 * one['longest_calm_step']:.0f}), stolen {one['stolen']:.0%}, faults {run['faults']}"
        for one in run["migrations"]
    )


COLUMNS: tuple[tuple[str, Callable[[Run, Run], float]], ...] = (
    ("seconds", lambda run, one: one["seconds"]),
    ("highest ms", lambda run, one: 1000 * one["highest"]),
    ("steady ms", lambda run, one: 1000 * one["highest"] / one["ratio"]),
    ("ratio", lambda run, one: one["ratio"]),
    ("silent s", lambda run, one: one["silent"]),
    ("rows kept %", lambda run, one: 100 * one["kept"]),
    ("moved MB", lambda run, one: one["bytes_moved"] / 1e6),
    ("minimum MB", lambda run, one: one["minimum_bytes"] / 1e6),
    ("peak RSS MB", lambda run, one: one["memory"]["rss"] / 1e6),
    ("anonymous MB", lambda run, one: one["memory"]["anonymous"] / 1e6),
)


def summary(runs: Sequence[Run]) -> str:
    """One run of each strategy side by side, a line for each of its migrations."""
    lines = [["strategy", *(name for name, _ in COLUMNS)]]
    for run in runs:
        for one in run["migrations"]:
            cells = [figure(of(run, one)) for _, of in COLUMNS]
            lines.append([f"{run['strategy']}, {one['from']} → {one['to']}", *cells])
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )


def draw(measured: dict[str, Any], quick: bool) -> None:
    """Keep what was measured for the plots, beside what was measured before, and draw it.

    A quick run draws too, but not into the documentation.
    """
    if not measured:
        return
    harness.RESULTS.mkdir(parents=True, exist_ok=True)
    path = harness.RESULTS / _TIMELINE
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, **measured}) + "\n")
    target = ROOT / "build" / "bench" / "img" if quick else ROOT / "docs" / "img"
    command = [str(harness.environment("plots")), str(ROOT / "bench" / "plots.py"), str(path), str(target)]
    subprocess.run(command, check=True, env=harness.inherited(), stdout=subprocess.DEVNULL)
    print(f"plots: {target}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float)
    own, rest = parser.parse_known_args(argv)
    chosen = options(
        "What live rescaling costs. Besides what follows: --keys N (default: 1000000), and --rate N, rows a second "
        "(default: half of what two workers take).",
        rest,
        rounds=5,
    )
    suite = Suite(own.keys, own.rate)
    status = run_chosen("rescale", suite.benchmarks(), chosen)
    draw(suite.measured, chosen.quick)
    return status


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.exit(main())
