"""The engine against its peers, side by side in one run: `make bench-engine`, `make bench-engine ARGS=--quick`.

Every row is a ratio; the machine's own speed cancels out.  A peer that can choose its batch size gets its best.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.data import Shape, make
from bench.harness import Benchmark, Options, Row, alternate, compare, options, ours, peer, run_chosen


def keyed_sum(kind: str, least: float) -> Benchmark:
    def run(chosen: Options) -> list[Row]:
        # Files of a million rows: both sides may take the same numbers of rows at once, and four times the largest.
        data = make(Shape(rows=32_000_000 if chosen.quick else 128_000_000, kind=kind))  # type: ignore[arg-type]
        sizes = "4,8" if chosen.quick else "8,16,32"
        steps = "4000000,8000000" if chosen.quick else "8000000,16000000,32000000"
        mine, theirs = alternate(
            lambda: float(ours("keyed_sum", data, "--rows-per-step", steps)["rows_per_second"]),
            lambda: float(
                peer("spark_sum", data, "--files-per-batch", sizes, "--batches", 4, "--warm-up", 8)[
                    "rows_per_second"
                ]
            ),
            chosen.rounds,
            best_theirs="max",
        )
        name = f"keyed sum, 100k {kind} keys, vs Spark Structured Streaming"
        return [compare(name, mine, theirs, "rows/s", least=least)]

    return run


def small_step(chosen: Options) -> list[Row]:
    steps = 160 if chosen.quick else 400
    data = make(Shape(rows=steps * 1000, per_file=1000, preload=True))
    mine, theirs = alternate(
        lambda: float(ours("small_step", data)["median_ms"]),
        lambda: float(
            peer("spark_step", data, "--warm-up", 60, "--batches", steps - 60 if chosen.quick else 200)[
                "median_ms"
            ]
        ),
        chosen.rounds,
        best_theirs="min",
    )
    return [compare("step of 1,000 rows, median, vs a micro-batch", mine, theirs, "ms", most=0.4)]


def stateful_map(chosen: Options) -> list[Row]:
    """Spark's Python state APIs get batches of 100,000 rows (a minute or so each), we a million rows a step."""
    rows = 4_000_000 if chosen.quick else 16_000_000
    data = make(Shape(rows=rows, kind="int", per_file=1_000_000))
    strings = make(Shape(rows=rows, kind="string", per_file=1_000_000))
    theirs = make(Shape(rows=400_000, kind="int", per_file=100_000))
    mine = float(ours("running_sum", data)["rows_per_second"])
    named = float(ours("running_sum", strings)["rows_per_second"])
    files = 2 if chosen.quick else 4
    bytewax = float(
        peer("bytewax_map", strings, "--files", files, "--modes", "threads,processes", "--epochs", "10")[
            "rows_per_second"
        ]
    )
    result = [
        compare("stateful_map, 100k string keys, vs Bytewax with recovery", named, bytewax, "rows/s", least=3)
    ]
    for script, label in (
        ("spark_tws", "transformWithStateInPandas"),
        ("spark_apply", "applyInPandasWithState"),
    ):
        found = peer(script, theirs, "--files-per-batch", 1, "--batches", 2, "--timeout", 600, timeout=1500)
        result.append(
            compare(
                f"stateful_map, 100k keys, vs {label}",
                mine,
                float(found["rows_per_second"]),
                "rows/s",
                least=50,
            )
        )
    return result


def state_size(chosen: Options) -> list[Row]:
    large = 2_000_000 if chosen.quick else 10_000_000
    few = ours("state_size", 100_000)
    many = ours("state_size", large, timeout=1800)
    shown = f"{large // 1_000_000}M keys vs 100k"
    return [
        compare(f"step of 1,000 rows, {shown}", many["small_ms"], few["small_ms"], "ms", most=1.5),
        compare(f"step of 100,000 rows, {shown}", many["large_ms"], few["large_ms"], "ms", most=2.5),
        compare(
            f"memory of workers, steps of 1,000 rows, {shown}",
            many["small_memory"],
            few["small_memory"],
            "bytes",
            most=1.3,
        ),
        compare(
            f"memory of workers, steps of 100,000 rows, {shown}",
            many["large_memory"],
            few["large_memory"],
            "bytes",
            most=1.3,
        ),
        # LMDB writes whole pages of 4 kB: for a row at most a leaf, a branch and its share of the bookkeeping.
        *(
            compare(
                f"bytes written by a step of {count:,} rows on {large // 1_000_000}M keys, vs four pages a row",
                many[part],
                count * 4 * 4096.0,
                "bytes",
                most=1,
            )
            for count, part in ((1_000, "small_bytes"), (100_000, "large_bytes"))
        ),
    ]


def soak(chosen: Options) -> list[Row]:
    steps = 400 if chosen.quick else 20_000
    found = ours("soak", steps, timeout=4 * 3600)
    return [
        compare(
            f"soak of {steps:,} steps: {name.replace('_', ' ')}, end vs beginning",
            found[name][1],
            found[name][0],
            unit,
            most=most,
        )
        for name, unit, most in (
            ("driver_heap", "bytes", 1.15),
            ("python_memory", "bytes", 1.15),
            ("open_files", "files", 1.1),
            ("shuffle_files", "files", 1.1),
        )
    ]


def scale(chosen: Options) -> list[Row]:
    rows = 4_000_000 if chosen.quick else 8_000_000
    two, one = alternate(
        lambda: float(ours("scale", 2, "--rows", rows)["rows_per_second"]),
        lambda: float(ours("scale", 1, "--rows", rows)["rows_per_second"]),
        chosen.rounds,
    )
    return [compare("CPU-bound flow, 2 workers vs 1 on 2 cores", two, one, "rows/s", least=1.6)]


BENCHMARKS: dict[str, Benchmark] = {
    "sum-int": keyed_sum("int", 4),
    "sum-string": keyed_sum("string", 3),
    "step": small_step,
    "map": stateful_map,
    "state": state_size,
    "scale": scale,
    "soak": soak,
}


def main() -> int:
    return run_chosen("engine", BENCHMARKS, options("The engine against its peers."))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.exit(main())
