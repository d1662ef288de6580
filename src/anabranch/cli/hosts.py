"""`anabranch hosts`: the hosts that a job uses, and those that it could use."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from anabranch.cli.display import human, plural
from anabranch.runtime.jobhandle import Job

Json = dict[str, Any]


def hosts(options: Namespace) -> int:
    job = Job(options.dir)
    found = job.hosts()
    if options.json:
        print(json.dumps({"hosts": found}))
    else:
        print("\n".join(host_lines(found)) or "no hosts")
    return 0


def host_lines(hosts: list[Json]) -> list[str]:
    """A line for each host."""
    width = max((len(one["host"]) for one in hosts), default=0)
    return [f"{one['host'].ljust(width)}  {_said(one)}" for one in hosts]


def _said(host: Json) -> str:
    if not host["used"] and not host["shards"]:
        # Nothing of the job is there, so whoever wants to shut it down may.
        return (
            "empty: a rescale can use it, and it can be shut down" if host["alive"] is not False else "gone"
        )
    numbers = ", ".join(map(str, host["workers"]))
    parts = [
        f"{'worker' if len(host['workers']) == 1 else 'workers'} {numbers}" if numbers else "no worker",
        plural(host["shards"], "shard"),
    ]
    if host["bytes"] is not None:
        parts.append(f"{human(host['bytes'])}B")
    if host["alive"] is False:
        parts.append("does not answer")
    return " · ".join(parts)
