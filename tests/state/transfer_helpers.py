"""A shard whose keys move between stores, for tests of moving state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from shard_helpers import fence, identity

from anabranch.model.ids import Epoch, RegionId, Step
from anabranch.model.ranges import HashRange
from anabranch.state.asof import AsOf
from anabranch.state.asof import Rows as Batch
from anabranch.state.store import ShardStore
from anabranch.state.transfer import Arrival, Cargo, collect
from anabranch.state.undo import UndoRing, short_name
from anabranch.state.worker import OwnedShard, TouchedShard, WorkerState, run_with_growth

Q, R = RegionId("q"), RegionId("region-" + "ä" * 150)
TABLES = {Q: ("q.a", "q." + "é" * 120), R: ("r.t",)}
NAMES = {short_name(name): name for many in TABLES.values() for name in many}
ALL: HashRange = (0, 1 << 64)
Place = tuple[str, bytes]
State = dict[Place, bytes]
Rows = Mapping[Place, bytes | None]


def address(hash_: int, key: bytes = b"k") -> bytes:
    return hash_.to_bytes(8, "big") + b"\0" + key


HASHES = [0, 7, 1 << 62, 1 << 63, (1 << 63) + 1, (1 << 64) - 1]
KEYS = [b"a", b"b", b"L" * 503, b"M" * 900 + b"1", b"M" * 900 + b"2"]
ROWS = st.dictionaries(
    st.tuples(
        st.sampled_from(sorted(NAMES.values())),
        st.builds(address, st.sampled_from(HASHES), st.sampled_from(KEYS)),
    ),
    st.none() | st.binary(max_size=3),
    max_size=12,
)


def hash_of(place: Place) -> int:
    return int.from_bytes(place[1][:8], "big")


def within(rows: Rows, hashes: HashRange) -> dict[Place, bytes | None]:
    return {place: v for place, v in rows.items() if hashes[0] <= hash_of(place) < hashes[1]}


def applied(state: State, rows: Rows) -> State:
    return {place: value for place, value in {**state, **rows}.items() if value is not None}


def owned(
    path: Path, incarnation: int = 0, hashes: HashRange = ALL, arriving: Arrival | None = None
) -> OwnedShard:
    who = identity(incarnation=incarnation)
    return OwnedShard(path, who, hashes=hashes, tables=TABLES, arriving=arriving)


def run(
    shard: OwnedShard, step: int, rows: Rows, *, attempt: int = 0, epoch: int = 0, keep: int = 0
) -> list[TouchedShard]:
    """One step, with a stage for each region, over what `rows` has in the shard's range."""
    touched = []
    for region in TABLES:
        arriving = shard.arriving
        if arriving is not None:
            arriving = Arrival(tuple(c for c in arriving.cargos if c.region == region), arriving.fresh)
        stage = owned(Path(shard.path), shard.identity.incarnation, shard.valid, arriving)
        touched += _run_stage(stage, region, fence(step, attempt, epoch), within(rows, shard.valid), keep)
    return touched


def _run_stage(shard: OwnedShard, region: RegionId, now, rows: Rows, keep: int) -> list[TouchedShard]:
    def body(state: WorkerState) -> list[TouchedShard]:
        for table in TABLES[region]:
            some = {a: v for (t, a), v in rows.items() if t == table}
            if some:
                _write(state, region, table, some)
        return state.commit()

    return run_with_growth(lambda: WorkerState(1, [shard], now, [region], Step(keep)), body)


def _write(state: WorkerState, region: RegionId, table: str, rows: Mapping[bytes, bytes | None]) -> None:
    addresses = sorted(rows)
    hashes = np.array([int.from_bytes(a[:8], "big") for a in addresses], dtype=np.uint64)
    keys = [a[9:] for a in addresses]
    operator, _, name = table.partition(".")
    view = state.scoped(operator, region)
    view.put(name, hashes, keys, [rows[a] for a in addresses], view.get(name, hashes, keys))


def take(
    path: Path,
    step: int,
    hashes: HashRange = ALL,
    *,
    attempt: int = 0,
    epoch: int = 0,
    marks: int | None = 0,
    since: int | None = None,
) -> tuple[Cargo, ...]:
    """Collect all regions, as they travel: encoded and decoded."""
    store = ShardStore.open(path)
    found = []
    for region, tables in TABLES.items():
        cargo = collect(
            store,
            fence(step, attempt, epoch),
            region,
            tables,
            hashes,
            stands(store, region, step),
            None if marks is None else Step(marks),
            None if since is None else Step(since),
        )
        assert all(list(t.addresses) == sorted(set(t.addresses)) for t in cargo.tables)
        raw = cargo.encode()
        found.append(Cargo.decode(raw))
        assert (found[-1].keys, found[-1].size) == (cargo.keys, cargo.size)
        assert found[-1].encode() == raw
    return tuple(found)


def stands(store: ShardStore, region: RegionId, step: int) -> Step | None:
    """Where a region was before a step, which may have been applied already."""
    with store.begin(write=False) as txn:
        ring = UndoRing(store, txn)
        marker = ring.marker(region)
        if marker is not None and marker.step == step:
            marker = ring.record(region, marker.step)[0]
    return None if marker is None else marker.step


def content(path: Path, hashes: HashRange = ALL) -> State:
    """All that counts in a store."""
    return flat(AsOf(ShardStore.open(path), Step(1 << 40), Epoch(99)).scan([hashes]))  # type: ignore[return-value]


def changed(path: Path, at: int, since: int, hashes: HashRange = ALL) -> dict[Place, bytes | None]:
    """What an incremental checkpoint as of `at` would get."""
    return flat(AsOf(ShardStore.open(path), Step(at), Epoch(99)).changed(Step(since), [hashes]))


def flat(batches: Sequence[Batch]) -> dict[Place, bytes | None]:
    found: dict[Place, bytes | None] = {}
    for rows in batches:
        found.update(((NAMES[rows.table], a), v) for a, v in zip(rows.addresses, rows.values, strict=True))
    return found
