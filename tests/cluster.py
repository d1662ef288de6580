"""The cluster of `chaos/cluster.py` in tests: running a flow there, where its tasks ran, whether its tables are right."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from anabranch.connect.source import Source
from anabranch.log.steplog import StepLog
from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.outputs import table
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


def check_totals(directory: Path, name: str, source: Source) -> None:
    """Compare a job's tables `totals` (number and sum of each key) and `sizes` (how many keys have each number) with plain
    Python over the rows of an input that were read; `source` has those rows, and maybe more."""
    jobdir = JobDir(directory)
    progress = StepLog(jobdir.log).load()
    n: Counter[int] = Counter()
    total: Counter[int] = Counter()
    for available in source.discover({}):
        piece = source.cut(available, progress.positions[name].get(available.partition, 0), 1 << 60)
        for frame in source.read(piece, lambda *bad: None):
            for key, value in zip(frame["key"].to_list(), frame["value"].to_list(), strict=True):
                n[key] += 1
                total[key] += value
    found = {row["key"]: (row["n"], row["total"]) for row in table(jobdir, "totals").to_dicts()}
    assert found == {key: (n[key], total[key]) for key in n}
    assert {row["n"]: row["count"] for row in table(jobdir, "sizes").to_dicts()} == Counter(n.values())
    assert progress.input_rows == sum(n.values()) > 0
