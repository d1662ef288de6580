"""A shard as it was at an earlier step, read while the flow goes on writing later ones.

Theory of operation.  The state *as of* step c is what all steps below c made of the shard.  They are committed and
stay; steps from c on are being written, and the newest of them may be rolled back and run again.  A reader takes
many short transactions, each with a snapshot of its own.  In every snapshot

    state as of c  =  state with the undo records of all steps ≥ c applied backwards, newest first

so a key's value as of c is the old value in the oldest record ≥ c that has the key, and its value in the
snapshot when none has it.  What such a record says of a key is a *fact* about the state as of c, which never
changes; so facts are only ever added, and these hold:

ASOF-1  A fact stays true when the step that it was read from is rolled back: the attempt that follows starts
        from the same state.  So records of undone attempts do no harm.
ASOF-2  In each transaction, before its keys count, all records ≥ c of its snapshot have been read: the record of the
        newest step of a region may have been written anew since it was last read, so it is read again whenever
        anything was committed; all before it are final, as step n+1 starts after n is committed.
ASOF-3  A value read in a transaction is that as of c, unless there is a fact for the key, then or later.
ASOF-4  A key that was deleted before the reader came by has a fact.  So what was read, overridden by the facts of
        the same range of hashes, is the state as of c in that range.

Going back below c would break all of this.  It takes a coordinator of a later epoch, whose fence is noticed
before anything of that snapshot is used.

No transaction lasts: one that is held makes LMDB keep every page that is replaced meanwhile, for good.  On a thread of
low priority even a few keys may take long, so the number of keys in a transaction follows the clock.

Keys that come from another store bring no facts: they lie outside of the ranges that were valid here before, and
whoever reads as of such a step asks for those.

Must not know: workers, partitions, files.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import lmdb

from anabranch.errors import Fenced, ShardMismatch
from anabranch.model.ids import Epoch, RegionId, Step
from anabranch.model.ranges import EVERYTHING, HashRange
from anabranch.state.address import is_long, prefix, whole
from anabranch.state.history import History
from anabranch.state.identity import Marker
from anabranch.state.store import META, UNDO, ShardStore
from anabranch.state.tables import ShardTable
from anabranch.state.transaction import read_fence
from anabranch.state.undo import (
    Record,
    Touched,
    UndoRing,
    changes_of,
    follows,
    long_name,
    marked_in,
    short_name,
    touched_in,
)

T = TypeVar("T")
FEWEST, FIRST, MOST = 256, 2_000, 20_000
"""Keys in a transaction."""
_SHORT, _LONG = 0.005, 0.02
"""Seconds of a transaction after which the next takes more or fewer keys."""
_RECORD_BYTES = 8 << 20
"""Undo records read in a transaction."""
_BATCH_ROWS, _BATCH_BYTES = 64_000, 32 << 20


class Rows(NamedTuple):
    """Some keys of a table, ascending by address.  A value of None: the key was deleted."""

    table: bytes
    """LMDB's name of the table: the short name."""
    addresses: Sequence[bytes]
    values: Sequence[bytes | None]


class _Chunk(NamedTuple):
    keys: list[bytes]
    """As they are on disk."""
    values: list[bytes]
    more: bool
    long: bool
    """Whether some keys may be in the long form."""


