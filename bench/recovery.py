"""What fault tolerance costs and how fast it is: `make bench-recovery`, `make bench-recovery ARGS=--quick`.

Every row is a ratio over runs in turn; load is half of what this machine takes in the same invocation.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from bench.harness import (
    Benchmark,
    Options,
    Row,
    alternate,
    compare,
    median,
    options,
    ours,
    run_chosen,
    scratch,
)
from bench.restart import Ours, Spark, Story

_KEYS = 1_000_000
_CHECKPOINT_SECONDS = 5.0


@cache
def half_load(quick: bool, rounds: int) -> float:
    """Rows a second: half of what the layout takes with a state of a million keys."""
    found = [at_full_load(quick)["rows_per_second"] for _ in range(1 if quick else min(rounds, 3))]
    half = median(found) / 2
    print(f"half load: {half:,.0f} rows/s", flush=True)
    return half


def at_full_load(quick: bool) -> dict[str, Any]:
    seconds = (5, 10) if quick else (15, 30)
    return ours("steady", _KEYS, "--warm-up", seconds[0], "--seconds", seconds[1])


def pause(chosen: Options) -> list[Row]:
    rate = half_load(chosen.quick, chosen.rounds)
    window = [
        "--rate",
        rate,
        "--warm-up",
        10 if chosen.quick else 15,
        "--seconds",
        15 if chosen.quick else 60,
    ]
    made: list[int] = []

    def with_checkpoints() -> float:
        found = ours("steady", _KEYS, *window, "--checkpoint-seconds", _CHECKPOINT_SECONDS)
        made.append(found["checkpoints"])
        return float(found["p99_ms"])

    mine, theirs = alternate(
        with_checkpoints, lambda: float(ours("steady", _KEYS, *window)["p99_ms"]), chosen.rounds
    )
    name = "p99 of a step, 1M keys, a checkpoint every 5 s vs none"
    row = compare(name, mine, theirs, "ms", most=1.3)
    if min(made) > 0:
        return [row]
    return [replace(row, name=f"{name} (not shown: a window had no checkpoint)", holds=False)]


def changed(chosen: Options) -> list[Row]:
    keys = 1_000_000 if chosen.quick else 10_000_000
    found = ours("changed", keys, "--checkpoints", max(5, chosen.rounds), timeout=3600)
    name = f"checkpoint of 10,000 changed keys of {keys // 1_000_000}M, the largest, vs a full one"
    return [compare(name, max(found["written"]), found["full"], "bytes", most=0.03)]


def restart(chosen: Options) -> list[Row]:
    """Everything since the last checkpoint is as much as can be: what comes in between two of them."""
    keys = 200_000 if chosen.quick else _KEYS
    story = Story(keys, half_load(chosen.quick, chosen.rounds), _CHECKPOINT_SECONDS)
    with scratch("restart") as root:
        mine, peer = Ours(root), Spark(root)
        mine.prepare(story)
        peer.prepare(story)
        theirs: list[float] = []

        def spark() -> float:
            theirs.append(peer.restart())
            return theirs[-1]

        kept, _ = alternate(mine.restart, spark, chosen.rounds)
        lost, _ = alternate(lambda: mine.restart(without="job/state"), spark, chosen.rounds)
    shown = f"{keys // 1_000}k keys" if chosen.quick else "1M keys"
    what = f"SIGKILL of everything, {shown}: start to new output"
    return [
        compare(f"{what}, vs Structured Streaming", kept, median(theirs), "s", most=0.5),
        compare(f"{what}, state lost too, vs the same", lost, median(theirs), "s", most=1.0),
    ]


def commit(chosen: Options) -> list[Row]:
    found = [at_full_load(chosen.quick) for _ in range(chosen.rounds)]
    spent = median([one["commit_share"] * one["median_ms"] for one in found])
    whole = median([one["median_ms"] for one in found])
    share = median([one["commit_share"] for one in found])
    name = "step log and staging of outputs, share of a step of the default size"
    row = compare(name, spent, whole, "ms", most=0.1)
    # The median over steps of each step's own share, not the quotient of two medians.
    return [replace(row, ratio=share, holds=share <= 0.1)]


BENCHMARKS: dict[str, Benchmark] = {
    "pause": pause,
    "changed": changed,
    "restart": restart,
    "commit": commit,
}


def main() -> int:
    return run_chosen(
        "recovery", BENCHMARKS, options("What fault tolerance costs, and how fast it is.", rounds=5)
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.exit(main())
