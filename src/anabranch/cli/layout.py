"""`anabranch layout`: who has what, drawn, and every layout that there was."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from typing import Any

from anabranch.cli.display import bar, human, plural
from anabranch.cli.rescale import progress_line
from anabranch.runtime.jobhandle import Job

_RUNS = 4
"""Ranges of shards of a worker that are named."""
_HEADINGS = ("layout", "since", "step", "workers", "hosts", "shards", "strategy", "moved", "took")

Json = dict[str, Any]


def layout(options: Namespace) -> int:
    job = Job(options.dir)
    if options.history:
        history = job.history()
        print(json.dumps(history) if options.json else "\n".join(history_lines(history)))
        return 0
    found = job.layout()
    print(
        json.dumps(found, indent=2)
        if options.json
        else "\n".join([job.name + ": " + head(found), *draw(found)])
    )
    return 0


def head(layout: Json) -> str:
    """The layout in one line."""
    parts = [
        f"layout {layout['version']}",
        f"{plural(len(layout['workers']), 'worker')} on {plural(len(layout['hosts']), 'host')}",
        plural(layout["shards"], "shard"),
    ]
    if layout["sizes"] is not None:
        parts.append(f"{human(layout['bytes'])}B at step {layout['sizes']['step']:,}")
    return ", ".join(parts)


def draw(layout: Json) -> list[str]:
    """A bar for each worker, below its host; as long as its bytes, or its shards where no bytes are known."""
    workers = layout["workers"]
    most = max(_load(worker) for worker in workers)
    names = [f"worker {worker['worker']}" for worker in workers]
    counts = [plural(len(worker["shards"]), "shard") for worker in workers]
    sizes = ["" if worker["bytes"] is None else f"{human(worker['bytes'])}B" for worker in workers]
    lines = []
    for host in layout["hosts"]:
        size = "" if host["bytes"] is None else f", {human(host['bytes'])}B"
        lines.append(f"  {host['host']}: {plural(host['shards'], 'shard')}{size}")
        for number in host["workers"]:
            cells = [
                names[number].ljust(max(map(len, names))),
                bar(_load(workers[number]), most),
                counts[number].rjust(max(map(len, counts))),
                sizes[number].rjust(max(map(len, sizes))),
                runs(workers[number]["shards"]),
            ]
            lines.append("    " + "  ".join(cell for cell in cells if cell))
    return [*lines, *_balance(layout), *_under_way(layout)]


def history_lines(history: list[Json]) -> list[str]:
    """A table of all layouts, the newest last."""
    rows = [
        (
            str(one["version"]),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["time"])),
            f"{one['step']:,}",
            str(one["workers"]),
            str(len(one["hosts"])),
            str(one["shards"]),
            (one["strategy"] or "start") + (", cancelled" if one["cancelled"] else ""),
            "" if one["bytes_moved"] is None else f"{human(one['bytes_moved'])}B",
            "" if one["seconds"] is None else f"{one['seconds']:.1f} s",
        )
        for one in history
    ]
    table = [_HEADINGS, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(_HEADINGS))]
    texts = ("since", "strategy")
    return [
        "  ".join(
            cell.ljust(width) if heading in texts else cell.rjust(width)
            for cell, width, heading in zip(row, widths, _HEADINGS, strict=True)
        ).rstrip()
        for row in table
    ]


def runs(shards: list[int]) -> str:
    """Ascending numbers as ranges: 0-3, 7."""
    found: list[list[int]] = []
    for shard in shards:
        if found and found[-1][-1] == shard - 1:
            found[-1] = [found[-1][0], shard]
        else:
            found.append([shard])
    said = ["-".join(map(str, run)) for run in found]
    return ", ".join(said if len(said) <= _RUNS else [*said[:_RUNS], "…"])


def _load(worker: Json) -> int:
    return len(worker["shards"]) if worker["bytes"] is None else int(worker["bytes"])


def _balance(layout: Json) -> list[str]:
    workers, sizes = layout["workers"], layout["sizes"]
    fullest = max(workers, key=_load)
    mean = sum(map(_load, workers)) / len(workers)
    if sizes is None:
        said = f"worker {fullest['worker']} has {plural(_load(fullest), 'shard')}, the mean is {mean:.1f}"
    else:
        largest = max(range(layout["shards"]), key=sizes["bytes"].__getitem__)
        said = (
            f"worker {fullest['worker']} has {human(_load(fullest))}B, the mean is {human(mean)}B; "
            f"the largest shard is {largest} with {human(sizes['bytes'][largest])}B"
        )
    return [f"  skew {layout['skew']:.2f}: {said}"]


def _under_way(layout: Json) -> list[str]:
    lines = [] if layout["migration"] is None else [f"  rescaling {progress_line(layout['migration'])}"]
    if layout["interrupted"]:
        lines.append("  a rescaling was under way when the job ended: the next run goes on with it")
    hosts = {worker["worker"]: worker["host"] for worker in layout["workers"]}
    for cut in layout["cuts"]:
        source, target = cut["from"], cut["to"]
        lines.append(
            f"    shard {cut['shard']} {bar(cut['moved'], 1)} {cut['moved']:.0%} with worker {target} on "
            f"{hosts[target]}, the rest with worker {source} on {hosts[source]}"
        )
    return lines
