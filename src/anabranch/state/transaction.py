"""The write transaction of one stage of one attempt of one step, in one shard.

Theory of operation.  On begin, under LMDB's write lock:

1. The stored fence is compared with the writer's.  A newer one is there: the writer is a zombie, `Fenced`.
2. Each region of the stage that is already at this step is rolled back: an earlier attempt got that far.
   When it was this very attempt, then a twin of this task has written, and this one is `Fenced`; unless the
   run is the same: a task that must repeat itself (its map was full) finds what it left.
3. A region beyond this step, or not where the coordinator expects it, is a `ShardMismatch`.
4. Keys that arrive from another store are put (see `arrival`), before the stage asks for any.

On commit the regions that were written get marker and undo record, and the fence is stored, all in the one
LMDB transaction: the shard is at the step or it is not.

Safety: for every shard, region and step, what is on disk is the effect of at most one run of that step, and
of none that is older than the newest fence.

Must not know: workers, the hash's division into shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import lmdb

from anabranch import crash
from anabranch.errors import Fenced, ShardMismatch
from anabranch.model.ids import RegionId, Step
from anabranch.state.arrival import Arrival, Tables, born, newest, wipe
from anabranch.state.arrival import put as put_arrived
from anabranch.state.faults import MapFull
from anabranch.state.identity import Fence, Marker, decode_fence, encode_fence
from anabranch.state.store import META, ShardStore
from anabranch.state.tables import ShardTable
from anabranch.state.undo import Change, UndoRing, long_name, open_table, short_name, write

ACQUIRED = crash.declare("move.acquired", "state that arrived is put, and not yet committed")
_FENCE = b"fence"
_KEEP_ALL = Step(0)
T = TypeVar("T")


class StageTransaction:
    """Open from construction to `commit` or `abort`; leaving its `with` block without a commit aborts.

    Args:
        store: The shard.
        fence: The writer's place among all writers.
        regions: What the stage writes; each at most once per attempt.
        expected: The step that each region must be at before this one (None: untouched ever since it was
            created); a region that is not a key here is not checked.
        keep_undo_from: The oldest step whose undo record must stay.
        run: Names the task, so that it may repeat itself within its attempt.
        arriving: Keys that come from another store in this step.
        tables: The tables of each region; needed where a fresh store is filled.

    Raises:
        Fenced: A newer writer, or a twin of this one, was here.
        ShardMismatch: A region is not at the expected step.
        MapFull: Rolling back filled the map, which has been enlarged: try again.
        StorageFullError: The disk is full.
    """

    def __init__(
        self,
        store: ShardStore,
        fence: Fence,
        regions: Sequence[RegionId],
        expected: Mapping[RegionId, Step | None] | None = None,
        keep_undo_from: Step = _KEEP_ALL,
        run: bytes = b"",
        arriving: Arrival | None = None,
        tables: Tables | None = None,
    ) -> None:
        self.store = store
        self.fence = fence
        self.regions = tuple(regions)
        self._keep_from = keep_undo_from
        self._run = run
        self._tables: dict[str, ShardTable] = {}
        self._changes: dict[RegionId, list[Change]] = {}
        self._before: dict[RegionId, Marker | None] = {}
        self._rolled_back = False
        self.undo_bytes = 0
        """Size of the undo records that `prepare` wrote."""
        self._fenced_by: Fence | None = None
        self._arriving = arriving
        if arriving is not None:
            store.reserve(arriving.keys, arriving.size)
        self._txn: Any = store.begin(write=True)
        store.writing = True
        try:
            self.guard(lambda: self._enter(expected or {}, tables or {}))
        except MapFull:
            self.expect_again()
            raise

    def guard(self, action: Callable[[], T]) -> T:
        """Run an action of this transaction; whatever it raises, the transaction is aborted."""
        try:
            return action()
        except lmdb.Error as error:
            self.abort()
            raise self.store.failed(error) from error
        except BaseException:
            self.abort()
            raise

    def _enter(self, expected: Mapping[RegionId, Step | None], tables: Tables) -> None:
        self._ring = UndoRing(self.store, self._txn)
        self._fenced_by = check_fence(self.store, self._txn, self.fence)
        for region in self.regions:
            marker = self._ring.marker(region)
            if marker is not None and marker.step == self.fence.step:
                refuse_twin(self.store, self.fence, region, marker, self._run)
            if self._arriving is not None and self._arriving.fresh:
                wipe(self.store, self._txn, self._ring, region, tables)
                self._before[region] = newest([c for c in self._arriving.cargos if c.region == region])
                continue
            if marker is not None and marker.step == self.fence.step:
                marker = self._ring.roll_back(region, marker)
                self._rolled_back = True
            found = None if marker is None else marker.step
            if found is not None and found >= self.fence.step:
                raise ShardMismatch(
                    f"shard {self.store.path}: region {region!r} is at step {found}, "
                    f"beyond step {self.fence.step} that is to be applied; recover to an earlier version"
                )
            if region in expected and found != expected[region]:
                raise ShardMismatch(
                    f"shard {self.store.path}: region {region!r} is at step {found}, "
                    f"expected {expected[region]} before step {self.fence.step}"
                )
            self._before[region] = marker
        if self._arriving is not None:
            self._acquire(self._arriving)

    def _acquire(self, arriving: Arrival) -> None:
        for region in self.regions:
            cargos = [cargo for cargo in arriving.cargos if cargo.region == region]
            if arriving.fresh:
                born(self._ring, region, self.fence.step)
            if cargos:
                put_arrived(self.store, self._txn, self._ring, cargos, self.fence.step, self._keep_from)
            if cargos or arriving.fresh:
                # The region is at this step from now on, with or without a row of it.
                self._changes[region] = []
        crash.point(ACQUIRED)

    @property
    def touched(self) -> tuple[RegionId, ...]:
        """The regions that were written, in the order of `regions`."""
        return tuple(region for region in self.regions if region in self._changes)

    @property
    def must_commit(self) -> bool:
        """Whether the shard changes: by a put, by undoing an earlier attempt, or by a fence against one.

        In the usual case (the first attempt, in the epoch of the last writer) no zombie of an earlier
        attempt can exist, and a shard without a put needs no commit.
        """
        stored = self._fenced_by
        fence_out = stored is None or stored.epoch < self.fence.epoch or self.fence.attempt > 0
        return bool(self._changes) or self._rolled_back or fence_out

    def table(self, name: str) -> ShardTable:
        """A table, opened (and made) when first asked for."""
        found = self._tables.get(name)
        if found is None:
            found = self._tables[name] = open_table(self.store, self._txn, name)
        return found

    def get(self, name: str, addresses: Sequence[bytes], long: bool) -> list[bytes | None]:
        """As `ShardTable.get`; `long` says that some address may be too long for LMDB."""
        return self.guard(lambda: self.table(name).get(addresses, long))

    def scan(self, name: str, addresses: Sequence[bytes]) -> list[list[tuple[bytes, bytes]]]:
        """As `ShardTable.scan`."""
        return self.guard(lambda: self.table(name).scan(addresses))

    def edge(self, name: str, addresses: Sequence[bytes], last: bool) -> list[tuple[bytes, bytes] | None]:
        """As `ShardTable.edge`."""
        return self.guard(lambda: self.table(name).edge(addresses, last))

    def put(
        self,
        region: RegionId,
        name: str,
        addresses: list[bytes],
        values: Sequence[bytes | None],
        olds: list[bytes | None],
        long: bool,
    ) -> None:
        """Write into a table and keep what was there for the undo record."""
        self.guard(lambda: write(self.store, self._txn, name, self.table(name), addresses, values, long))
        self._changes.setdefault(region, []).append(Change(name, addresses, olds))

    def expect_again(self) -> None:
        """Tell the shard what this transaction has put, for the one that repeats it."""
        for changes in self._changes.values():
            for _, addresses, olds in changes:
                self.store.expect(len(addresses), size_of(addresses) + size_of(olds))
        if self._arriving is not None:
            self.store.expect(self._arriving.keys, self._arriving.size)

    def prepare(self) -> None:
        """All of the commit that can fail for want of room, short of the commit itself.

        A worker prepares every shard before it commits the first, so that a full map seldom leaves
        some shards committed.
        """
        self.guard(self._prepare)

    def _prepare(self) -> None:
        marker = Marker(self.fence.step, self.fence.epoch, self.fence.attempt, self._run)
        for region, changes in self._changes.items():
            self.undo_bytes += self._ring.append(
                region, marker, self._before[region], changes, self._keep_from
            )
        store_fence(self.store, self._txn, self.fence)

    def commit(self, *, prepared: bool = False) -> None:
        """Make it so.  Raises as the constructor does."""
        if not prepared:
            self.prepare()
        self.guard(self._txn.commit)
        self.store.writing = False

    def abort(self) -> None:
        """Leave the shard as it was; harmless when nothing is open any more."""
        self._tables.clear()
        self._txn.abort()
        self.store.writing = False

    def __enter__(self) -> StageTransaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


def size_of(values: Sequence[bytes | None]) -> int:
    """The bytes of them all."""
    return sum(len(value) for value in values if value is not None)


def refuse_twin(store: ShardStore, fence: Fence, region: RegionId, marker: Marker, run: bytes | None) -> None:
    """Raise Fenced if this attempt of this step has written the region already, in another run."""
    if (marker.epoch, marker.attempt) == (fence.epoch, fence.attempt) and marker.run != run:
        raise Fenced(
            f"shard {store.path}: region {region!r} was already written by {fence}, "
            "by another task of the same attempt"
        )


def check_fence(store: ShardStore, txn: Any, fence: Fence) -> Fence | None:
    """The stored fence; raises Fenced when it is newer."""
    stored = read_fence(store, txn)
    if stored is not None and stored > fence:
        raise Fenced(f"shard {store.path}: {fence} comes too late, {stored} has written here")
    return stored


def read_fence(store: ShardStore, txn: Any) -> Fence | None:
    """The newest writer so far."""
    raw = txn.get(_FENCE, db=store.env.open_db(META, txn=txn))
    return None if raw is None else decode_fence(raw)


def store_fence(store: ShardStore, txn: Any, fence: Fence) -> None:
    txn.put(_FENCE, encode_fence(fence), db=store.env.open_db(META, txn=txn))


def marker_of(store: ShardStore, region: RegionId) -> Step | None:
    """The last step applied to a region of a shard."""
    with store.begin(write=False) as txn:
        marker = UndoRing(store, txn).marker(region)
    return None if marker is None else marker.step


def rollback_to(store: ShardStore, fence: Fence, region: RegionId, step: Step | None) -> None:
    """Take a region back to what it was after `step` (None: before all steps), several steps if need be.

    Stores the fence, so that tasks of the time before cannot write any more.

    Raises:
        Fenced: A newer writer was here.
        ShardMismatch: The undo ring does not reach back that far; nothing is changed.
    """
    with write_transaction(store) as txn:
        check_fence(store, txn, fence)
        _back(UndoRing(store, txn), region, step)
        store_fence(store, txn, fence)


def rollback_shard(store: ShardStore, fence: Fence, markers: Mapping[RegionId, Step]) -> None:
    """Take every region of a shard back to where `markers` says (left out: before all steps), in one transaction.

    Raises:
        Fenced: A newer writer was here.
        ShardMismatch: A region cannot be brought exactly there; nothing is changed.
        MapFull: The map was full and has been enlarged: try again.
    """
    wanted = {short_name(region): step for region, step in markers.items()}
    with write_transaction(store) as txn:
        check_fence(store, txn, fence)
        ring = UndoRing(store, txn)
        found = {short_name(region): region for region in ring.regions()}
        for name in sorted(wanted.keys() | found.keys()):
            step = wanted.get(name)
            marker = _back(ring, found[name], step) if name in found else None
            if (None if marker is None else marker.step) != step:
                raise ShardMismatch(
                    f"shard {store.path}: region {long_name(name)!r} must go back to step {step}, but it was last "
                    f"written by step {None if marker is None else marker.step}; restore the shard from a checkpoint"
                )
        store_fence(store, txn, fence)


def _back(ring: UndoRing, region: RegionId, step: Step | None) -> Marker | None:
    marker = ring.marker(region)
    while marker is not None and (step is None or marker.step > step):
        marker = ring.roll_back(region, marker)
    return marker


@contextmanager
def write_transaction(store: ShardStore) -> Iterator[Any]:
    """A bare LMDB write transaction in our words of error; commits unless the block raises."""
    txn = store.begin(write=True)
    store.writing = True
    try:
        yield txn
        txn.commit()
    except lmdb.Error as error:
        txn.abort()
        raise store.failed(error) from error
    except BaseException:
        txn.abort()
        raise
    finally:
        store.writing = False