class AsOf:
    """Reads one shard as of step `at`.

    Costs about 0.5 s of CPU for 10⁶ keys, and 0.3 s more where the flow has changed a table since; 1 µs
    for each key that changed in a known span of steps.

    Args:
        store: The shard.
        at: The step before which all are committed and from which on all undo records are kept.
        epoch: The coordinator's; a shard that a later one has written is not read.
        expected: The step of each region as of `at`, None for not checked.
        between: Called before each transaction.

    Raises (from all methods):
        ShardMismatch: The shard is not where it should be, or an undo record is missing.
        Fenced: A later coordinator has the shard.
    """

    def __init__(
        self,
        store: ShardStore,
        at: Step,
        epoch: Epoch,
        expected: Mapping[RegionId, Step] | None = None,
        between: Callable[[], None] | None = None,
    ) -> None:
        self.store = store
        self.at = at
        self._epoch = epoch
        self._expected = (
            None if expected is None else {short_name(region): step for region, step in expected.items()}
        )
        self._between = between
        self._seen = -1
        """LMDB's number of the newest snapshot whose records are all in `_facts`."""
        self._last: dict[RegionId, Step] = {}
        """The newest record that was read of each region."""
        self._bases: dict[RegionId, Marker | None] = {}
        """Each region's marker as of `at`."""
        self._facts: dict[bytes, dict[bytes, bytes | None]] = {}
        """Of each table, values as of `at` of keys that were written since."""
        self._keys = FIRST

    def scan(self, ranges: Sequence[HashRange] = EVERYTHING) -> Iterator[Rows]:
        """Every key of these ranges, which ascend; by table, then by address."""
        for table in self._read(lambda txn: [name for name, _ in txn.cursor() if name not in (META, UNDO)]):
            for low, end in ranges:
                yield from self._scan_table(table, prefix(low), prefix(end))

    def changed(self, since: Step, ranges: Sequence[HashRange] = EVERYTHING) -> Iterator[Rows]:
        """Every key of these ranges, which ascend, that a step from `since` on and below `at` has written, also while
        the key was in another store; by table, then by address.  Keys that have only arrived since may be among them.

        Raises:
            ShardMismatch: Also when keys have arrived whose changes are not known back to `since` (HIS-2).
        """
        keys: dict[bytes, set[bytes]] = {}
        for touched in self.touched(since, ranges):
            keys.setdefault(short_name(touched.table), set()).update(touched.addresses)
        for table in sorted(keys):
            addresses = sorted(keys.pop(table))
            long = any(map(is_long, addresses))
            start = 0
            while start < len(addresses):
                some = addresses[start : start + self._keys]
                values = self._read(partial(self._get, table=table, addresses=some, long=long))
                start += len(some)
                facts = self._facts.get(table)
                if facts:
                    values = list(map(facts.get, some, values))
                yield Rows(table, some, values)

    def touched(self, since: Step, ranges: Sequence[HashRange] = EVERYTHING) -> Iterator[Touched]:
        """The keys of `changed`, as the records say: some more than once."""
        unbounded = tuple(ranges) == EVERYTHING
        for region in self._read(lambda txn: UndoRing(self.store, txn).regions()):
            history = self._read(partial(self._history, region=region))
            if not history.knows(since, ranges):
                raise self._too_short(region, history.known(since, ranges))
            for found in self._touched_in(region, since, history.born):
                yield from [found] if unbounded else map(found.within, ranges)

    def base(self, region: RegionId) -> Marker | None:
        """The region's marker as of `at`."""
        self._read(lambda txn: None)
        bases = {short_name(name): marker for name, marker in self._bases.items()}
        return bases.get(short_name(region))

    # --- transactions

    def _read(self, action: Callable[[Any], T]) -> T:
        """`action` in a snapshot of which all records are known afterwards (ASOF-2)."""
        while True:
            if self._between is not None:
                self._between()
            started = time.perf_counter()
            result: T | None = None
            try:
                with self.store.begin(write=False) as txn:
                    records, complete = self._news(txn)
                    if complete:
                        result = action(txn)
            except lmdb.Error as error:
                raise self.store.failed(error) from error
            took = time.perf_counter() - started
            if took > _LONG:
                self._keys = max(FEWEST, self._keys // 2)
            elif took < _SHORT:
                self._keys = min(MOST, self._keys * 2)
            # Unpacked only now: the transaction is over.
            for raw in records:
                for table, addresses, olds in changes_of(raw):
                    facts = self._facts.setdefault(short_name(table), {})
                    deque(map(facts.setdefault, addresses, olds), maxlen=0)
            if complete:
                return result  # type: ignore[return-value]

    def _news(self, txn: Any) -> tuple[list[bytes], bool]:
        """Records to be learnt, of each region oldest first, and whether they are all of this snapshot's."""
        snapshot = txn.id()
        if snapshot == self._seen:
            return [], True
        fence = read_fence(self.store, txn)
        if fence is not None and fence.epoch > self._epoch:
            raise Fenced(
                f"shard {self.store.path}: epoch {fence.epoch} has written here, so epoch {self._epoch} may no longer "
                f"read it as of step {self.at}"
            )
        ring = UndoRing(self.store, txn)
        found: list[bytes] = []
        size = 0
        for region in sorted({*ring.regions(), *self._bases, *self._expected_regions()}):
            known = self._last.get(region)
            for record in self._region_news(ring, region):
                found.append(record.raw)
                size += len(record.raw)
                # Only after one that is new, so that every transaction brings us further.
                if size > _RECORD_BYTES and (known is None or record.step > known):
                    return found, False
        self._seen = snapshot
        return found, True

    def _region_news(self, ring: UndoRing, region: RegionId) -> Iterator[Record]:
        """The last record that was read, once more, and those behind it."""
        marker = ring.marker(region)
        last = self._last.get(region)
        if marker is None or marker.step < self.at:
            # Whatever was read from `at` on has been undone.
            self._last.pop(region, None)
            self._check_base(region, marker)
            return
        for record in ring.records(region, self.at if last is None else last):
            before = -1 if record.before is None else record.before.step
            # The last one that was read may have been undone meanwhile; then `before` is below it.
            if before > (self.at - 1 if last is None else last):
                raise self._too_short(region, record.step)
            if last is None:
                self._check_base(region, record.before)
            last = self._last[region] = record.step
            yield record
        if last is None or last < marker.step:
            raise self._too_short(region, marker.step)

    def _check_base(self, region: RegionId, base: Marker | None) -> None:
        if region not in self._bases:
            found = None if base is None else base.step
            wanted = found if self._expected is None else self._expected.get(short_name(region))
            if found != wanted:
                raise ShardMismatch(
                    f"shard {self.store.path}: region {region!r} as of step {self.at} was last written by step {found}, "
                    f"the step log says {wanted}"
                )
            self._bases[region] = base
        elif self._bases[region] != base:
            raise ShardMismatch(
                f"shard {self.store.path}: region {region!r} was taken back before step {self.at} while it was read as of "
                "that step"
            )

    def _expected_regions(self) -> list[RegionId]:
        return [RegionId(long_name(raw)) for raw in self._expected or ()]

    def _too_short(self, region: RegionId, step: Step) -> ShardMismatch:
        return ShardMismatch(
            f"shard {self.store.path}: an undo record of region {region!r} before step {step} is no longer kept, so the "
            f"state as of step {self.at} cannot be told; take a full checkpoint of a later step"
        )

    # --- what the transactions do

    def _scan_table(self, table: bytes, low: bytes, end: bytes) -> Iterator[Rows]:
        addresses: list[bytes] = []
        values: list[bytes | None] = []
        size = 0
        unordered = False
        position, inclusive, more = low, True, True
        while more:
            chunk = self._read(partial(self._chunk, table=table, start=position, first=inclusive))
            count = bisect_left(chunk.keys, end)
            keys, stored = chunk.keys[:count], chunk.values[:count]
            more = chunk.more and count == len(chunk.keys)
            if more:
                position, inclusive = keys[-1], False
            size += sum(map(len, stored))
            if chunk.long:
                unordered = True
                for disk, value in zip(keys, stored, strict=True):
                    address, plain = whole(disk, value)
                    addresses.append(address)
                    values.append(plain)
            else:
                addresses += keys
                values += stored
            if more and (len(addresses) >= _BATCH_ROWS or size >= _BATCH_BYTES):
                # Cut between two hashes: within one, long keys are not in the order of their addresses.
                bound = position[:8]
                cut = bisect_left(addresses, bound)
                if cut:
                    yield from self._settled(table, addresses[:cut], values[:cut], low, bound, unordered)
                    addresses, values, low = addresses[cut:], values[cut:], bound
                    size = 0
        yield from self._settled(table, addresses, values, low, end, unordered)

    def _settled(
        self,
        table: bytes,
        addresses: list[bytes],
        values: list[bytes | None],
        low: bytes,
        end: bytes,
        unordered: bool,
    ) -> Iterator[Rows]:
        """What was read in a range, overridden by the facts of that range (ASOF-4)."""
        known = self._facts.get(table, {})
        facts = {a: v for a, v in known.items() if low <= a < end}
        if facts or unordered:
            rows = dict(zip(addresses, values, strict=True))
            rows.update(facts)
            if None in facts.values():
                rows = {a: v for a, v in rows.items() if v is not None}
            # Linear when few are out of order, as is usual.
            addresses = sorted(rows)
            values = list(map(rows.__getitem__, addresses))
        if addresses:
            yield Rows(table, addresses, values)

    def _chunk(self, txn: Any, *, table: bytes, start: bytes, first: bool) -> _Chunk:
        """Some entries from `start` on, or behind it unless `first`."""
        cursor = txn.cursor(db=self.store.env.open_db(table, txn=txn, create=False))
        if not cursor.set_range(start) or (not first and cursor.key() == start and not cursor.next()):
            return _Chunk([], [], more=False, long=False)
        begin = cursor.key()
        # Twice over the pages, without a tuple for each pair: those would keep Python's garbage collector busy.
        keys = list(islice(cursor.iternext(values=False), self._keys))
        cursor.set_key(begin)
        values = list(islice(cursor.iternext(keys=False), self._keys))
        meta = self.store.env.open_db(META, txn=txn, create=False)
        long = txn.get(b"long:" + table, db=meta) is not None
        return _Chunk(keys, values, more=len(keys) == self._keys, long=long)

    def _get(self, txn: Any, *, table: bytes, addresses: list[bytes], long: bool) -> list[bytes | None]:
        db = self.store.env.open_db(table, txn=txn, create=False)
        return ShardTable(txn, db, long).get(addresses, long)

    def _touched_in(self, region: RegionId, since: Step, born: Step | None) -> Iterator[Touched]:
        """What the records from `since` on and below `at` have, which are final, and what the marks of the time since
        have; a few in each transaction."""
        base = self._bases.get(region)
        last: Step | None = None
        while base is not None and (since if last is None else last + 1) <= base.step:
            records = self._read(partial(self._some_records, region=region, since=since, last=last))
            for record in records:
                if not follows(record.before, last, since, born):
                    raise self._too_short(region, record.step)
                last = record.step
                yield from touched_in(record.raw)
            if not records:
                if last is None and born is not None and base.step < born:
                    break
                raise self._too_short(region, base.step)
        behind: tuple[Step, int] | None = None
        while marks := self._read(partial(self._some_marks, region=region, since=since, behind=behind)):
            for *_, raw in marks:
                yield from marked_in(raw)
            behind = marks[-1][:2]

    def _some_records(self, txn: Any, *, region: RegionId, since: Step, last: Step | None) -> list[Record]:
        found: list[Record] = []
        size = 0
        first = since if last is None else Step(last + 1)
        for record in UndoRing(self.store, txn).records(region, first, self.at):
            found.append(record)
            size += len(record.raw)
            if size > _RECORD_BYTES:
                break
        return found

    def _history(self, txn: Any, *, region: RegionId) -> History:
        return UndoRing(self.store, txn).history(region)

    def _some_marks(
        self, txn: Any, *, region: RegionId, since: Step, behind: tuple[Step, int] | None
    ) -> list[tuple[Step, int, bytes]]:
        ring = UndoRing(self.store, txn)
        found: list[tuple[Step, int, bytes]] = []
        size = 0
        for each in ring.marks(region, since) if behind is None else ring.marks_behind(region, *behind):
            found.append(each)
            size += len(each[2])
            if size > _RECORD_BYTES:
                break
        return found
