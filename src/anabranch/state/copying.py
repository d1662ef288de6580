"""Copies of shards, made beside the steps, that a later step switches to.

`copy_out` reads a shard as of a step while the flow goes on, `copy_in` fills the copy; again and again, each time with
what changed since the last time, so that little is left for the step that switches.  That step collects what changed
since (`transfer.collect`), and the copy gets it as any store gets keys that arrive (see `arrival`).

CPY-1  A copy says as of which step it was made, and a step that switches to it brings what changed from there on.
CPY-2  Nothing in a copy counts before that.  So cargo may come twice, and one that failed half-way is made again.  From
       that step on a copier comes too late, also one that was told to copy as of this very step.
CPY-3  A step that switched to it in vain is undone before the copy is brought further; the changes that had come with
       that step are among those that come now.
CPY-4  Jobs as of one step have one fence: one that starved is run again, and so is one that failed.  So a copy says which
       job filled it last, and tasks of earlier ones come too late.

Must not know: Spark, who decides what is copied and when it is whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgpack

from anabranch import crash
from anabranch.errors import CorruptError, Fenced, ShardMismatch
from anabranch.model.ids import Epoch, RegionId, Step
from anabranch.model.ranges import HashRange
from anabranch.state.arrival import copied, fill, marks_of, set_copied
from anabranch.state.asof import AsOf
from anabranch.state.boot import current_boot_id
from anabranch.state.cargo import Cargo, CargoTable, packed
from anabranch.state.faults import with_growth
from anabranch.state.history import Arrived, History
from anabranch.state.identity import Fence, ShardIdentity
from anabranch.state.store import META, ShardStore
from anabranch.state.transaction import check_fence, store_fence, write_transaction
from anabranch.state.undo import UndoRing, short_name

FILLED = crash.declare("copy.filled", "some of a shard's keys are in a copy that is made beside the steps")
CHUNK_BYTES = 4 << 20
_FILLER = b"filler"


class Filler(NamedTuple):
    """A task that fills copies, in the order of all such tasks (CPY-4)."""

    epoch: Epoch
    job: int
    """Grows with every job of the epoch, also with one that is run again."""
    run: bytes
    """Names the task: Spark may start another of the same job, and that would empty what this one has filled."""

    def __str__(self) -> str:
        return f"job {self.job} of epoch {self.epoch}"


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
    filler: Filler,
) -> None:
    """Put what was read as of `at` into a copy; a transaction for each piece.

    Args:
        path: Where the copy is, or is to be.
        identity: Of the copy.
        cargos: As they come from `copy_out`.
        fence: The copier's place among all writers.
        at: As of which step they were read.
        first: Whether to make the copy anew, in place of one of the same identity that was begun.
        filler: Who puts it.

    Raises:
        Fenced: A newer writer was here, or another task of the same job.
        ShardMismatch: Another store is there; or there is none, or one of another step, to bring further; or what was begun
            is not there any more.
        StorageFullError: The disk is full.
    """
    if first:
        with_growth(partial(_begin, path, identity, fence, filler))
    for cargo in cargos:
        with_growth(partial(_put, path, identity, cargo, fence, at, filler))
        crash.point(FILLED)


def _begin(path: str | os.PathLike[str], identity: ShardIdentity, fence: Fence, filler: Filler) -> None:
    """Empty the copy where it is, in the transaction that finds that this is not too late.

    Were it dropped and made again, a late task could look, wait, and drop what another has filled meanwhile.
    """
    store = ShardStore.ensure(path, identity)
    if store.boot_id() != current_boot_id():
        raise ShardMismatch(
            f"shard {store.path}: a copy of an earlier boot of this host is in the way, and may be torn; remove it"
        )
    with write_transaction(store) as txn:
        _check_late(store, txn, fence, filler)
        store.empty(txn)
        _store_filler(store, txn, filler)
        store_fence(store, txn, fence)


def _put(
    path: str | os.PathLike[str],
    identity: ShardIdentity,
    cargo: Cargo,
    fence: Fence,
    at: Step,
    filler: Filler,
) -> None:
    store = ShardStore.open(path, identity)
    store.reserve(cargo.keys, cargo.size)
    with write_transaction(store) as txn:
        last = _check_late(store, txn, fence, filler)
        if cargo.since is None and last != filler:
            raise ShardMismatch(
                f"shard {store.path}: it was begun by copy {filler}, and then dropped and begun by copy {last}; copy it anew"
            )
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
        _store_filler(store, txn, filler)
        store_fence(store, txn, fence)


def _check_late(store: ShardStore, txn: Any, fence: Fence, filler: Filler) -> Filler | None:
    """Who filled it last.

    Raises:
        Fenced: A newer writer was here; or the step as of which the copy is made, or a later job or another task of this
            one, which have the same fence.
    """
    check_fence(store, txn, fence)
    ring = UndoRing(store, txn)
    for region in ring.regions():
        marker = ring.marker(region)
        if marker is not None and Fence(marker.epoch, marker.step, marker.attempt) >= fence:
            raise Fenced(
                f"shard {store.path}: {fence} comes too late to copy it, step {marker.step} has switched to it"
            )
    last = _last_filler(store, txn)
    if last is not None and last != filler and last[:2] >= filler[:2]:
        raise Fenced(f"shard {store.path}: copy {filler} comes too late, {last} has filled it")
    return last


def _last_filler(store: ShardStore, txn: Any) -> Filler | None:
    raw = txn.get(_FILLER, db=store.env.open_db(META, txn=txn))
    try:
        return None if raw is None else Filler(*msgpack.unpackb(raw))
    except (ValueError, TypeError) as error:
        raise CorruptError(f"shard {store.path}: who copied it does not parse: {error!r}") from error


def _store_filler(store: ShardStore, txn: Any, filler: Filler) -> None:
    txn.put(_FILLER, msgpack.packb(tuple(filler)), db=store.env.open_db(META, txn=txn))


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
