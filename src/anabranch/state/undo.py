"""The ring of undo records: what each step overwrote, per region of a shard.

The record of step *n* holds the marker that the region had before, and for every put its table, addresses
and old values.  Records form a chain through their markers, *n* → the step before → …, kept back to the
oldest step that anyone may want to return to.  Whoever follows the chain notices when it was cut too early.

    state(previous marker) = state(n) with record(n) applied backwards

One value per step and region, whatever the number of keys: its cost disappears in that of the writes.

Must not know: fences, workers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgpack

from anabranch.errors import CorruptError, ShardMismatch
from anabranch.model.ids import RegionId, Step
from anabranch.state.address import is_long, split
from anabranch.state.identity import Marker
from anabranch.state.store import META, UNDO, ShardStore
from anabranch.state.tables import ShardTable

_PRUNED_PER_COMMIT = 16
_STEP = struct.Struct(">Q")
_MAX_NAME = 200


class Change(NamedTuple):
    """One put of a step: `olds[i]` was at `addresses[i]`, None if nothing was."""

    table: str
    addresses: list[bytes]
    olds: list[bytes | None]


class ChangedKey(NamedTuple):
    """A key that some step since then wrote or deleted."""

    table: str
    hash: int
    key: bytes


def short_name(name: str) -> bytes:
    """A name as an LMDB key: itself, or its beginning and a digest when it is long."""
    raw = name.encode()
    if len(raw) <= _MAX_NAME:
        return raw
    return raw[: _MAX_NAME - 33] + b"~" + blake2b(raw, digest_size=16).hexdigest().encode()


def open_table(store: ShardStore, txn: Any, name: str) -> ShardTable:
    """A table of operators, made in this transaction if it is new.

    Handles are cached by LMDB's wrapper per environment, and dropped by it when the transaction
    that opened them aborts.
    """
    meta = store.env.open_db(META, txn=txn)
    long_keys = txn.get(b"long:" + short_name(name), db=meta) is not None
    return ShardTable(txn, store.env.open_db(short_name(name), txn=txn), long_keys)


def write(
    store: ShardStore,
    txn: Any,
    name: str,
    table: ShardTable,
    addresses: Sequence[bytes],
    values: Sequence[bytes | None],
    long: bool,
) -> None:
    """Put, and remember in the shard that the table has long keys."""
    if long and not table.long_keys:
        txn.put(b"long:" + short_name(name), b"", db=store.env.open_db(META, txn=txn))
        table.long_keys = True
    table.put(addresses, values, long)


class UndoRing:
    """The markers and undo records of one shard within one transaction."""

    def __init__(self, store: ShardStore, txn: Any) -> None:
        self._store = store
        self._txn = txn
        self._meta = store.env.open_db(META, txn=txn, create=False)
        self._undo = store.env.open_db(UNDO, txn=txn, create=False)

    def marker(self, region: RegionId) -> Marker | None:
        """The last step applied to a region, None if none ever was."""
        raw = self._txn.get(b"marker:" + short_name(region), db=self._meta)
        return None if raw is None else Marker.decode(raw)

    def append(
        self,
        region: RegionId,
        marker: Marker,
        previous: Marker | None,
        changes: Sequence[Change],
        keep_from: Step,
    ) -> None:
        """Record a step and advance the marker; drop some records older than `keep_from`.

        A step adds one record and drops at most 16, so a ring whose oldest step has jumped
        shrinks over the next steps instead of stalling one.
        """
        before = None if previous is None else previous.encode()
        record = msgpack.packb((before, changes))
        self._txn.put(_undo_key(region, marker.step), record, db=self._undo)
        self._txn.put(b"marker:" + short_name(region), marker.encode(), db=self._meta)
        self.drop_before(region, min(keep_from, marker.step))

    def drop_before(self, region: RegionId, step: Step, limit: int = _PRUNED_PER_COMMIT) -> None:
        """Delete up to `limit` of the records older than `step`."""
        cursor = self._txn.cursor(db=self._undo)
        first, end = _undo_key(region, Step(0)), _undo_key(region, step)
        for _ in range(limit):
            if not cursor.set_range(first) or cursor.key() >= end:
                break
            cursor.delete()

    def record(self, region: RegionId, step: Step) -> tuple[Marker | None, bytes]:
        """(previous marker, raw record) of a step; raises ShardMismatch when the ring lacks it."""
        raw = self._txn.get(_undo_key(region, step), db=self._undo)
        if raw is None:
            raise ShardMismatch(
                f"shard {self._store.path}: region {region!r} must go back before step {step}, "
                "but that step's undo record is no longer kept; restore the shard from a checkpoint"
            )
        before = _unpack(raw)[0]
        return (None if before is None else Marker.decode(before)), raw

    def has_record(self, region: RegionId, step: Step) -> bool:
        return self._txn.get(_undo_key(region, step), db=self._undo) is not None

    def roll_back(self, region: RegionId, marker: Marker) -> Marker | None:
        """Undo the step that the region is at; returns the marker it is at then."""
        previous, raw = self.record(region, marker.step)
        for change in reversed(changes_of(raw)):
            table = open_table(self._store, self._txn, change.table)
            long = any(map(is_long, change.addresses))
            write(self._store, self._txn, change.table, table, change.addresses, change.olds, long)
        self._txn.delete(_undo_key(region, marker.step), db=self._undo)
        if previous is None:
            self._txn.delete(b"marker:" + short_name(region), db=self._meta)
        else:
            self._txn.put(b"marker:" + short_name(region), previous.encode(), db=self._meta)
        return previous


def changed_since(store: ShardStore, region: RegionId, step: Step | None) -> Iterator[ChangedKey]:
    """Every key of a region that a step after `step` wrote, each once, newest step first.

    `step` None means since the beginning.  Reads the records in one short transaction and
    decodes them after it, so that no page stays pinned while the caller works.

    Raises:
        ShardMismatch: the ring does not reach back that far.
    """
    seen: set[tuple[str, bytes]] = set()
    for raw in _records_since(store, region, step):
        for name, addresses, _ in changes_of(raw):
            for address in addresses:
                if (name, address) not in seen:
                    seen.add((name, address))
                    yield ChangedKey(name, *split(address))


def _records_since(store: ShardStore, region: RegionId, step: Step | None) -> list[bytes]:
    found: list[bytes] = []
    with store.begin(write=False) as txn:
        ring = UndoRing(store, txn)
        marker = ring.marker(region)
        while marker is not None and (step is None or marker.step > step):
            marker, raw = ring.record(region, marker.step)
            found.append(raw)
    return found


def changes_of(raw: bytes) -> list[Change]:
    """The puts of a step, in the order in which they were made; raises CorruptError."""
    return [Change(*change) for change in _unpack(raw)[1]]


def _unpack(raw: bytes) -> tuple[bytes | None, list[list[Any]]]:
    try:
        before, changes = msgpack.unpackb(raw)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CorruptError(f"an undo record does not parse: {error!r}") from error
    return before, changes


def _undo_key(region: RegionId, step: Step) -> bytes:
    name = short_name(region)
    return bytes((len(name),)) + name + _STEP.pack(step)
