"""`anabranch steps`: which input went into which step, and what came out."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Iterator
from itertools import islice
from typing import Any

from anabranch.cli.job import open_job
from anabranch.errors import ConfigError
from anabranch.log.steplog import StepLog
from anabranch.model.ids import Epoch, Step

_SHOWN = 20
_RANGES = 3


def steps(options: Namespace) -> int:
    jobdir = open_job(options.dir)
    log = StepLog(jobdir.log)
    for name in ("first", "limit"):
        value = getattr(options, name)
        if value is not None and value < 0:
            raise ConfigError(f"--{name} {value}: must be at least 0")
    limit = options.limit if options.limit is not None else (None if options.json else _SHOWN)
    first = options.first
    if first is None:
        # The newest ones, unless one asks for others.
        first = log.first if limit is None else max(log.first, log.load().next_step - limit)
    shown = 0
    for described in islice(_described(log, Step(max(first, log.first))), limit):
        shown += 1
        print(json.dumps(described) if options.json else _as_text(described, options.ranges))
    if not shown and not options.json:
        print("no steps")
    return 0


def _described(log: StepLog, first: Step) -> Iterator[dict[str, Any]]:
    """Each committed step from `first` on, as plain values."""
    for commit in log.commits(first):
        plan = log.plan(Step(commit["step"]), Epoch(commit["epoch"])) or {"slices": {}}
        yield {
            "step": commit["step"],
            "epoch": commit["epoch"],
            "time": commit["time"],
            "seconds": commit["seconds"],
            "layout": commit["layout"],
            "input_rows": commit["input_rows"],
            "dead_letters": commit["dead_letters"],
            "inputs": {
                name: {
                    "rows": commit["inputs"].get(name, 0),
                    "ranges": [
                        {key: piece[key] for key in ("partition", "start", "end")} for piece in pieces
                    ],
                }
                for name, pieces in plan["slices"].items()
            },
            "outputs": {
                name: {"rows": output["rows"], "hash": f"{output['hash']:016x}"}
                for name, output in commit["outputs"].items()
            },
        }


def _as_text(step: dict[str, Any], all_ranges: bool) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(step["time"]))
    lines = [
        f"step {step['step']}  {when}  {step['seconds'] * 1000:.0f} ms  layout {step['layout']}"
        + (f"  {step['dead_letters']:,} dead letters" if step["dead_letters"] else "")
    ]
    for name, read in step["inputs"].items():
        ranges = [f"{one['partition']} [{one['start']}, {one['end']})" for one in read["ranges"]]
        left = 0 if all_ranges else len(ranges) - _RANGES
        if left > 0:
            ranges = [*ranges[:_RANGES], f"and {left} more"]
        lines.append(f"  in   {name}: {read['rows']:,} rows of {', '.join(ranges)}")
    lines += [f"  out  {name}: {output['rows']:,} rows" for name, output in step["outputs"].items()]
    return "\n".join(lines)
