"""What operators see: all of a worker's shards as keyed tables, for one stage of one attempt of one step.

All of the worker's shards are opened together, in ascending order, when the first key is asked for or, at the
latest, on commit.  The order keeps two attempts that run at once from waiting for each other's shards in a
circle.  That all are opened means that what an earlier attempt left in a shard is undone even where this one
has nothing to write, and that a zombie finds its fence everywhere.

Must not know: flows, operators, Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from types import TracebackType
from typing import TypeVar
from uuid import uuid4

import numpy as np

from anabranch import crash
from anabranch.errors import EngineError, ShardMismatch
from anabranch.model.batch import U64
from anabranch.model.ids import Incarnation, OperatorId, RegionId, ShardId, Step
from anabranch.model.ranges import HashRange, hash_range
from anabranch.model.scan import Scan
from anabranch.state.address import addresses_of, any_long
from anabranch.state.arrival import Arrival
from anabranch.state.faults import MapFull, with_growth
from anabranch.state.identity import Fence, ShardIdentity
from anabranch.state.store import ShardStore
from anabranch.state.transaction import StageTransaction, size_of

BETWEEN = crash.declare("shards.between", "when a stage has committed one of a worker's shards")
COMMITTED = crash.declare(
    "shards.committed", "a stage has committed a worker's shards, and has sent nothing yet"
)

T = TypeVar("T")
_KEEP_ALL = Step(0)
_TOP = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class OwnedShard:
    """A shard of this worker: where it must be, who it must be, and where its regions must stand."""

    path: str | PathLike[str]
    identity: ShardIdentity
    expected: Mapping[RegionId, Step | None] = field(default_factory=dict)
    """The last committed step that touched each region (None: none did); regions left out are not checked."""
    hashes: HashRange | None = None
    """Those that are valid in this copy of the shard; None: all of the shard's."""
    tables: Mapping[RegionId, tuple[str, ...]] = field(default_factory=dict)
    """The full names of the tables of each region; needed where a fresh copy arrives."""
    arriving: Arrival | None = None
    """What comes to this copy in the step, of the regions of the stage."""

    @property
    def valid(self) -> HashRange:
        return hash_range(self.identity.shard, self.identity.of) if self.hashes is None else self.hashes


@dataclass(frozen=True, slots=True)
class TouchedShard:
    """What a commit record says of a shard that a step wrote."""

    shard: ShardId
    incarnation: Incarnation
    step: Step
    regions: tuple[RegionId, ...]


@dataclass(slots=True)
class _Open:
    owned: OwnedShard
    transaction: StageTransaction


