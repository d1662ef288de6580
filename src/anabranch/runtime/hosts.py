"""Which hosts and workers a run has: the layout it starts with."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

from pyspark import SparkContext

from anabranch.errors import ConfigError, JobDirError
from anabranch.model.ids import HostId, LayoutVersion, WorkerId
from anabranch.model.layout import FixedSharding, Layout, Sharding, initial_layout, rescale
from anabranch.model.placement import Placement, anew
from anabranch.runtime.settings import Settings
from anabranch.spark.placement import executor_hosts

log = logging.getLogger(__name__)

_SETTLE = 1.0
_PATIENCE = 30.0


class RollCall:
    """Which hosts of a cluster are there.  One that a step has waited for in vain, the recovery behind it does not wait for
    again: nobody should have to be patient twice."""

    def __init__(self, context: SparkContext) -> None:
        self._context = context
        self._gone: set[HostId] = set()

    def missing(self, wanted: set[HostId]) -> set[HostId]:
        """Wait for hosts; those that have not come."""
        self._gone = wanted - set(_wait_for_executors(self._context, wanted))
        return self._gone

    def present(self, wanted: set[HostId]) -> list[str]:
        """All hosts there are, when those wanted have come, or will not."""
        gone, self._gone = self._gone, set()
        return _wait_for_executors(self._context, wanted - gone)


def find_hosts(roll: RollCall, settings: Settings, before: Placement | None) -> list[HostId]:
    """The hosts to run on: logical ones when embedded, else the machines of the cluster's executors."""
    if settings.embedded:
        if before is None or (settings.hosts is not None and settings.hosts != len(aim(before).hosts)):
            return logical_hosts(settings.hosts or 1)
        return sorted(set(before.layout.workers))
    wanted = set(before.layout.workers) if before is not None else set()
    hosts = roll.present(wanted)
    if not hosts:
        raise ConfigError(
            f"the Spark cluster gave no executors within {_PATIENCE:.0f} s; is a worker running there?"
        )
    if lost := sorted(wanted - set(hosts)):
        log.warning("hosts are gone, going on without them hosts=%s", ",".join(lost))
    if settings.workers is None and wanted & set(hosts):
        # Others have joined the cluster, or were emptied on purpose: a rescaling uses them, a recovery does not.
        hosts = [host for host in hosts if host in wanted]
    return [HostId(host) for host in hosts]


def logical_hosts(count: int) -> list[HostId]:
    """The names of the hosts of an embedded run."""
    return [HostId(f"host-{number}") for number in range(count)]


def aim(placement: Placement) -> Layout:
    """The layout of a placement, or the one that it is on its way to."""
    return placement.layout if placement.intent is None else placement.intent.target


def starting_placement(
    hosts: Sequence[HostId], settings: Settings, before: Placement | None, sharding: Sharding
) -> Placement:
    """The job's first placement, or the one that follows its last one for the workers and hosts there are now.

    On the same hosts shards stay where they are: between workers of one host a shard changes its owner without
    a byte being copied.  On other hosts as few move as can be, and are rebuilt there from a checkpoint.  A migration that
    was under way goes on, unless its hosts are gone or other workers are asked for.
    """
    if before is None:
        layout = _first_layout(hosts, settings, sharding)
        return Placement(layout, (0,) * len(layout.shards))
    made = len(before.layout.shards)
    if settings.shards is not None and settings.shards != made:
        raise JobDirError(f"--shards {settings.shards}: the job was made with {made} shards, and they stay")
    there = set(hosts) >= set(before.layout.workers)
    wanted = len(aim(before).workers)
    if not before.settled and there and settings.workers in (None, wanted):
        return before
    workers = settings.workers or max(wanted, len(hosts) if before.settled else 0)
    shards = sharding.shards_after(made, workers)
    if workers > shards:
        raise ConfigError(f"--workers {workers}: the job has {shards} shards, so at most as many workers")
    same = set(hosts) == set(before.layout.workers)
    if same and before.settled and workers == len(before.layout.workers):
        return before
    if same and workers >= len(hosts) and shards == made:
        layout = _same_hosts(before.layout, workers)
    else:
        layout = rescale(before.layout, workers, list(hosts)[:workers], FixedSharding(shards))
    return anew(before, layout)


def _first_layout(hosts: Sequence[HostId], settings: Settings, sharding: Sharding) -> Layout:
    workers = settings.workers or max(len(hosts), os.cpu_count() or 1)
    if workers < len(hosts):
        raise ConfigError(f"--workers {workers}: each of the {len(hosts)} hosts needs a worker")
    if settings.shards is not None and settings.shards < workers:
        raise ConfigError(f"--shards {settings.shards}: fewer than the {workers} workers")
    return initial_layout(workers, hosts, sharding)


def wait_for_hosts(roll: RollCall, settings: Settings, layout: Layout) -> bool:
    """After a fault: wait for every host of the layout to have an executor; Spark starts lost ones anew.

    Returns:
        Whether they all have.
    """
    return settings.embedded or not roll.missing(set(layout.workers))


def _same_hosts(before: Layout, workers: int) -> Layout:
    hosts = sorted(set(before.workers))
    placed = [hosts[worker * len(hosts) // workers] for worker in range(workers)]
    shards: list[WorkerId] = [WorkerId(0)] * len(before.shards)
    for host in hosts:
        here = [s for s, owner in enumerate(before.shards) if before.workers[owner] == host]
        team = [worker for worker, place in enumerate(placed) if place == host]
        for place, shard in enumerate(here):
            shards[shard] = WorkerId(team[place * len(team) // len(here)])
    return Layout(LayoutVersion(before.version + 1), tuple(shards), tuple(placed), {})


def _wait_for_executors(context: SparkContext, wanted: set[HostId]) -> list[str]:
    """The executors' machines, once all wanted are there, or, with none wanted, the number has stopped growing; or as
    many as there are when patience ends."""
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
    return hosts
