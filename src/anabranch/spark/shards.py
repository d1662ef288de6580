"""Where a worker's shards are on this machine, and the life of their state around one stage."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from anabranch import crash
from anabranch.errors import WrongHost
from anabranch.flow.plan import Plan
from anabranch.model.ids import HostId, Incarnation, OperatorId, RegionId, ShardId, WorkerId
from anabranch.operators.kernel import KeyedState
from anabranch.spark.spec import STATE_DIR_VARIABLE, StepSpec
from anabranch.state.boot import current_boot_id
from anabranch.state.identity import Fence, ShardIdentity
from anabranch.state.store import ShardStore, shard_path
from anabranch.state.worker import OwnedShard, WorkerState, run_with_growth

SYNCED = crash.declare("sync.shard", "when one of the shards was synced for an orderly stop")

T = TypeVar("T")


class Written(NamedTuple):
    """What a stage wrote."""

    touched: dict[RegionId, list[ShardId]]
    undo_bytes: int


class StageState(Protocol):
    """What a stage needs of the state below it."""

    def scoped(self, operator: OperatorId, region: RegionId) -> KeyedState: ...


def run_with_state(
    plan: Plan, spec: StepSpec, stage: int, worker: WorkerId, body: Callable[[StageState], T]
) -> tuple[T, Written]:
    """Run a stage's body over the worker's shards and commit them; also tells what it wrote.  A stage without state
    opens nothing."""
    regions = plan.regions(stage)
    if not regions:
        return body(_NoState()), Written({}, 0)
    owned = _owned(spec, worker, regions)

    def make() -> WorkerState:
        return WorkerState(
            len(spec.layout.shards),
            owned,
            Fence(spec.epoch, spec.step, spec.attempt),
            regions,
            spec.keep_undo_from,
        )

    def run(state: WorkerState) -> tuple[T, Written]:
        result = body(state)
        touched: dict[RegionId, list[ShardId]] = {}
        for shard in state.commit():
            for region in shard.regions:
                touched.setdefault(region, []).append(shard.shard)
        return result, Written(touched, state.undo_bytes)

    return run_with_growth(make, run)


class _NoState:
    def scoped(self, operator: OperatorId, region: RegionId) -> KeyedState:
        raise AssertionError(f"operator {operator!r} keeps state in a stage without regions")


def host_dir(spec: StepSpec, host: HostId) -> Path:
    """The directory in which this machine keeps the shards of `host`.

    Raises WrongHost when this machine has none: the task landed elsewhere.
    """
    directory = state_root(spec) / host
    if not directory.is_dir():
        raise WrongHost(
            f"step {spec.step}: a task for host {host!r} found no shards of it at {directory}; it runs on another machine, "
            f"or {directory} was deleted"
        )
    return directory


def state_root(spec: StepSpec) -> Path:
    machine = os.environ.get(STATE_DIR_VARIABLE)
    return Path(machine) / spec.job if machine else Path(spec.state_root)


def identity(spec: StepSpec, shard: ShardId) -> ShardIdentity:
    return ShardIdentity(
        job=spec.job,
        shard=shard,
        of=len(spec.layout.shards),
        incarnation=Incarnation(spec.incarnations[shard]),
        host=spec.layout.workers[spec.layout.shards[shard]],
    )


def _owned(spec: StepSpec, worker: WorkerId, regions: Iterable[RegionId]) -> list[OwnedShard]:
    directory = host_dir(spec, spec.layout.workers[worker])
    return [
        OwnedShard(
            shard_path(directory, shard),
            identity(spec, shard),
            {region: spec.markers.get(region, {}).get(shard) for region in regions},
        )
        for shard in spec.layout.shards_of(worker)
    ]


# What the coordinator asks of hosts outside of steps.


def sync_shards(spec: StepSpec, worker: WorkerId) -> None:
    """Make the worker's shards durable, for an orderly stop."""
    directory = host_dir(spec, spec.layout.workers[worker])
    for shard in spec.layout.shards_of(worker):
        store = ShardStore.open(shard_path(directory, shard), identity(spec, shard))
        store.stamp_clean(current_boot_id())
        crash.point(SYNCED)
