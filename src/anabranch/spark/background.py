"""What the coordinator asks of hosts for checkpoints and recovery: functions of (spec, host or worker), run where the
shards are.  Their answers are plain values.

`spec.markers` is what the shards must be at: as of `spec.step` for a snapshot, a restoration and a rollback alike.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TypeVar

from anabranch import crash
from anabranch.errors import EngineError, Fenced
from anabranch.model.ids import HostId, RegionId, ShardId, Step, WorkerId
from anabranch.spark.shards import host_dir, identity, state_root
from anabranch.spark.spec import StepSpec
from anabranch.state.boot import current_boot_id
from anabranch.state.faults import with_growth
from anabranch.state.identity import Fence
from anabranch.state.manifest import Manifest, Piece, Work
from anabranch.state.restore import Target, restore_shards
from anabranch.state.snapshot import Snapshot, Source, write_snapshot
from anabranch.state.store import ShardStore, shard_path
from anabranch.state.survey import ShardFound, survey
from anabranch.state.transaction import rollback_shard
from anabranch.state.versions import Versions
from anabranch.storage.base import Storage

ROLLED_BACK = crash.declare("rollback.shard", "when one of the shards that survived was rolled back")

T = TypeVar("T")
_NICE = 10


def snapshot_host(
    spec: StepSpec,
    host: HostId,
    *,
    storage: Storage,
    version: int,
    since: Step | None,
    partitions: int,
    work: Work,
) -> list[Piece]:
    """Write this host's share of the checkpoint of all steps before `spec.step`, on a thread of low priority.

    Args:
        spec: The step that comes next when the checkpoint is begun; its markers are those of the checkpoint.
        host: Whose shards.
        storage: The folder of checkpoints.
        version: The number of the checkpoint, above that of any committed one.
        since: The step of the manifest that it follows; None for none.
        partitions: P.
        work: As planned from that manifest.

    Raises:
        ShardMismatch: a shard is not as the step log says, or its undo ring is too short.
        CorruptError: an older piece that was to be merged is damaged; a full checkpoint does not need it.
        Fenced: a later coordinator has a shard, or the version exists.
        StorageFullError, WrongHost.
    """
    hosts = spec.layout.hosts
    place = hosts.index(host)
    directory = host_dir(spec, host)
    shards = [
        Source(str(shard_path(directory, shard)), identity(spec, shard), markers_of(spec, shard))
        for worker in spec.layout.workers_of(host)
        for shard in spec.layout.shards_of(worker)
    ]
    # Asked on this thread, which also makes an object store's client start its threads from here.
    if version in Versions(storage).list():
        raise Fenced(f"checkpoint {version} exists already: another coordinator has made it")
    snapshot = Snapshot(version, spec.step, since, spec.epoch, partitions, work)
    merges = [partition for partition in sorted(work.merges) if partition % len(hosts) == place]
    return run_low(lambda: write_snapshot(storage, snapshot, shards, merges, host))


def shard_versions(spec: StepSpec, worker: WorkerId, regions: Iterable[RegionId]) -> list[ShardFound]:
    """What is on disk of each shard of a worker.  Raises nothing, and changes nothing."""
    directory = state_root(spec) / spec.layout.workers[worker]
    asked = list(regions)
    return [
        survey(shard_path(directory, shard), identity(spec, shard), asked)
        for shard in spec.layout.shards_of(worker)
    ]


def adopt_worker(spec: StepSpec, worker: WorkerId, shards: Collection[ShardId] | None = None) -> None:
    """Say of the worker's shards (or these of them) that they are written, unsynced, in this boot: before
    the first step of a run writes to shards that were found as they should be."""
    for store in _stores(spec, worker, shards):
        store.stamp(current_boot_id())


def roll_back_worker(spec: StepSpec, worker: WorkerId, shards: Collection[ShardId] | None = None) -> None:
    """Take the worker's shards (or these of them) back to exactly `spec.markers`; each in one transaction.

    Stores the spec's fence, so tasks of the time before cannot write any more.  Done twice, it changes nothing.

    Raises:
        ShardMismatch: an undo ring does not reach back that far, or a shard is behind.
        Fenced, StorageFullError, WrongHost.
    """
    for store in _stores(spec, worker, shards):
        store.stamp(current_boot_id())
        wanted = markers_of(spec, store.identity.shard)
        with_growth(partial(rollback_shard, store, _fence(spec), wanted))
        crash.point(ROLLED_BACK)


def restore_worker(
    spec: StepSpec,
    worker: WorkerId,
    *,
    storage: Storage,
    manifest: Manifest,
    shards: Collection[ShardId] | None = None,
) -> int:
    """Rebuild the worker's shards (or these of them) from a checkpoint; returns the number of keys.

    Those that were rebuilt under the spec's fence already are left as they are.

    Raises:
        CorruptError: a piece is missing or damaged.
        Fenced, StorageFullError.
    """
    if manifest.step != spec.step:
        raise EngineError(f"checkpoint {manifest.version} is as of step {manifest.step}, not {spec.step}")
    directory = state_root(spec) / spec.layout.workers[worker]
    directory.mkdir(parents=True, exist_ok=True)
    targets = [
        Target(shard_path(directory, shard), identity(spec, shard), markers_of(spec, shard))
        for shard in _chosen(spec, worker, shards)
    ]
    return restore_shards(storage, manifest, targets, _fence(spec))


def run_low(action: Callable[[], T]) -> T:
    """Run an action on a thread of its own, to which a busy machine gives a tenth of what a step's task gets.

    Not the idle class: on a machine that is never idle a checkpoint would never end, and undo records would pile up.
    A thread, because an unprivileged one cannot raise its priority again, and this process will run steps later.  Threads
    inherit it, so the action must not be the first to use a library's pool of threads, which stays.
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _lower_priority()
            answers.append(action())
        except BaseException as error:  # noqa: BLE001  raised below, in the thread that asked
            errors.append(error)

    thread = threading.Thread(target=run, name="anabranch-background")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return answers[0]


def _lower_priority() -> None:
    if sys.platform != "linux":
        # Elsewhere a nice value is the whole process's.
        return
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    except OSError:
        # A sandbox may forbid it: the work is the same, at normal priority.
        return


def markers_of(spec: StepSpec, shard: ShardId) -> dict[RegionId, Step]:
    """Where the regions of a shard stand."""
    return {region: steps[shard] for region, steps in spec.markers.items() if shard in steps}


def _stores(spec: StepSpec, worker: WorkerId, shards: Collection[ShardId] | None) -> Iterable[ShardStore]:
    directory = host_dir(spec, spec.layout.workers[worker])
    for shard in _chosen(spec, worker, shards):
        yield ShardStore.open(shard_path(directory, shard), identity(spec, shard))


def _chosen(spec: StepSpec, worker: WorkerId, shards: Collection[ShardId] | None) -> list[ShardId]:
    return [shard for shard in spec.layout.shards_of(worker) if shards is None or shard in shards]


def _fence(spec: StepSpec) -> Fence:
    return Fence(spec.epoch, spec.step, spec.attempt)
