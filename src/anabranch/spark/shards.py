"""Where a worker's shards are on this machine, and the life of their state around one stage."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from anabranch import crash
from anabranch.errors import IncompleteInput, WrongHost
from anabranch.flow.plan import Plan
from anabranch.model.ids import HostId, OperatorId, RegionId, ShardId, Step, WorkerId
from anabranch.model.placement import Copy
from anabranch.operators.kernel import KeyedState
from anabranch.spark.spec import STATE_DIR_VARIABLE, Moving, StepSpec
from anabranch.state.boot import current_boot_id
from anabranch.state.identity import Fence, ShardIdentity
from anabranch.state.store import ShardStore, shard_path
from anabranch.state.transfer import Arrival, Cargo, weigh
from anabranch.state.worker import OwnedShard, WorkerState, run_with_growth
from anabranch.state.writeback import begin_writing

SYNCED = crash.declare("sync.shard", "when one of the shards was synced for an orderly stop")

T = TypeVar("T")


class Written(NamedTuple):
    """What a stage wrote."""

    touched: dict[RegionId, list[ShardId]]
    """The slots of the copies that were written."""
    undo_bytes: int


class StageState(Protocol):
    """What a stage needs of the state below it."""

    def scoped(self, operator: OperatorId, region: RegionId) -> KeyedState: ...


def run_with_state(
    plan: Plan,
    spec: StepSpec,
    stage: int,
    worker: WorkerId,
    body: Callable[[StageState], T],
    cargos: Sequence[Cargo] = (),
) -> tuple[T, Written]:
    """Run a stage's body over the worker's copies and commit them; also tells what it wrote.  A stage without state
    opens nothing.

    Args:
        cargos: The state that has arrived for this stage; acquired before the body asks for a key.
    """
    regions = plan.regions(stage)
    if not regions:
        if stage == plan.depth:
            _make_empty(plan, spec, worker)
        return body(_NoState()), Written({}, 0)
    owned, slots = _owned(plan, spec, worker, regions, cargos)

    def make() -> WorkerState:
        return WorkerState(len(spec.layout.shards), owned, _fence(spec), regions, spec.keep_undo_from)

    def run(state: WorkerState) -> tuple[T, Written]:
        result = body(state)
        touched: dict[RegionId, list[ShardId]] = {}
        for shard in state.commit():
            for region in shard.regions:
                touched.setdefault(region, []).append(slots[shard.shard])
        return result, Written(touched, state.undo_bytes)

    result = run_with_growth(make, run)
    begin_writing([Path(one.path) for one in owned if one.identity.shard in spec.write_back])
    return result


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


def check_host(spec: StepSpec, worker: WorkerId, copies: Sequence[Copy]) -> None:
    """Raises WrongHost when a worker's copies cannot be here.  Of a host without any, nothing is asked: it may have lost its
    empty directory, and has lost no state with it."""
    if copies:
        host_dir(spec, spec.layout.workers[worker])


def state_root(spec: StepSpec) -> Path:
    machine = os.environ.get(STATE_DIR_VARIABLE)
    return Path(machine) / spec.job if machine else Path(spec.state_root)


def identity(spec: StepSpec, copy: Copy) -> ShardIdentity:
    return ShardIdentity(
        job=spec.job, shard=copy.shard, of=copy.of, incarnation=copy.incarnation, host=copy.host
    )


def copy_path(spec: StepSpec, copy: Copy) -> Path:
    """Where the machine of a copy's host keeps it, whether that is there or not."""
    return shard_path(state_root(spec) / copy.host, copy.shard, copy.generation)


def region_tables(plan: Plan, regions: Sequence[RegionId]) -> dict[RegionId, tuple[str, ...]]:
    """The names of the tables that the operators of these regions keep."""
    tables: dict[RegionId, tuple[str, ...]] = dict.fromkeys(regions, ())
    for planned in plan.operators:
        if planned.region in tables and planned.node.stateful is not None:
            tables[planned.region] += tuple(
                f"{planned.node.id}.{name}" for name in planned.node.stateful.tables
            )
    return tables


