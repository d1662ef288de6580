"""The ring of undo records: what each step overwrote, per region of a shard.

The record of step *n* holds the marker that the region had before, and for every put its table, addresses
and old values.  Records form a chain through their markers, *n* → the step before → …, kept back to the
oldest step that anyone may want to return to.  Whoever follows the chain notices when it was cut too early.

    state(previous marker) = state(n) with record(n) applied backwards

One value per step and region, whatever the number of keys: its cost disappears in that of the writes.

Beside the records are the *marks* of keys that came from another store (see `history`), in a namespace of their own.
Rolling back leaves marks alone: they tell of the time before.

Addresses within a change ascend by hash, since a worker cuts its rows into shards by it; so those of a range of
hashes are found by bisection, whatever the order of keys within a hash.

Must not know: fences, workers.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgpack

from anabranch.errors import CorruptError, ShardMismatch
from anabranch.model.ids import RegionId, Step
from anabranch.model.ranges import HashRange
from anabranch.state.address import is_long, prefix
from anabranch.state.history import History
from anabranch.state.identity import Marker
from anabranch.state.store import META, UNDO, ShardStore
from anabranch.state.tables import ShardTable

_PRUNED_PER_COMMIT = 16
_STEP = struct.Struct(">Q")
_MAX_NAME = 200
_MARKER = b"marker:"
_ACQUIRED = b"acquired:"
_PART = struct.Struct(">I")
_LAST_PART = (1 << 32) - 1
_MARKS = b"\xff"
"""First byte of the key of a record of marks; that of an undo record is the length of a name."""
_HEAD = 256
"""Bytes of a record that hold its marker."""


class Change(NamedTuple):
    """One put of a step: `olds[i]` was at `addresses[i]`, None if nothing was."""

    table: str
    addresses: list[bytes]
    olds: list[bytes | None]


class Touched(NamedTuple):
    """Some keys of a table that were written."""

    table: str
    addresses: list[bytes]

    def within(self, hashes: HashRange) -> Touched:
        """Those in a range of hashes."""
        low, end = map(prefix, hashes)
        some = self.addresses[bisect_left(self.addresses, low) : bisect_left(self.addresses, end)]
        return Touched(self.table, some)


class Record(NamedTuple):
    """One step of the ring, not yet unpacked."""

    step: Step
    before: Marker | None
    raw: bytes


def short_name(name: str) -> bytes:
    """A name as an LMDB key: itself, or its beginning and a digest when it is long.

    A short name is its own short name, also one that was cut in the middle of a character (`long_name`).
    """
    raw = name.encode("utf-8", "surrogateescape")
    if len(raw) <= _MAX_NAME:
        return raw
    return raw[: _MAX_NAME - 33] + b"~" + blake2b(raw, digest_size=16).hexdigest().encode()


def long_name(raw: bytes) -> str:
    """A name whose short name this is: the original one unless that was cut."""
    return raw.decode("utf-8", "surrogateescape")


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


def load(
    store: ShardStore, txn: Any, name: str, addresses: Sequence[bytes], values: Sequence[bytes | None]
) -> None:
    """Put keys that came from elsewhere into a table, which is made if it is not there."""
    table = open_table(store, txn, name)
    long = any(map(is_long, addresses))
    if long and not table.long_keys:
        txn.put(b"long:" + short_name(name), b"", db=store.env.open_db(META, txn=txn))
    table.load(addresses, values, long)


class UndoRing:
    """The markers and undo records of one shard within one transaction."""

    def __init__(self, store: ShardStore, txn: Any) -> None:
        self._store = store
        self._txn = txn
        self._meta = store.env.open_db(META, txn=txn, create=False)
        self._undo = store.env.open_db(UNDO, txn=txn, create=False)

    def marker(self, region: RegionId) -> Marker | None:
        """The last step applied to a region, None if none ever was."""
        raw = self._txn.get(_MARKER + short_name(region), db=self._meta)
        return None if raw is None else Marker.decode(raw)

    def regions(self) -> list[RegionId]:
        """The regions that have a marker, by their short names."""
        cursor = self._txn.cursor(db=self._meta)
        found: list[RegionId] = []
        if cursor.set_range(_MARKER):
            for key in cursor.iternext(values=False):
                if not key.startswith(_MARKER):
                    break
                found.append(RegionId(long_name(key[len(_MARKER) :])))
        return found

    def set_marker(self, region: RegionId, marker: Marker) -> None:
        self._txn.put(_MARKER + short_name(region), marker.encode(), db=self._meta)

    def append(
        self,
        region: RegionId,
        marker: Marker,
        previous: Marker | None,
        changes: Sequence[Change],
        keep_from: Step,
    ) -> int:
        """Record a step and advance the marker; drop some records older than `keep_from`.

        Returns the size of the record in bytes.

        A step adds one record and drops at most 16, so a ring whose oldest step has jumped
        shrinks over the next steps instead of stalling one.
        """
        before = None if previous is None else previous.encode()
        record: bytes = msgpack.packb((before, changes))
        self._txn.put(_undo_key(region, marker.step), record, db=self._undo)
        self.set_marker(region, marker)
        self.drop_before(region, min(keep_from, marker.step))
        return len(record)

    def drop_before(self, region: RegionId, step: Step, limit: int = _PRUNED_PER_COMMIT) -> None:
        """Delete up to `limit` of the records older than `step`, and of the marks of the time before it."""
        self._drop(_undo_key(region, Step(0)), _undo_key(region, step), limit)
        self._drop(_marks_key(region, Step(0)), _marks_key(region, Step(step + 1)), limit)

    def _drop(self, first: bytes, end: bytes, limit: int | None = None) -> None:
        cursor = self._txn.cursor(db=self._undo)
        left = limit
        while left != 0 and cursor.set_range(first) and cursor.key() < end:
            cursor.delete()
            left = None if left is None else left - 1

    def record(self, region: RegionId, step: Step) -> tuple[Marker | None, bytes]:
        """(previous marker, raw record) of a step; raises ShardMismatch when the ring lacks it."""
        raw = self._txn.get(_undo_key(region, step), db=self._undo)
        if raw is None:
            raise ShardMismatch(
                f"shard {self._store.path}: region {region!r} must go back before step {step}, "
                "but that step's undo record is no longer kept; restore the shard from a checkpoint"
            )
        return _before(raw), raw

    def records(self, region: RegionId, first: Step, end: Step | None = None) -> Iterator[Record]:
        """The records from `first` on and below `end`, ascending; the caller checks that they are a chain."""
        name = _undo_key(region, Step(0))[: -_STEP.size]
        cursor = self._txn.cursor(db=self._undo)
        if not cursor.set_range(_undo_key(region, first)):
            return
        for key in cursor.iternext(values=False):
            if not key.startswith(name) or len(key) != len(name) + _STEP.size:
                return
            step = Step(_STEP.unpack_from(key, len(name))[0])
            if end is not None and step >= end:
                return
            raw = cursor.value()
            yield Record(step, _before(raw), raw)

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
            self._txn.delete(_MARKER + short_name(region), db=self._meta)
        else:
            self.set_marker(region, previous)
        return previous

    # --- what came from other stores

    def marks(self, region: RegionId, since: Step) -> Iterator[tuple[Step, int, bytes]]:
        """The records of marks of arrivals after `since`, ascending, for `marked_in`; a step may have several parts."""
        return self.marks_behind(region, since, _LAST_PART)

    def marks_behind(self, region: RegionId, step: Step, part: int) -> Iterator[tuple[Step, int, bytes]]:
        """As `marks`, behind a part of a step's."""
        first = _marks_key(region, Step(0))
        cursor = self._txn.cursor(db=self._undo)
        if not cursor.set_range(_marks_key(region, step) + _PART.pack(part) + b"\x00"):
            return
        for key in cursor.iternext(values=False):
            if key[: -_STEP.size - _PART.size] != first[: -_STEP.size]:
                return
            at = len(first) - _STEP.size
            yield Step(_STEP.unpack_from(key, at)[0]), _PART.unpack_from(key, len(first))[0], cursor.value()

    def set_marks(self, region: RegionId, step: Step, keys: Sequence[Touched]) -> None:
        """Say which keys that arrived in `step` had changed before, instead of what was said."""
        self._drop(_marks_key(region, step), _marks_key(region, Step(step + 1)))
        self.add_marks(region, step, keys)

    def add_marks(self, region: RegionId, step: Step, keys: Sequence[Touched]) -> None:
        """As `set_marks`, besides what was said."""
        some = [each for each in keys if each.addresses]
        if some:
            first, end = _marks_key(region, step), _marks_key(region, Step(step + 1))
            cursor = self._txn.cursor(db=self._undo)
            there = cursor.prev() if cursor.set_range(end) else cursor.last()
            last = cursor.key() if there else b""
            part = _PART.unpack_from(last, len(first))[0] + 1 if last.startswith(first) else 0
            self._txn.put(first + _PART.pack(part), msgpack.packb(some), db=self._undo)

    def history(self, region: RegionId) -> History:
        raw = self._txn.get(_ACQUIRED + short_name(region), db=self._meta)
        return History() if raw is None else History.decode(raw)

    def set_history(self, region: RegionId, history: History) -> None:
        self._txn.put(_ACQUIRED + short_name(region), history.encode(), db=self._meta)

    def wipe(self, region: RegionId) -> None:
        """As if no step had ever touched the region, but for its tables."""
        self._drop(_undo_key(region, Step(0)), _after(_undo_key(region, Step(0))))
        self._drop(_marks_key(region, Step(0)), _after(_marks_key(region, Step(0))))
        for kind in (_MARKER, _ACQUIRED):
            self._txn.delete(kind + short_name(region), db=self._meta)


