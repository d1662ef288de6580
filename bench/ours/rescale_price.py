"""What it costs a steady flow that it could be rescaled: the share of routing and cursor checks in a step's CPU.

The very functions that Spark's tasks run are profiled in this process, one worker after another. Counted is all time in
finding the worker of each row (hash to shard, shard to owner, cursors of shards under way) and in looking up copies in a
placement, with everything that these call. That is more than the price: rows of any keyed flow must be sent somewhere.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import sys
import time
from collections.abc import Callable
from typing import Any

import anabranch as ab
from bench.harness import ROOT, scratch
from bench.ours.common import answer

Function = tuple[str, int, str]
"""File, line and name, as the profiler has them."""

_ROUTING = ("spark/stage.py", "_receivers")
_LOOKUPS = "model/placement.py"


def counted(function: Function) -> bool:
    file, _, name = function
    return (file.endswith(_ROUTING[0]) and name == _ROUTING[1]) or file.endswith(_LOOKUPS)


def share(
    stats: dict[Function, tuple[Any, ...]],
    whole: Callable[[Function], bool],
    part: Callable[[Function], bool],
) -> float:
    """Time in `part` with all that it calls, over time in `whole`; a call from inside the part is not counted twice.

    Raises:
        LookupError: the profile has no such function.
    """
    spent = {"part": 0.0, "whole": 0.0}
    for function, (_, _, _, _, callers) in stats.items():
        for name, belongs in (("part", part), ("whole", whole)):
            if belongs(function):
                spent[name] += sum(figures[3] for caller, figures in callers.items() if not belongs(caller))
    if not spent["whole"] or not spent["part"]:
        raise LookupError(f"the profile has none of the functions that are measured: {spent}")
    return spent["part"] / spent["whole"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("keys", type=int)
    parser.add_argument("--rows", type=int, default=50_000, help="of a step")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()
    if os.environ.get("POLARS_MAX_THREADS") != "1":
        # As in Spark's tasks; read when Polars is loaded, which it is by now.
        again = [sys.executable, "-m", "bench.ours.rescale_price", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "POLARS_MAX_THREADS": "1"})
    # The harness that runs stages without Spark belongs to the tests.
    sys.path.insert(0, str(ROOT / "tests" / "spark"))
    from inprocess import InProcess

    warm_up = 5
    with scratch("ours-price") as root:
        flow = ab.Flow("price")
        value = ab.uniform_int(-1000, 1000)
        every = flow.input("every", ab.generator(rows=args.keys, columns={"key": ab.index(), "value": value}))
        drawn = flow.input(
            "drawn",
            ab.generator(
                rows=(args.steps + warm_up) * args.rows + args.keys,
                columns={"key": ab.uniform_int(0, args.keys), "value": value},
            ),
        )
        every.union(drawn).key_by("key").sum("value").output("sums")
        job = InProcess(flow, root, workers=args.workers, shards=16 * args.workers, hosts=args.workers)
        # Both inputs share a step evenly, so that this loads every key.
        job.step(2 * args.keys)
        for _ in range(warm_up):
            job.step(args.rows)
        profile = cProfile.Profile(time.process_time)
        for _ in range(args.steps):
            slices = job.cut(args.rows)
            profile.enable()
            reports = job.attempt(slices)
            profile.disable()
            job.commit(slices, reports)
        stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]

    def stage(function: Function) -> bool:
        return function[0].endswith(_ROUTING[0]) and function[2] == "run_stage"

    answer(share=share(stats, stage, counted))


if __name__ == "__main__":
    main()
