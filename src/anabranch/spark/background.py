"""What the coordinator asks of hosts for checkpoints and recovery: functions of (spec, host or worker), run where the
shards are.  Their answers are plain values.

`spec.markers` is what the shards must be at: as of `spec.step` for a snapshot, a restoration and a rollback alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import partial

from anabranch import crash
from anabranch.errors import EngineError, Fenced
from anabranch.model.ids import HostId, RegionId, ShardId, Step, WorkerId
from anabranch.model.placement import Copy
from anabranch.spark.pools import Watch, write_files
from anabranch.spark.shards import check_host, copy_path, host_dir, identity, state_root
from anabranch.spark.spec import StepSpec
from anabranch.state.boot import current_boot_id
from anabranch.state.faults import with_growth
from anabranch.state.identity import Fence
from anabranch.state.manifest import Manifest, Piece, Work
from anabranch.state.removal import sweep_host
from anabranch.state.restore import Target, restore_shards
from anabranch.state.snapshot import Snapshot, Source, write_snapshot
from anabranch.state.store import ShardStore
from anabranch.state.survey import ShardFound, survey
from anabranch.state.transaction import rollback_shard
from anabranch.state.versions import Versions
from anabranch.storage.base import Storage

ROLLED_BACK = crash.declare("rollback.shard", "when one of the shards that survived was rolled back")


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
    """Write this host's share of the checkpoint of all steps before `spec.step`.

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
    if copies := spec.placement.copies_at(host):
        host_dir(spec, host)
    shards = [
        Source(
            str(copy_path(spec, copy)),
            identity(spec, copy),
            markers_of(spec, copy),
            hashes=(copy.low, copy.end),
        )
        for copy in copies
    ]
    if version in Versions(storage).list():
        raise Fenced(f"checkpoint {version} exists already: another coordinator has made it")
    snapshot = Snapshot(version, spec.step, since, spec.epoch, partitions, work)
    merges = [partition for partition in sorted(work.merges) if partition % len(hosts) == place]
    return write_snapshot(storage, snapshot, shards, merges, host, Watch(), write_files)


def shard_versions(spec: StepSpec, worker: WorkerId, regions: Iterable[RegionId]) -> list[ShardFound]:
    """What is on disk of each shard of a worker.  Raises nothing, and changes nothing."""
    asked = list(regions)
    return [
        replace(
            survey(copy_path(spec, copy), identity(spec, copy), asked, hashes=(copy.low, copy.end)),
            shard=copy.slot,
        )
        for copy in spec.placement.copies_of(worker)
    ]


def roll_back_worker(spec: StepSpec, worker: WorkerId, shards: Collection[ShardId] | None = None) -> None:
    """Take the worker's shards (or these of them) back to exactly `spec.markers`; each in one transaction.

    Stores the spec's fence, so tasks of the time before cannot write any more, and says of the shards that they are
    written, unsynced, in this boot.  Done twice, it changes nothing.

    Raises:
        ShardMismatch: an undo ring does not reach back that far, or a shard is behind.
        Fenced, StorageFullError, WrongHost.
    """
    for copy, store in _stores(spec, worker, shards):
        store.stamp(current_boot_id())
        with_growth(partial(rollback_shard, store, _fence(spec), markers_of(spec, copy)))
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
        Target(copy_path(spec, copy), identity(spec, copy), markers_of(spec, copy))
        for copy in _chosen(spec, worker, shards)
    ]
    return restore_shards(storage, manifest, targets, _fence(spec))


def sweep(spec: StepSpec, worker: WorkerId) -> list[str]:
    """Remove what the placement does not name: from the worker's host, if it is the first of the host's workers, and from
    directories of hosts that are no longer used.  Returns the names of what was removed."""
    host = spec.layout.workers[worker]
    if worker != spec.layout.workers_of(host)[0]:
        return []
    root = state_root(spec)
    keep = [identity(spec, copy) for copy in spec.placement.copies_at(host)]
    removed = sweep_host(root / host, keep, _fence(spec), spec.generation)
    used = set(spec.layout.hosts)
    for other in sorted(root.iterdir()) if root.is_dir() else ():
        if other.is_dir() and other.name not in used and any(other.glob("shard-*")):
            removed += sweep_host(other, [], _fence(spec))
    return removed


def markers_of(spec: StepSpec, copy: Copy) -> dict[RegionId, Step]:
    """Where the regions of a copy stand."""
    return {region: steps[copy.slot] for region, steps in spec.markers.items() if copy.slot in steps}


def _stores(
    spec: StepSpec, worker: WorkerId, shards: Collection[ShardId] | None
) -> Iterable[tuple[Copy, ShardStore]]:
    chosen = _chosen(spec, worker, shards)
    check_host(spec, worker, chosen)
    for copy in chosen:
        yield copy, ShardStore.open(copy_path(spec, copy), identity(spec, copy))


def _chosen(spec: StepSpec, worker: WorkerId, slots: Collection[ShardId] | None) -> list[Copy]:
    return [copy for copy in spec.placement.copies_of(worker) if slots is None or copy.slot in slots]


def _fence(spec: StepSpec) -> Fence:
    return Fence(spec.epoch, spec.step, spec.attempt)
