"""Which hosts and workers a run has: the layout it starts with."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from pyspark import SparkContext

from anabranch.errors import ConfigError, JobDirError
from anabranch.model.ids import HostId, LayoutVersion, WorkerId
from anabranch.model.layout import DynamicSharding, FixedSharding, Layout, initial_layout
from anabranch.runtime.settings import Settings
from anabranch.spark.placement import executor_hosts

_SETTLE = 1.0
_PATIENCE = 60.0


def find_hosts(context: SparkContext, settings: Settings, before: Layout | None) -> list[HostId]:
    """The hosts to run on: logical ones when embedded, else the machines of the cluster's executors."""
    if settings.embedded:
        if settings.hosts is None and before is not None:
            return sorted(set(before.workers))
        return [HostId(f"host-{number}") for number in range(settings.hosts or 1)]
    wanted = set(before.workers) if before is not None else set()
    return [HostId(host) for host in _wait_for_executors(context, wanted)]


def starting_layout(hosts: Sequence[HostId], settings: Settings, before: Layout | None) -> Layout:
    """The job's first layout, or its last one with as many workers as are wanted now.

    Shards stay on the host that has them; between workers of one host a shard changes its owner without a
    byte being copied.
    """
    if before is None:
        workers = settings.workers or max(len(hosts), os.cpu_count() or 1)
        if workers < len(hosts):
            raise ConfigError(f"--workers {workers}: each of the {len(hosts)} hosts needs a worker")
        sharding = FixedSharding(settings.shards) if settings.shards else DynamicSharding()
        if settings.shards is not None and settings.shards < workers:
            raise ConfigError(f"--shards {settings.shards}: fewer than the {workers} workers")
        return initial_layout(workers, hosts, sharding)
    if settings.shards is not None and settings.shards != len(before.shards):
        raise JobDirError(
            f"--shards {settings.shards}: the job was made with {len(before.shards)} shards, and they stay"
        )
    if set(hosts) != set(before.workers):
        raise JobDirError(
            f"the job's state is on the hosts {sorted(set(before.workers))}, this run has {sorted(hosts)}; "
            "start it on the same hosts"
        )
    workers = settings.workers or len(before.workers)
    if workers == len(before.workers):
        return before
    return _same_hosts(before, workers)


def wait_for_hosts(context: SparkContext, settings: Settings, layout: Layout) -> None:
    """After a fault: wait until every host of the layout has an executor; Spark starts lost ones anew."""
    if not settings.embedded:
        _wait_for_executors(context, set(layout.workers))


def _same_hosts(before: Layout, workers: int) -> Layout:
    hosts = sorted(set(before.workers))
    if workers < len(hosts):
        raise ConfigError(
            f"--workers {workers}: the job's state is on {len(hosts)} hosts, and each needs a worker"
        )
    if workers > len(before.shards):
        raise ConfigError(
            f"--workers {workers}: the job has {len(before.shards)} shards, so at most as many workers"
        )
    placed = [hosts[worker * len(hosts) // workers] for worker in range(workers)]
    shards: list[WorkerId] = [WorkerId(0)] * len(before.shards)
    for host in hosts:
        here = [s for s, owner in enumerate(before.shards) if before.workers[owner] == host]
        team = [worker for worker, place in enumerate(placed) if place == host]
        for place, shard in enumerate(here):
            shards[shard] = WorkerId(team[place * len(team) // len(here)])
    return Layout(LayoutVersion(before.version + 1), tuple(shards), tuple(placed), {})


def _wait_for_executors(context: SparkContext, wanted: set[HostId]) -> list[str]:
    """The executors' machines, once all wanted are there, or the number has stopped growing."""
    deadline = time.monotonic() + _PATIENCE
    hosts: list[str] = []
    changed = time.monotonic()
    while time.monotonic() < deadline:
        found = executor_hosts(context)
        if found != hosts:
            hosts, changed = found, time.monotonic()
        settled = hosts and time.monotonic() - changed > _SETTLE
        if (wanted and wanted <= set(hosts)) or (settled and not wanted):
            return hosts
        time.sleep(0.1)
    if wanted:
        raise JobDirError(
            f"the job's state is on the hosts {sorted(wanted)}; after {_PATIENCE:.0f} s the cluster has executors "
            f"on {hosts} only"
        )
    raise ConfigError(
        f"the Spark cluster gave no executors within {_PATIENCE:.0f} s; is a worker running there?"
    )