class WorkerState:
    """The shards of one worker, between begin and commit of one stage.

    Use it as a context manager: leaving the block without `commit` aborts.  Any error in any shard
    aborts them all.  `scoped` gives the view for one operator.  Apart from the keys, a stage costs about
    35 µs of CPU for each shard that is owned and 60 µs more for each that is written.

    Args:
        of: S, the number of shards.
        shards: Those that this worker owns, in any order.
        fence: The writer's place among all writers; its step is the one being applied.
        regions: What this stage may write.
        keep_undo_from: The oldest step whose undo record must stay.
    """

    def __init__(
        self,
        of: int,
        shards: Sequence[OwnedShard],
        fence: Fence,
        regions: Sequence[RegionId],
        keep_undo_from: Step = _KEEP_ALL,
    ) -> None:
        for owned in shards:
            if owned.identity.of != of:
                raise EngineError(
                    f"shard {owned.path} is one of {owned.identity.of}, but the layout has {of} shards"
                )
        self._of = of
        self._shards = sorted(shards, key=lambda owned: owned.identity.shard)
        self._fence = fence
        self._regions = tuple(regions)
        self._keep_from = keep_undo_from
        self.run = uuid4().bytes
        """Names this task in the markers it writes; a re-run of the same task keeps it."""
        self.undo_bytes = 0
        """Size of the undo records that `commit` wrote."""
        self._open: list[_Open] = []
        self._ended = False
        """True after commit or abort: whoever goes on then would write half of a stage."""
        ranges = [owned.valid for owned in self._shards]
        # Of an empty range the last hash is none; `_filled` says which are not.
        self._lows = np.array([min(low, _TOP) for low, _ in ranges], dtype=np.uint64)
        self._highs = np.array([max(end - 1, 0) for _, end in ranges], dtype=np.uint64)
        self._filled = np.array([low < end for low, end in ranges], dtype=bool)

    def scoped(self, operator: OperatorId, region: RegionId) -> ScopedState:
        """The tables of one operator; `region` is the one whose step marker covers them."""
        if region not in self._regions:
            raise EngineError(
                f"operator {operator!r} writes region {region!r}, the stage has {self._regions}"
            )
        return ScopedState(self, operator, region)

    def parts(self, hashes: U64) -> Iterator[tuple[StageTransaction, slice]]:
        """Each touched shard's transaction and the slice of rows that is its.

        Raises:
            ShardMismatch: a row belongs to a shard that is not this worker's.
        """
        if not len(hashes):
            return
        if not bool(np.all(hashes[:-1] <= hashes[1:])):
            raise EngineError("keyed state was asked with hashes that are not sorted")
        starts = np.searchsorted(hashes, self._lows, side="left")
        ends = np.searchsorted(hashes, self._highs, side="right")
        ends = np.where(self._filled, ends, starts)
        self._open_all((ends - starts).tolist())
        if int((ends - starts).sum()) != len(hashes):
            raise self._misled(hashes)
        for k in np.flatnonzero(ends > starts).tolist():
            yield self._open[k].transaction, slice(int(starts[k]), int(ends[k]))

    def _misled(self, hashes: U64) -> ShardMismatch:
        ids = [owned.identity.shard for owned in self._shards]
        ranges = [owned.valid for owned in self._shards]
        lost = [h for h in hashes.tolist() if not any(low <= h < end for low, end in ranges)]
        missing = sorted({h * self._of >> 64 for h in lost})
        return ShardMismatch(
            f"rows of shards {missing[:10]} came to a worker that owns {ids}, of hash {lost[0]} and others that no range "
            "here has: sender and receiver have different layouts"
        )

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Whatever the block raises, all shards are aborted."""
        try:
            yield
        except BaseException:
            self.abort()
            raise

    def _open_all(self, keys: Sequence[int] | None = None) -> None:
        """Begin in all shards, if that is not done.

        Args:
            keys: How many keys the stage asks of each shard.
        """
        if self._ended:
            raise EngineError(f"the state for {self._fence} was committed or aborted already; make a new one")
        if self._open:
            return
        for place, owned in enumerate(self._shards):
            arriving = owned.arriving
            if arriving is not None:
                arriving.check(owned.identity, owned.valid, self._regions)
            fresh = arriving is not None and arriving.fresh
            open_store = ShardStore.ensure if fresh else ShardStore.open
            store = open_store(owned.path, owned.identity)
            if keys is not None:
                store.foresee(keys[place])
            transaction = StageTransaction(
                store,
                self._fence,
                self._regions,
                owned.expected,
                self._keep_from,
                self.run,
                arriving,
                owned.tables,
            )
            self._open.append(_Open(owned, transaction))

    def commit(self) -> list[TouchedShard]:
        """Commit every shard; each is atomic by itself, and a re-run mends what a crash between two leaves.

        Raises:
            StorageFullError: a disk is full.
            MapFull: a map was too small and has been enlarged; see `run_with_growth`.
        """
        with self.all_or_none():
            self._open_all()
            changed = [item for item in self._open if item.transaction.must_commit]
            try:
                for item in changed:
                    item.transaction.prepare()
            except MapFull:
                for item in changed:
                    item.transaction.expect_again()
                raise
            for item in changed:
                item.transaction.commit(prepared=True)
                crash.point(BETWEEN)
        crash.point(COMMITTED)
        self.undo_bytes = sum(item.transaction.undo_bytes for item in changed)
        touched = [
            TouchedShard(
                item.owned.identity.shard,
                item.owned.identity.incarnation,
                self._fence.step,
                item.transaction.touched,
            )
            for item in changed
            if item.transaction.touched
        ]
        self.abort()
        return touched

    def abort(self) -> None:
        """Leave all shards that are not yet committed as they were."""
        for item in self._open:
            item.transaction.abort()
        self._open.clear()
        self._ended = True

    def __enter__(self) -> WorkerState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class ScopedState:
    """One operator's tables over all shards of the worker: the kernels' `KeyedState`.

    Measured on one core of a busy 2-core machine, 8 shards, integer keys, reading and writing with undo
    record and commit: 0.6 to 1.0 M keys/s when a step touches all of 10⁵ keys, 0.3 M/s when it touches 10⁵ of
    10⁶ at random, 0.12 M/s when 1,000 of 10⁶ (each then has a page of its own to copy).
    """

    def __init__(self, worker: WorkerState, operator: OperatorId, region: RegionId) -> None:
        self._worker = worker
        self._operator = operator
        self._region = region
        self._located: tuple[U64, Sequence[bytes], list[bytes], bool] | None = None
        """What `_locate` was asked last, and its answer."""

    def get(self, table: str, hashes: U64, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value of each key, or None."""
        addresses, long = self._locate(hashes, keys)
        name = self._name(table)
        found: list[bytes | None] = []
        with self._worker.all_or_none():
            for transaction, rows in self._worker.parts(hashes):
                found += transaction.get(name, addresses[rows], long)
        return found

    def put(
        self,
        table: str,
        hashes: U64,
        keys: Sequence[bytes],
        values: Sequence[bytes | None],
        olds: Sequence[bytes | None],
    ) -> None:
        """Write each key; a value of None deletes it."""
        if not len(keys) == len(values) == len(olds):
            raise EngineError(
                f"table {table!r}: {len(keys)} keys put with {len(values)} values and {len(olds)} old values"
            )
        addresses, long = self._locate(hashes, keys)
        name = self._name(table)
        with self._worker.all_or_none():
            parts = list(self._worker.parts(hashes))
            try:
                for transaction, rows in parts:
                    transaction.put(self._region, name, addresses[rows], values[rows], list(olds[rows]), long)
            except MapFull:
                for transaction, rows in parts:
                    size = size_of(addresses[rows]) + size_of(values[rows]) + size_of(olds[rows])
                    transaction.store.expect(rows.stop - rows.start, size)
                raise

    def scan(self, table: str, hashes: U64, prefixes: Sequence[bytes]) -> Scan:
        """All entries whose key begins with `prefixes[i]` under `hashes[i]`, in key order per prefix."""
        counts: list[int] = []
        suffixes: list[bytes] = []
        values: list[bytes] = []
        name = self._name(table)
        addresses = addresses_of(hashes, prefixes)
        with self._worker.all_or_none():
            for transaction, rows in self._worker.parts(hashes):
                for found in transaction.scan(name, addresses[rows]):
                    counts.append(len(found))
                    suffixes += [suffix for suffix, _ in found]
                    values += [value for _, value in found]
        return Scan(np.repeat(np.arange(len(counts), dtype=np.int64), counts), suffixes, values)

    def edge(
        self, table: str, hashes: U64, prefixes: Sequence[bytes], last: bool
    ) -> list[tuple[bytes, bytes] | None]:
        """The first (or last) entry of each prefix as (suffix, value), or None."""
        result: list[tuple[bytes, bytes] | None] = []
        name = self._name(table)
        addresses = addresses_of(hashes, prefixes)
        with self._worker.all_or_none():
            for transaction, rows in self._worker.parts(hashes):
                result += transaction.edge(name, addresses[rows], last)
        return result

    def _locate(self, hashes: U64, keys: Sequence[bytes]) -> tuple[list[bytes], bool]:
        """The keys' addresses, and whether one is long; made once for keys that are read and then written."""
        last = self._located
        if last is None or last[0] is not hashes or last[1] is not keys:
            last = self._located = hashes, keys, addresses_of(hashes, keys), any_long(keys)
        return last[2], last[3]

    def _name(self, table: str) -> str:
        return f"{self._operator}.{table}"


def shard_low(shard: ShardId, of: int) -> int:
    """The smallest hash of a shard: the inverse of `shard = floor(hash · S / 2⁶⁴)`."""
    return -(-(shard << 64) // of)


def run_with_growth(make_state: Callable[[], WorkerState], body: Callable[[WorkerState], T]) -> T:
    """Run a stage's body, and again from fresh transactions as long as a shard outgrows its map.

    The body ends with `commit`; it must depend on nothing that an earlier, aborted call changed.  Every
    re-run finds twice the room in the shard that lacked it, so there are few.
    """
    run = uuid4().bytes

    def once() -> T:
        with make_state() as state:
            state.run = run
            return body(state)

    return with_growth(once)
