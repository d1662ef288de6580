"""Rebuild shards from a checkpoint.

A restored shard is what the shard would be had it been rolled back to the checkpoint's step: the same keys and
markers, and an empty undo ring.  It is filled under a name of its own and then takes its place:

    SHARD~restoring-NONCE   being filled
    SHARD~replaced-NONCE    what was in its place; removed

RES-1  At the shard's place there is what was there, or nothing, or the whole restored shard.
RES-2  A restorer whose fence is older than that of a shard which can be trusted does not replace it; so one that was
       given up and wakes up takes nothing back.  The lock makes looking and replacing one.

Pages are not synced, as in a step: the stamp of the boot says that the shard cannot be trusted after the next one, and
then it is restored again.

Each partition is read once, whatever the number of shards: 10⁶ keys take 1.1 s of CPU from bases, and 1.9 s from chains
with a dozen deltas.

Must not know: Spark, hosts, which version is taken.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch import crash
from anabranch.errors import AnabranchError, CorruptError, EngineError, Fenced
from anabranch.model.ids import RegionId, Step
from anabranch.model.ranges import HashRange, hash_range
from anabranch.state.address import disk_key, is_long, pack_long, prefix
from anabranch.state.asof import Rows
from anabranch.state.boot import current_boot_id
from anabranch.state.chains import live, overlay, within
from anabranch.state.faults import translate_os, with_growth
from anabranch.state.identity import Fence, Marker, ShardIdentity
from anabranch.state.manifest import Manifest, Piece
from anabranch.state.pieces import Part, read_piece
from anabranch.state.store import META, ShardStore
from anabranch.state.survey import stamped_boot
from anabranch.state.transaction import read_fence, store_fence, write_transaction
from anabranch.state.undo import UndoRing
from anabranch.storage.base import Storage

FILLED = crash.declare("restore.filled", "a restored shard is whole, and not yet in its place")
BETWEEN = crash.declare(
    "restore.between", "the old shard is out of the way, the restored one not yet in its place"
)
PLACED = crash.declare("restore.placed", "a restored shard is in its place, what was there not yet removed")
_READERS = 4
_AHEAD = 2
"""Partitions that are being read while one is loaded."""
_LOCK_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Target:
    """A shard to be rebuilt: where, as whom, and where its regions stand then."""

    path: str | os.PathLike[str]
    identity: ShardIdentity
    markers: Mapping[RegionId, Step]

    @property
    def hashes(self) -> HashRange:
        return hash_range(self.identity.shard, self.identity.of)


def restore_shards(storage: Storage, manifest: Manifest, targets: Sequence[Target], fence: Fence) -> int:
    """Rebuild these shards, and leave alone those that this fence or a newer one has rebuilt already.

    Returns:
        The number of keys that were loaded.

    Raises:
        CorruptError: a piece is missing or damaged; it names the file and the version.
        Fenced: a newer coordinator has one of the shards.
        StorageFullError: no room.
    """
    wanted = sorted(
        (target for target in targets if not _is_done(target, fence)),
        key=lambda target: target.identity.shard,
    )
    if not wanted:
        return 0
    builds = [_Build(target) for target in wanted]
    try:
        hull = (wanted[0].hashes[0], wanted[-1].hashes[1])
        for tables in _partitions(storage, manifest, [target.hashes for target in wanted], hull):
            for build in builds:
                build.load(tables)
        for build in builds:
            build.place(fence)
    finally:
        for build in builds:
            build.discard()
    return sum(build.rows for build in builds)


def _partitions(
    storage: Storage, manifest: Manifest, ranges: Sequence[HashRange], hull: HashRange
) -> Iterator[list[Rows]]:
    """The live keys of each partition that some range overlaps, ascending."""
    chains = [
        [piece for piece in chain if any(piece.low < end and low <= piece.high for low, end in ranges)]
        for _, chain in sorted(manifest.chains().items())
    ]

    def read(piece: Piece) -> list[Part]:
        parts = (within(part, hull) for part in read_piece(storage, piece, manifest.version))
        return [part for part in parts if part is not None]

    with ThreadPoolExecutor(_READERS) as pool:
        ahead: list[list[Future[list[Part]]]] = []
        left = [chain for chain in chains if chain]
        while left or ahead:
            while left and len(ahead) <= _AHEAD:
                ahead.append([pool.submit(read, piece) for piece in left.pop(0)])
            yield [live(rows) for rows in overlay([future.result() for future in ahead.pop(0)])]


class _Build:
    """One shard under construction."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.place_of = Path(os.path.abspath(target.path))
        for old in self.place_of.parent.glob(f"{self.place_of.name}~*"):
            shutil.rmtree(old, ignore_errors=True)
        self.rows = 0
        self.nonce = secrets.token_hex(6)
        self.path = self.place_of.with_name(f"{self.place_of.name}~restoring-{self.nonce}")
        try:
            ShardStore.create(self.path, target.identity)
        except OSError as error:
            raise translate_os(error, self.place_of.parent) from error

    @property
    def store(self) -> ShardStore:
        # Asked for each time: the process's cache may close a store that is not in use.
        return ShardStore.open(self.path)

    def load(self, tables: Sequence[Rows]) -> None:
        """Add the rows of a partition that are this shard's; partitions come in ascending order."""
        low, end = map(prefix, self.target.hashes)
        mine = []
        for rows in tables:
            start, stop = bisect_left(rows.addresses, low), bisect_left(rows.addresses, end)
            if start < stop:
                mine.append(Rows(rows.table, rows.addresses[start:stop], rows.values[start:stop]))
        if mine:
            with_growth(lambda: self._append(mine))
            self.rows += sum(len(rows.addresses) for rows in mine)

    def _append(self, tables: Sequence[Rows]) -> None:
        store = self.store
        env = store.env
        with write_transaction(store) as txn:
            for rows in tables:
                pairs: Any = zip(rows.addresses, rows.values, strict=True)
                if any(map(is_long, rows.addresses)):
                    txn.put(b"long:" + rows.table, b"", db=env.open_db(META, txn=txn))
                    pairs = sorted((disk_key(a), pack_long(a, v) if is_long(a) else v) for a, v in pairs)
                cursor = txn.cursor(db=env.open_db(rows.table, txn=txn))
                _, added = cursor.putmulti(pairs, append=True)
                if added != len(rows.addresses):
                    raise CorruptError(
                        f"shard {self.place_of}: the keys of table {rows.table!r} in the checkpoint do not ascend"
                    )

    def place(self, fence: Fence) -> None:
        """Put the shard where it belongs."""
        with_growth(lambda: self._finish(fence))
        self.store.close()
        crash.point(FILLED)
        replaced = self.place_of.with_name(f"{self.place_of.name}~replaced-{self.nonce}")
        with _locked(self.place_of.parent):
            if not _is_done(self.target, fence):
                if self.place_of.exists():
                    self.place_of.rename(replaced)
                    crash.point(BETWEEN)
                self.path.rename(self.place_of)
        crash.point(PLACED)
        shutil.rmtree(replaced, ignore_errors=True)

    def _finish(self, fence: Fence) -> None:
        store = self.store
        with write_transaction(store) as txn:
            ring = UndoRing(store, txn)
            for region, step in self.target.markers.items():
                ring.set_marker(region, Marker(step, fence.epoch, fence.attempt, b""))
            store_fence(store, txn, fence)

    def discard(self) -> None:
        """Remove what is not in its place."""
        if self.path.exists():
            self.store.close()
            shutil.rmtree(self.path, ignore_errors=True)


def _is_done(target: Target, fence: Fence) -> bool:
    """Whether the shard was restored under this fence already; raises Fenced for a newer one (RES-2)."""
    path = Path(os.path.abspath(target.path))
    # What was written before the last boot may be torn, and is not even looked at.
    if stamped_boot(path) != current_boot_id():
        return False
    try:
        store = ShardStore.open(path)
        with store.begin(write=False) as txn:
            found = read_fence(store, txn)
    except AnabranchError:
        return False
    if found is None or found < fence:
        return False
    if store.identity == target.identity:
        return True
    raise Fenced(f"shard {path}: {fence} comes too late to restore it, {found} has written here")


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Held only while directories are renamed, so whoever waits for long waits for a process that was stopped."""
    with open(directory / "restore.lock", "a") as file:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"{directory}: another process has held restore.lock for {_LOCK_SECONDS:.0f} s; end it"
                    ) from None
                time.sleep(0.01)
        yield