def follows(before: Marker | None, last: Step | None, since: Step, born: Step | None) -> bool:
    """Whether no record is missing in front of one whose predecessor is `before`.

    Args:
        before: As the record says.
        last: The record that was read before it; None: it is the first of those from `since` on.
        since: Where reading began.
        born: See `History`; what was before it is in the marks.
    """
    if last is not None:
        return before is not None and before.step == last
    return before is None or before.step < since or (born is not None and before.step < born)


def changes_of(raw: bytes) -> list[Change]:
    """The puts of a step, in the order in which they were made; raises CorruptError."""
    return [Change(*change) for change in _unpack(raw)[1]]


def touched_in(raw: bytes) -> list[Touched]:
    """Which keys an undo record has; raises CorruptError.

    About 0.03 µs for each, as old values are skipped and never made.
    """
    reader = msgpack.Unpacker(max_buffer_size=len(raw))
    reader.feed(raw)
    found: list[Touched] = []
    try:
        reader.read_array_header()
        reader.skip()
        for _ in range(reader.read_array_header()):
            reader.read_array_header()
            found.append(Touched(reader.unpack(), reader.unpack()))
            reader.skip()
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CorruptError(f"an undo record does not parse: {error!r}") from error
    return found


def marked_in(raw: bytes) -> list[Touched]:
    """Which keys a record of marks has; raises CorruptError."""
    try:
        return [Touched(*each) for each in msgpack.unpackb(raw)]
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CorruptError(f"a record of marks does not parse: {error!r}") from error


def _unpack(raw: bytes) -> tuple[bytes | None, list[list[Any]]]:
    try:
        before, changes = msgpack.unpackb(raw)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CorruptError(f"an undo record does not parse: {error!r}") from error
    return before, changes


def _before(raw: bytes) -> Marker | None:
    """The marker in front of a record, without unpacking the rest."""
    head = msgpack.Unpacker()
    head.feed(raw[:_HEAD])
    try:
        head.read_array_header()
        before = head.unpack()
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CorruptError(f"an undo record does not parse: {error!r}") from error
    return None if before is None else Marker.decode(before)


def _undo_key(region: RegionId, step: Step) -> bytes:
    name = short_name(region)
    return bytes((len(name),)) + name + _STEP.pack(step)


def _marks_key(region: RegionId, step: Step) -> bytes:
    """What the keys of the parts of a step's marks begin with."""
    return _MARKS + _undo_key(region, step)


def _after(key: bytes) -> bytes:
    """Behind the keys of all steps."""
    return key[: -_STEP.size] + b"\xff" * (_STEP.size + 1)
