"""State that changes its host inside a step: collected one stage early, sent with the data of the same shuffle.

Where a shard moves in step *n*, the worker that has it collects the state of every region one stage before that
region's; it travels in the very blobs in which the step's rows travel, and is acquired, in the transaction that applies
the step, before the first row (`shards.run_with_state`).  Nothing is buffered from one step to the next, and a step that
fails has moved nothing: the copy that was collected from is not written any more, so it is collected again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from anabranch import crash
from anabranch.flow.plan import Plan
from anabranch.model.ids import HostId, ShardId, Step, WorkerId
from anabranch.model.placement import Copy
from anabranch.spark.blob import Blob, Packed
from anabranch.spark.pools import write_files
from anabranch.spark.shards import copy_path, host_dir, identity, region_tables, state_root, weigh_each
from anabranch.spark.spec import StepSpec
from anabranch.state.identity import Fence
from anabranch.state.removal import drop_shard, sweep_host
from anabranch.state.store import ShardStore
from anabranch.state.transfer import Cargo, collect

STATE = -1
"""The channel of moving state; rows have channels from 0 on."""

SENT = crash.declare("move.sent", "state was collected and is about to leave with the data")


def collect_leaving(
    plan: Plan, spec: StepSpec, stage: int, worker: WorkerId
) -> tuple[list[tuple[WorkerId, Packed]], dict[ShardId, int]]:
    """What the worker's shards that move in this step must send from this stage, by receiver; and its bytes by shard."""
    regions = plan.regions(stage + 1)
    leaving: list[tuple[WorkerId, Packed]] = []
    sizes: dict[ShardId, int] = {}
    mine = [moving for moving in spec.moving if moving.source.worker == worker]
    if not regions or not mine:
        return leaving, sizes
    tables = region_tables(plan, regions)
    fence = Fence(spec.epoch, spec.step, spec.attempt)
    host_dir(spec, spec.layout.workers[worker])
    for moving in mine:
        store = ShardStore.open(copy_path(spec, moving.source), identity(spec, moving.source))
        for region in regions:
            cargo = collect(
                store,
                fence,
                region,
                tables[region],
                (moving.low, moving.end),
                moving.markers.get(region),
                marks_since(spec, moving.source, moving.target),
                moving.since,
            )
            cargo = replace(cargo, shard=moving.shard)
            sizes[moving.shard] = sizes.get(moving.shard, 0) + cargo.size
            leaving.append((moving.target.worker, Packed(STATE, cargo.keys, cargo.encode())))
    crash.point(SENT)
    return leaving, sizes


def marks_since(spec: StepSpec, source: Copy, target: Copy) -> Step | None:
    """From which step on marks are wanted of what changed.  Where shards split or merge there are none, and the checkpoint
    behind that is a full one: the marks of several sources would have to agree in what they know."""
    return spec.marks_since if source.of == target.of else None


def arrived_state(blobs: Iterable[Blob]) -> list[Cargo]:
    """The state among what has arrived."""
    return [Cargo.decode(packed.data) for blob in blobs for packed in blob.frames if packed.channel == STATE]


# What a migration asks of hosts beside the steps.


def prepare_host(spec: StepSpec, host: HostId) -> dict[ShardId, int]:
    """Make a host ready to hold shards; returns the bytes of the copies that it has, by slot.

    One that has none yet may have been the job's before, and have been lost, or left without being emptied: what it still
    has would be in the way of what arrives.
    """
    (state_root(spec) / host).mkdir(parents=True, exist_ok=True)
    if not spec.placement.copies_at(host):
        clear_host(spec, host)
    return weigh_host(spec, host)


def clear_host(spec: StepSpec, host: HostId) -> list[str]:
    """Remove from a host what the placement does not name there; returns the names of what was removed."""
    keep = [identity(spec, copy) for copy in spec.placement.copies_at(host)]
    fence = Fence(spec.epoch, spec.step, spec.attempt)
    return write_files(partial(sweep_host, state_root(spec) / host, keep, fence, spec.generation))


def weigh_host(spec: StepSpec, host: HostId) -> dict[ShardId, int]:
    """The bytes of the copies that a host has, by slot."""
    return weigh_each(spec, spec.placement.copies_at(host))


def drop_copies(spec: StepSpec, host: HostId, copies: Sequence[Copy]) -> int:
    """Delete these copies, as far as they are this host's; returns the bytes that were freed."""
    return sum(
        write_files(partial(drop_shard, copy_path(spec, copy), identity(spec, copy)))
        for copy in copies
        if copy.host == host
    )
