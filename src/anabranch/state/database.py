"""The versioned key-value database, on a shard's own mechanism.

A version is a step of the region `database`: version 0 is the empty shard, committing version *v* + 1 is the
transaction that applies step *v* + 1, and version *v* stays openable because that step's undo record leads
back to it.

* A new database has one version, 0, which is empty.
* `open(v)` discards the other version: rolled back if newer, its undo record dropped if older.
* `commit` of a database opened at *v* makes *v* + 1; both may be opened then.
* Closed, or crashed, in any other way, it has the version that was opened.

Every `open` takes a new epoch of the shard's fence, so of two that have it open the later one wins and the
earlier is `Fenced`.

Must not know: checkpoints, workers.
"""

from __future__ import annotations

from collections import defaultdict
from hashlib import blake2b
from os import PathLike
from typing import NewType, Protocol

import lmdb

from anabranch.errors import EngineError, Fenced, ShardMismatch
from anabranch.model.ids import Attempt, Epoch, RegionId, Step
from anabranch.state.address import HEAD, is_long
from anabranch.state.faults import with_growth
from anabranch.state.identity import Fence, ShardIdentity
from anabranch.state.store import ShardStore
from anabranch.state.tables import ShardTable
from anabranch.state.transaction import StageTransaction, read_fence, store_fence, write_transaction
from anabranch.state.undo import UndoRing, short_name

Version = NewType("Version", int)
"""Serial number of a database's version: 0, 1, 2, …"""

_REGION = RegionId("database")
_STEP_TABLE = "database.step"


class OpenDatabase(Protocol):
    """A database opened at version *v*: reads and writes happen in *v* + 1, at first a copy of *v*."""

    def get(self, table: str, key: bytes) -> bytes | None:
        """The value, None if there is none."""
        ...

    def put(self, table: str, key: bytes, value: bytes | None) -> None:
        """Write; None deletes."""
        ...

    def get_step(self) -> Step:
        """The next step to apply; 0 in a new database."""
        ...

    def set_step(self, step: Step) -> None: ...

    def commit(self) -> None:
        """Make version *v* + 1 and close."""
        ...

    def close(self) -> None:
        """Forget what was written."""
        ...


class VersionedDatabase(Protocol):
    """The contract: one or two versions, one of which is opened at a time."""

    def versions(self) -> range:
        """The versions that can be opened: one or two."""
        ...

    def open(self, version: Version) -> OpenDatabase:
        """Open one and discard the other; raises ShardMismatch when it is not in `versions`."""
        ...


class Database:
    """A `VersionedDatabase` in a shard of its own, which must exist."""

    def __init__(self, path: str | PathLike[str], identity: ShardIdentity) -> None:
        self._path = path
        self._identity = identity

    @property
    def _store(self) -> ShardStore:
        # Asked for each time: the process's cache may close a store that is not in use.
        return ShardStore.open(self._path, self._identity)

    def versions(self) -> range:
        store = self._store
        with store.begin(write=False) as txn:
            return _versions(UndoRing(store, txn))

    def open(self, version: Version) -> Session:
        return with_growth(lambda: self._open(version))

    def _open(self, version: Version) -> Session:
        store = self._store
        with write_transaction(store) as txn:
            ring = UndoRing(store, txn)
            there = _versions(ring)
            if version not in there:
                raise ShardMismatch(
                    f"database {self._path}: asked for version {version}, it has {list(there)}"
                )
            marker = ring.marker(_REGION)
            if marker is not None and marker.step > version:
                ring.roll_back(_REGION, marker)
            ring.drop_before(_REGION, Step(version + 1))
            stored = read_fence(store, txn)
            epoch = Epoch(0 if stored is None else stored.epoch + 1)
            fence = Fence(epoch, Step(version + 1), Attempt(0))
            store_fence(store, txn, fence)
        return Session(self._path, self._identity, fence)


class Session:
    """An open `Database`.

    What is written is kept in memory until `commit`, so that no transaction stays open while the circuit
    computes: a long reader pins pages, a long writer shuts out everyone else.
    """

    def __init__(self, path: str | PathLike[str], identity: ShardIdentity, fence: Fence) -> None:
        self._path = path
        self._identity = identity
        self._fence = fence
        self._written: dict[tuple[str, bytes], bytes | None] = {}
        self._closed = False

    def get(self, table: str, key: bytes) -> bytes | None:
        return self._get(_table(table), key)

    def put(self, table: str, key: bytes, value: bytes | None) -> None:
        self._put(_table(table), key, value)

    def get_step(self) -> Step:
        raw = self._get(_STEP_TABLE, b"")
        return Step(0 if raw is None else int.from_bytes(raw, "big"))

    def set_step(self, step: Step) -> None:
        self._put(_STEP_TABLE, b"", step.to_bytes(8, "big"))

    def _get(self, name: str, key: bytes) -> bytes | None:
        self._check_open()
        if (name, key) in self._written:
            return self._written[name, key]
        store = ShardStore.open(self._path, self._identity)
        with store.begin(write=False) as txn:
            if read_fence(store, txn) != self._fence:
                raise Fenced(f"database {self._path}: it was opened again since {self._fence}")
            try:
                db = store.env.open_db(short_name(name), txn=txn, create=False)
            except lmdb.NotFoundError:
                return None
            address = _address(key)
            return ShardTable(txn, db, long_keys=True).get([address], is_long(address))[0]

    def _put(self, name: str, key: bytes, value: bytes | None) -> None:
        self._check_open()
        self._written[name, key] = value

    def commit(self) -> None:
        # Also a commit without a put makes a version, and a version is a step that wrote something.
        self.set_step(self.get_step())
        with_growth(self._commit)
        self.close()

    def _commit(self) -> None:
        tables: dict[str, dict[bytes, bytes | None]] = defaultdict(dict)
        for (name, key), value in self._written.items():
            tables[name][_address(key)] = value
        keep = self._fence.step
        store = ShardStore.open(self._path, self._identity)
        with StageTransaction(store, self._fence, [_REGION], keep_undo_from=keep) as transaction:
            for name, entries in tables.items():
                addresses = sorted(entries)
                long = any(map(is_long, addresses))
                olds = transaction.get(name, addresses, long)
                transaction.put(_REGION, name, addresses, [entries[a] for a in addresses], olds, long)
            transaction.commit()

    def close(self) -> None:
        self._written.clear()
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError(f"database {self._path}: it was closed; open a version of it again")


def _versions(ring: UndoRing) -> range:
    marker = ring.marker(_REGION)
    if marker is None:
        return range(1)
    oldest = marker.step - 1 if ring.has_record(_REGION, marker.step) else marker.step
    return range(oldest, marker.step + 1)


def _table(table: str) -> str:
    return f"database.table.{table}"


def _address(key: bytes) -> bytes:
    return blake2b(key, digest_size=8).digest() + b"\x00" * (HEAD - 8) + key