def _fence(spec: StepSpec) -> Fence:
    return Fence(spec.epoch, spec.step, spec.attempt)


def _owned(
    plan: Plan, spec: StepSpec, worker: WorkerId, regions: Sequence[RegionId], cargos: Sequence[Cargo]
) -> tuple[list[OwnedShard], dict[ShardId, ShardId]]:
    """The worker's copies, and the slot of each by its shard: a worker never has two copies of a shard."""
    copies = spec.placement.copies_of(worker)
    check_host(spec, worker, copies)
    arriving: dict[ShardId, list[Moving]] = {}
    for moving in spec.moving:
        if moving.target.worker == worker:
            arriving.setdefault(moving.shard, []).append(moving)
    tables = region_tables(plan, regions) if arriving else {}
    owned, slots = [], {}
    for copy in copies:
        movings = arriving.get(copy.shard)
        slots[copy.shard] = copy.slot
        owned.append(
            OwnedShard(
                copy_path(spec, copy),
                identity(spec, copy),
                _expected(spec, copy.slot if movings is None else movings[0].slot, regions),
                hashes=(copy.low, copy.end),
                tables=tables,
                arriving=None if movings is None else _arrival(spec, movings, regions, cargos),
            )
        )
    return owned, slots


def _expected(
    spec: StepSpec, slot: ShardId | None, regions: Sequence[RegionId]
) -> Mapping[RegionId, Step | None]:
    """Where a copy's regions must stand; of one that is new there is nothing to say."""
    if slot is None:
        return {}
    return {region: spec.markers.get(region, {}).get(slot) for region in regions}


def _arrival(
    spec: StepSpec, movings: Sequence[Moving], regions: Sequence[RegionId], cargos: Sequence[Cargo]
) -> Arrival:
    moving = movings[0]
    mine = tuple(cargo for cargo in cargos if cargo.shard == moving.shard)
    if sorted(cargo.region for cargo in mine) != sorted([*regions] * len(movings)):
        raise IncompleteInput(
            f"step {spec.step}: shard {moving.shard} should arrive at worker {moving.target.worker} with the state of "
            f"regions {sorted(regions)} from {len(movings)} copies, and came with "
            f"{sorted(cargo.region for cargo in mine)}"
        )
    return Arrival(mine, moving.fresh)


def _make_empty(plan: Plan, spec: StepSpec, worker: WorkerId) -> None:
    """A flow that keeps no state has shards all the same, so that it can be rescaled and recovered like any other."""
    if not any(planned.region for planned in plan.operators):
        for moving in spec.moving:
            if moving.fresh and moving.target.worker == worker:
                ShardStore.create(copy_path(spec, moving.target), identity(spec, moving.target))


def weigh_copies(spec: StepSpec, worker: WorkerId) -> dict[ShardId, int]:
    """The bytes of state in each of the worker's copies, by slot."""
    return weigh_each(spec, spec.placement.copies_of(worker))


def weigh_each(spec: StepSpec, copies: Iterable[Copy]) -> dict[ShardId, int]:
    """The bytes of state in copies, by slot; without what has left them."""
    return {
        copy.slot: weigh(ShardStore.open(copy_path(spec, copy), identity(spec, copy)), (copy.low, copy.end))
        for copy in copies
    }


# What the coordinator asks of hosts outside of steps.


def sync_shards(spec: StepSpec, worker: WorkerId) -> None:
    """Make the worker's shards durable, for an orderly stop."""
    copies = spec.placement.copies_of(worker)
    check_host(spec, worker, copies)
    for copy in copies:
        store = ShardStore.open(copy_path(spec, copy), identity(spec, copy))
        store.stamp_clean(current_boot_id())
        crash.point(SYNCED)
