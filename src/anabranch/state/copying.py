"""Copies of shards, made beside the steps, that a later step switches to.

`copy_out` reads a shard as of a step while the flow goes on, `copy_in` fills the copy; again and again, each time with
what changed since the last time, so that little is left for the step that switches.  That step collects what changed
since (`transfer.collect`), and the copy gets it as any store gets keys that arrive (see `arrival`).

CPY-1  A copy says as of which step it was made, and a step that switches to it brings what changed from there on.
CPY-2  Nothing in a copy counts before that.  So cargo may come twice, and one that failed half-way is made again.  From
       that step on a copier comes too late, also one that was told to copy as of this very step.
CPY-3  A step that switched to it in vain is undone before the copy is brought further; the changes that had come with
       that step are among those that come now.

Must not know: Spark, who decides what is copied and when it is whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from anabranch import crash
from anabranch.errors import Fenced, ShardMismatch
from anabranch.model.ids import Epoch, RegionId, Step
from anabranch.model.ranges import HashRange
from anabranch.state.arrival import copied, fill, marks_of, set_copied
from anabranch.state.asof import AsOf
from anabranch.state.cargo import Cargo, CargoTable, packed
from anabranch.state.faults import with_growth
from anabranch.state.history import Arrived, History
from anabranch.state.identity import Fence, ShardIdentity
from anabranch.state.removal import drop_shard
from anabranch.state.store import ShardStore
from anabranch.state.transaction import check_fence, store_fence, write_transaction
from anabranch.state.undo import UndoRing, short_name

FILLED = crash.declare("copy.filled", "some of a shard's keys are in a copy that is made beside the steps")
CHUNK_BYTES = 4 << 20


def copy_out(
    store: ShardStore,
    at: Step,
    epoch: Epoch,
    markers: Mapping[RegionId, Step],
    hashes: HashRange,
    tables_by_region: Mapping[RegionId, Sequence[str]],
    marks_since: Step | None,
    since: Step | None,
    between: Callable[[], None] | None = None,
) -> Iterator[Cargo]:
    """Read a shard as of `at` in pieces of about 4 MB; at least one for each region.

    Args:
        store: The source.
        at: All steps before it are committed.
        epoch: The coordinator's.
        markers: Where each region stands as of `at`.
        hashes: What is valid in the source.
        tables_by_region: The full names of the tables.
        marks_since: As in `transfer.collect`.
        since: As of which step the copy is; None: it is to be made.
        between: Called before each read transaction.

    Raises:
        ShardMismatch: The shard is not where it should be, or the undo ring does not reach back to `since`.
        Fenced: A later coordinator has the shard.
    """
    reader = AsOf(store, at, epoch, markers, between)
    known, marked = _marks(reader, marks_since, hashes)
    places = {short_name(name): (region, name) for region, many in tables_by_region.items() for name in many}
    bases = {region: reader.base(region) for region in tables_by_region}

    def cargo(region: RegionId, tables: Sequence[CargoTable]) -> Cargo:
        shard = store.identity.shard
        return Cargo(shard, region, *hashes, bases[region], since, known, tuple(tables))

    for rows in reader.scan([hashes]) if since is None else reader.changed(since, [hashes]):
        if rows.table not in places:
            continue
        region, name = places[rows.table]
        names = marked.get(rows.table, set())
        for start, end in _chunks(rows.addresses, rows.values):
            addresses = rows.addresses[start:end]
            here = names.intersection(addresses)
            names -= here
            yield cargo(region, [packed(name, addresses, rows.values[start:end], here)])
    for region, many in tables_by_region.items():
        # The tables and the marker, whether anything of the region travelled or not; and what is marked and did not.
        yield cargo(region, [packed(name, (), (), set()) for name in many])
        for name in many:
            left = sorted(marked.get(short_name(name), ()))
            for start, end in _chunks(left, [None] * len(left)):
                yield cargo(region, [CargoTable(name, (), (), b"", left[start:end])])


def copy_in(
    path: str | os.PathLike[str],
    identity: ShardIdentity,
    cargos: Iterable[Cargo],
    fence: Fence,
    at: Step,
    first: bool,
) -> None:
    """Put what was read as of `at` into a copy; a transaction for each piece.

    Args:
        path: Where the copy is, or is to be.
        identity: Of the copy.
        cargos: As they come from `copy_out`.
        fence: The copier's place among all writers.
        at: As of which step they were read.
        first: Whether to make the copy anew, in place of one of the same identity that was begun.

    Raises:
        Fenced: A newer writer was here.
        ShardMismatch: Another store is there; or there is none, or one of another step, to bring further.
        StorageFullError: The disk is full.
    """
    if first:
        _begin(path, identity, fence)
    for cargo in cargos:
        with_growth(partial(_put, path, identity, cargo, fence, at))
        crash.point(FILLED)


def _begin(path: str | os.PathLike[str], identity: ShardIdentity, fence: Fence) -> None:
    if (Path(path) / "data.mdb").exists():
        store = ShardStore.ensure(path, identity)
        with store.begin(write=False) as txn:
            _check_late(store, txn, fence)
        drop_shard(path, identity)
    ShardStore.create(path, identity)


def _put(path: str | os.PathLike[str], identity: ShardIdentity, cargo: Cargo, fence: Fence, at: Step) -> None:
    store = ShardStore.open(path, identity)
    store.reserve(cargo.keys, cargo.size)
    with write_transaction(store) as txn:
        _check_late(store, txn, fence)
        ring = UndoRing(store, txn)
        found = copied(store, txn)
        if cargo.since is not None and (found is None or not cargo.since <= found <= at):
            raise ShardMismatch(
                f"shard {store.path}: it is to be brought from step {cargo.since} to {at}, but it was copied as of step "
                f"{found}; copy it anew"
            )
        region = cargo.region
        marker = ring.marker(region)
        while marker is not None and ring.has_record(region, marker.step):
            marker = ring.roll_back(region, marker)
        fill(store, txn, [cargo])
        ring.add_marks(region, at, marks_of([cargo]))
        ring.set_history(region, History(at, (Arrived(at, cargo.low, cargo.end - 1, cargo.known),)))
        if cargo.before is not None:
            ring.set_marker(region, cargo.before)
        set_copied(store, txn, at)
        store_fence(store, txn, fence)


def _check_late(store: ShardStore, txn: Any, fence: Fence) -> None:
    """Raise Fenced if a newer writer was here, or the step as of which the copy is made, which has the same fence."""
    check_fence(store, txn, fence)
    ring = UndoRing(store, txn)
    for region in ring.regions():
        marker = ring.marker(region)
        if marker is not None and Fence(marker.epoch, marker.step, marker.attempt) >= fence:
            raise Fenced(
                f"shard {store.path}: {fence} comes too late to copy it, step {marker.step} has switched to it"
            )


def _marks(reader: AsOf, since: Step | None, hashes: HashRange) -> tuple[Step, dict[bytes, set[bytes]]]:
    """The keys that changed, by table, and from which step on these are all."""
    marked: dict[bytes, set[bytes]] = {}
    if since is None:
        return reader.at, marked
    try:
        for touched in reader.touched(since, [hashes]):
            marked.setdefault(short_name(touched.table), set()).update(touched.addresses)
    except ShardMismatch:
        # The next checkpoint will have to be a full one; it is told so when it asks.
        return reader.at, {}
    return since, marked


def _chunks(addresses: Sequence[bytes], values: Sequence[bytes | None]) -> Iterator[tuple[int, int]]:
    start = size = 0
    for end, (address, value) in enumerate(zip(addresses, values, strict=True)):
        size += len(address) + (0 if value is None else len(value))
        if size >= CHUNK_BYTES:
            yield start, end + 1
            start, size = end + 1, 0
    if start < len(addresses):
        yield start, len(addresses)
