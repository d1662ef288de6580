"""The cluster of `chaos/cluster.py` in tests: how a flow is run there, and where its tasks have run."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from chaos.cluster import HOSTS, Cluster


@contextlib.contextmanager
def standalone_cluster(root: Path, hosts: tuple[str, ...] = HOSTS) -> Iterator[Cluster]:
    cluster = Cluster(root, hosts, os.environ)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def run_command(directory: Path, flow: str) -> list[str]:
    """`anabranch run` of a flow, by its text, in a job directory; what it says is JSON."""
    script = directory.parent / "clusterflow.py"
    script.write_text(flow)
    return [
        *(sys.executable, "-m", "anabranch.cli.main", "run", str(script)),
        *("--dir", str(directory), "--json"),
    ]


def recording(events: Path) -> dict[str, str]:
    """Settings with which Spark writes down what it does, in one file in a folder."""
    events.mkdir()
    return {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": f"file://{events}",
        "spark.eventLog.rolling.enabled": "false",
        "spark.eventLog.compress": "false",
    }


def places_of_tasks(events: Path, *, only_steps: bool = False) -> dict[int, list[str]]:
    """Where tasks ran, by the number of the worker."""
    stages: set[int] = set()
    places: dict[int, list[str]] = defaultdict(list)
    for line in next(events.iterdir()).read_text().splitlines():
        event = json.loads(line)
        # Whatever else the coordinator asks of hosts is done in the stage that made their handles, and another one.
        if event["Event"] == "SparkListenerJobStart" and len(event["Stage IDs"]) > 2:
            stages |= set(event["Stage IDs"])
        elif event["Event"] == "SparkListenerTaskEnd" and (event["Stage ID"] in stages or not only_steps):
            places[event["Task Info"]["Index"]].append(event["Task Info"]["Host"])
    return places
