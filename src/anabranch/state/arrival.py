"""Keys that arrive from another store, inside the transaction of the step that moves them.

Theory of operation.  The source is not written from step *n* on, so whatever failed attempts of *n* left at the target
can be put again.  Therefore keys that arrive have no undo values, and

ARR-1  before the keys of a range are put, the range holds nothing that counts: a *fresh* store is wiped, elsewhere the
       range is emptied; a copy made beside the steps holds exactly what the source had as of the step from which on
       the changes come.
ARR-2  rolling step *n* back leaves the arrived keys, in a range that does not count without *n*.
ARR-3  with its keys, a region gets the marks of those that changed before (see `history`), and is at step *n* even
       if the step has no row for it.

Must not know: fences, workers, how cargo travels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lmdb

from anabranch.errors import EngineError, IncompleteInput, ShardMismatch
from anabranch.model.ids import RegionId, Step
from anabranch.model.ranges import HashRange
from anabranch.state.address import prefix
from anabranch.state.cargo import Cargo
from anabranch.state.history import Arrived, History
from anabranch.state.identity import Marker, ShardIdentity
from anabranch.state.store import META, ShardStore
from anabranch.state.undo import Touched, UndoRing, load, open_table, short_name

_COPIED = b"copied"
Tables = Mapping[RegionId, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a store gets in a step."""

    cargos: tuple[Cargo, ...]
    """Of the regions of one stage."""
    fresh: bool
    """Whether nothing in the store counts as yet; then it may be missing, and the stage's regions are wiped first."""

    @property
    def keys(self) -> int:
        return sum(cargo.keys for cargo in self.cargos)

    @property
    def size(self) -> int:
        return sum(cargo.size for cargo in self.cargos)

    def check(self, identity: ShardIdentity, hashes: HashRange, regions: Sequence[RegionId]) -> None:
        """Whether this can be for that store; a fresh one must get all that it is to have.

        Raises:
            ShardMismatch: it is for another one.
            IncompleteInput: hashes are missing.
        """
        for cargo in self.cargos:
            inside = hashes[0] <= cargo.low and cargo.end <= hashes[1]
            if cargo.shard != identity.shard or cargo.region not in regions or not inside:
                raise ShardMismatch(
                    f"state of shard {cargo.shard}, region {cargo.region!r}, hashes {cargo.hashes} arrived for "
                    f"shard {identity.shard}, regions {list(regions)}, hashes {hashes}: "
                    "sender and receiver have different layouts"
                )
        for region in regions:
            ranges = sorted(cargo.hashes for cargo in self.cargos if cargo.region == region)
            if not ranges and not self.fresh:
                continue
            low, end = hashes if self.fresh else (ranges[0][0], ranges[-1][1])
            bounds = [low, *(bound for each in ranges for bound in each), end]
            if bounds[::2] != bounds[1::2]:
                raise IncompleteInput(
                    f"shard {identity.shard}, region {region!r}: hashes {low} to {end} should arrive, and {ranges} did"
                )


def wipe(store: ShardStore, txn: Any, ring: UndoRing, region: RegionId, tables: Tables) -> None:
    """Make a region as if the store were new."""
    if region not in tables:
        raise EngineError(f"shard {store.path}: a fresh region {region!r} must say what its tables are")
    meta = store.env.open_db(META, txn=txn)
    for name in tables[region]:
        try:
            txn.drop(store.env.open_db(short_name(name), txn=txn, create=False), delete=False)
        except lmdb.NotFoundError:
            continue
        txn.delete(b"long:" + short_name(name), db=meta)
    ring.wipe(region)
    txn.delete(_COPIED, db=meta)


def put(
    store: ShardStore, txn: Any, ring: UndoRing, cargos: Sequence[Cargo], step: Step, keep_from: Step
) -> None:
    """Put what arrives of one region in `step`, and what must be known of it.

    Raises:
        ShardMismatch: changes arrive for a copy of another step.
    """
    for cargo in cargos:
        if cargo.since is None:
            for table in cargo.tables:
                open_table(store, txn, table.name).clear(prefix(cargo.low), prefix(cargo.end))
        else:
            found = copied(store, txn)
            if found != cargo.since:
                raise ShardMismatch(
                    f"shard {store.path}: changes from step {cargo.since} on arrived, but it was copied as of step "
                    f"{found}; move all of its keys"
                )
    fill(store, txn, cargos)
    region = cargos[0].region
    ring.set_marks(region, step, marks_of(cargos))
    arrived = [Arrived(step, c.low, c.end - 1, c.known) for c in cargos if c.low < c.end]
    ring.set_history(region, ring.history(region).after(arrived, keep_from))


def fill(store: ShardStore, txn: Any, cargos: Sequence[Cargo]) -> None:
    """The keys alone."""
    for cargo in cargos:
        for table in cargo.tables:
            load(store, txn, table.name, table.addresses, table.values)


def marks_of(cargos: Sequence[Cargo]) -> list[Touched]:
    """What of some cargo must be marked, by table."""
    marked: dict[str, list[bytes]] = {}
    for cargo in cargos:
        for table in cargo.tables:
            marked.setdefault(table.name, []).extend(table.marked.addresses)
    return [Touched(name, sorted(addresses)) for name, addresses in marked.items()]


def newest(cargos: Sequence[Cargo]) -> Marker | None:
    """Where the region of some cargo stood, at the source that was written last."""
    return max((c.before for c in cargos if c.before is not None), default=None)


def born(ring: UndoRing, region: RegionId, step: Step) -> None:
    """Say that there is nothing of the region from before `step`."""
    ring.set_history(region, History(step))


def copied(store: ShardStore, txn: Any) -> Step | None:
    """As of which step a store was copied beside the steps; None for any other."""
    raw = txn.get(_COPIED, db=store.env.open_db(META, txn=txn))
    return None if raw is None else Step(int.from_bytes(raw, "big"))


def set_copied(store: ShardStore, txn: Any, step: Step) -> None:
    txn.put(_COPIED, step.to_bytes(8, "big"), db=store.env.open_db(META, txn=txn))
