"""Take keys out of a shard for another store: for a move within a step.

Theory of operation.  In step *n* the keys of a range of hashes change their store.  One stage before a region's own,
`collect` reads them at the source; they travel with the step's rows; the target puts them in the transaction that
applies the step (see `arrival`).  The source is not written in that range from *n* on.

MOV-1  What is collected is the state that all steps before *n* left: whatever an earlier attempt of *n* did there is
       undone first, and the fence keeps it from coming back.
MOV-2  A key that changed since the last checkpoint is marked at its new place (see `history`).  Where the ring of the
       source does not reach back far enough for that, the cargo says how far it does, and the next checkpoint that
       asks for more is refused; nothing is ever left out of one silently.

Must not know: workers, Spark, who decides what moves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice
from typing import Any

import lmdb

from anabranch import crash
from anabranch.errors import EngineError, Fenced, ShardMismatch
from anabranch.model.ids import RegionId, Step
from anabranch.model.ranges import HashRange
from anabranch.state.address import is_long, prefix, whole
from anabranch.state.arrival import Arrival
from anabranch.state.cargo import Cargo, CargoTable, packed
from anabranch.state.copying import copy_in, copy_out
from anabranch.state.faults import with_growth
from anabranch.state.identity import Fence, Marker
from anabranch.state.store import META, UNDO, ShardStore
from anabranch.state.tables import ShardTable
from anabranch.state.transaction import check_fence, refuse_twin, store_fence, write_transaction
from anabranch.state.undo import Touched, UndoRing, follows, marked_in, short_name, touched_in

__all__ = ["Arrival", "Cargo", "CargoTable", "collect", "copy_in", "copy_out", "weigh"]

COLLECTED = crash.declare("move.collected", "a source is fenced for a move, its keys not yet read")
_CHUNK = 4096
Names = dict[bytes, set[bytes]]
"""Of each table, by its short name, some addresses."""


def collect(
    store: ShardStore,
    fence: Fence,
    region: RegionId,
    tables: Sequence[str],
    hashes: HashRange,
    expected: Step | None,
    marks_since: Step | None,
    since: Step | None = None,
) -> Cargo:
    """Take what a region has in a range of hashes.

    The keys are read in one transaction, so the range should be small: about 0.3 µs a key, 0.4 more with marks, and 0.05
    for each key of the undo records from `marks_since` on, whatever the range.  This process must have no transaction
    open in the store.

    Args:
        store: The source.
        fence: The step that moves the keys, and its attempt.
        region: Whose keys.
        tables: The full names of the region's tables.
        hashes: Which keys.
        expected: The step that the region must be at (None: none has touched it).
        marks_since: Keys that changed from this step on are flagged; None: nobody will ask.
        since: Take only keys that changed from this step on; None: all.

    Raises:
        Fenced: A newer writer, or this attempt itself, has written the region.
        ShardMismatch: The region is not at the expected step, or the undo ring does not reach back to `since`.
        StorageFullError: The disk is full.
    """
    if store.writing:
        raise EngineError(f"shard {store.path}: keys are to be collected while a transaction is open here")
    before = with_growth(lambda: _settle(store, fence, region, expected))
    crash.point(COLLECTED)
    try:
        with store.begin(write=False) as txn:
            return _read(store, txn, fence, region, tables, hashes, before, marks_since, since)
    except lmdb.Error as error:
        raise store.failed(error) from error


def weigh(store: ShardStore, hashes: HashRange | None = None) -> int:
    """About how many bytes the tables of a shard take, without reading them; in a range of hashes, by its share of what
    is there."""
    total = 0
    with store.begin(write=False) as txn:
        for name in [name for name, _ in txn.cursor() if name not in (META, UNDO)]:
            db = store.env.open_db(name, txn=txn, create=False)
            stat = txn.stat(db)
            pages = stat["leaf_pages"] + stat["branch_pages"] + stat["overflow_pages"]
            total += int(pages * stat["psize"] * _share(txn.cursor(db=db), hashes))
    return total


def _share(cursor: Any, hashes: HashRange | None) -> float:
    if hashes is None or not cursor.last():
        return 1.0
    last = int.from_bytes(cursor.key()[:8], "big")
    cursor.first()
    first = int.from_bytes(cursor.key()[:8], "big")
    inside = min(last + 1, hashes[1]) - max(first, hashes[0])
    return max(0, inside) / (last + 1 - first)


# --- the two transactions of `collect`


def _settle(store: ShardStore, fence: Fence, region: RegionId, expected: Step | None) -> Marker | None:
    """Undo what an earlier attempt has left, and shut it out (MOV-1); gives the marker."""
    with write_transaction(store) as txn:
        stored = check_fence(store, txn, fence)
        ring = UndoRing(store, txn)
        marker = ring.marker(region)
        undone = marker is not None and marker.step == fence.step
        if marker is not None and undone:
            refuse_twin(store, fence, region, marker, run=None)
            marker = ring.roll_back(region, marker)
        found = None if marker is None else marker.step
        if found != expected:
            raise ShardMismatch(
                f"shard {store.path}: region {region!r} is at step {found}, expected {expected} before it moves in step "
                f"{fence.step}"
            )
        # As in a stage: a first attempt in the epoch of the last writer has nobody to shut out.
        if undone or stored is None or stored.epoch < fence.epoch or fence.attempt > 0:
            store_fence(store, txn, fence)
    return marker


def _read(
    store: ShardStore,
    txn: Any,
    fence: Fence,
    region: RegionId,
    tables: Sequence[str],
    hashes: HashRange,
    before: Marker | None,
    marks_since: Step | None,
    since: Step | None,
) -> Cargo:
    check_fence(store, txn, fence)
    ring = UndoRing(store, txn)
    if ring.marker(region) != before:
        raise Fenced(f"shard {store.path}: region {region!r} was written while {fence} collected it")
    marked: Names = {}
    known = fence.step
    if marks_since is not None:
        known, marked = _changed(ring, region, before, marks_since, hashes)
        known = max(known, marks_since)
    wanted: Names | None = None
    if since is not None:
        complete, wanted = _changed(ring, region, before, since, hashes)
        if complete > since:
            raise ShardMismatch(
                f"shard {store.path}: what changed in region {region!r} since step {since} is no longer known, only since "
                f"step {complete}; move all of its keys"
            )
    found = []
    for name in tables:
        if wanted is None:
            addresses, values = _range(store, txn, name, hashes)
        else:
            addresses = sorted(wanted.get(short_name(name), ()))
            values = _get(store, txn, name, addresses)
        found.append(packed(name, addresses, values, marked.get(short_name(name), set())))
    return Cargo(store.identity.shard, region, *hashes, before, since, min(known, fence.step), tuple(found))


def _changed(
    ring: UndoRing, region: RegionId, marker: Marker | None, since: Step, hashes: HashRange
) -> tuple[Step, Names]:
    """The keys in a range that changed from `since` on, and the step from which on that is all of them."""
    history = ring.history(region)
    complete = history.known(since, [hashes])
    names: Names = {}
    last: Step | None = None

    def add(some: Sequence[Touched]) -> None:
        for touched in some:
            names.setdefault(short_name(touched.table), set()).update(touched.within(hashes).addresses)

    for record in ring.records(region, since):
        if not follows(record.before, last, since, history.born):
            # Of the steps before this record some are missing.
            complete = max(complete, record.step)
        last = record.step
        add(touched_in(record.raw))
    for *_, raw in ring.marks(region, since):
        add(marked_in(raw))
    end = since if last is None else Step(last + 1)
    if (
        marker is not None
        and marker.step >= end
        and (last is not None or not _before_birth(marker, history.born))
    ):
        complete = max(complete, Step(marker.step + 1))
    return complete, names


def _before_birth(marker: Marker, born: Step | None) -> bool:
    return born is not None and marker.step < born


def _range(
    store: ShardStore, txn: Any, name: str, hashes: HashRange
) -> tuple[Sequence[bytes], Sequence[bytes | None]]:
    """All keys of a table in a range of hashes, ascending by address."""
    cursor = _cursor(store, txn, name)
    low, end = map(prefix, hashes)
    if cursor is None or not cursor.set_range(low):
        return (), ()
    keys: list[bytes] = []
    more = cursor.iternext(values=False)
    while some := list(islice(more, _CHUNK)):
        keys += some
        if some[-1] >= end:
            del keys[bisect_left(keys, end) :]
            break
    cursor.set_range(low)
    # Twice over the pages, without a tuple for each pair: see `AsOf`.
    values = list(islice(cursor.iternext(keys=False), len(keys)))
    if all(key[8] == 0 for key in keys):
        return keys, values
    pairs = sorted(map(whole, keys, values))
    return [address for address, _ in pairs], [value for _, value in pairs]


def _get(store: ShardStore, txn: Any, name: str, addresses: Sequence[bytes]) -> Sequence[bytes | None]:
    if _cursor(store, txn, name) is None:
        return [None] * len(addresses)
    long = any(map(is_long, addresses))
    return ShardTable(txn, store.env.open_db(short_name(name), txn=txn, create=False), long).get(
        addresses, long
    )


def _cursor(store: ShardStore, txn: Any, name: str) -> Any:
    """Of a table, None if there is none."""
    try:
        return txn.cursor(db=store.env.open_db(short_name(name), txn=txn, create=False))
    except lmdb.NotFoundError:
        return None
