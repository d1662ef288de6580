"""Two stores and a shard that moves between them, for tests of moving state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from shard_helpers import fence, identity

from anabranch.model.ids import RegionId, Step
from anabranch.model.ranges import HashRange
from anabranch.state.address import is_long
from anabranch.state.store import ShardStore
from anabranch.state.transaction import marker_of
from anabranch.state.transfer import Arrival, Cargo, collect
from anabranch.state.worker import OwnedShard, WorkerState, run_with_growth

Q, R = RegionId("q"), RegionId("region-" + "ä" * 150)
TABLES = {Q: ("q.a", "q." + "é" * 120), R: ("r.t",)}
TOP = (1 << 64) - 1
ALL: HashRange = (0, TOP + 1)
State = dict[tuple[str, bytes], bytes]
Rows = Mapping[tuple[str, bytes], bytes | None]


def address(hash_: int, key: bytes = b"k") -> bytes:
    return hash_.to_bytes(8, "big") + b"\0" + key


def hash_of(place: tuple[str, bytes]) -> int:
    return int.from_bytes(place[1][:8], "big")


def within(rows: Rows, hashes: HashRange) -> dict[tuple[str, bytes], bytes | None]:
    return {place: v for place, v in rows.items() if hashes[0] <= hash_of(place) < hashes[1]}


def applied(state: State, rows: Rows) -> State:
    after = {**state, **rows}
    return {place: value for place, value in after.items() if value is not None}


def owned(
    path: Path, incarnation: int = 0, hashes: HashRange = ALL, arriving: Arrival | None = None
) -> OwnedShard:
    return OwnedShard(
        path, identity(incarnation=incarnation), hashes=hashes, tables=TABLES, arriving=arriving
    )


def run(
    shard: OwnedShard,
    step: int,
    rows: Rows,
    *,
    attempt: int = 0,
    epoch: int = 0,
    keep: int = 0,
    regions: Sequence[RegionId] = (Q, R),
) -> list:
    """One step, all regions in one stage, over what `rows` has in the shard's range."""
    mine = within(rows, shard.valid)

    def body(state: WorkerState) -> list:
        for region in regions:
            for table in TABLES[region]:
                some = {a: v for (t, a), v in mine.items() if t == table}
                if some:
                    _write(state, region, table, some)
        return state.commit()

    now = fence(step, attempt, epoch)
    return run_with_growth(lambda: WorkerState(1, [shard], now, regions, Step(keep)), body)


def _write(state: WorkerState, region: RegionId, table: str, rows: Mapping[bytes, bytes | None]) -> None:
    import numpy as np

    addresses = sorted(rows)
    hashes = np.array([int.from_bytes(a[:8], "big") for a in addresses], dtype=np.uint64)
    operator, _, name = table.partition(".")
    view = state.scoped(operator, region)
    keys = [a[9:] for a in addresses]
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
    regions: Sequence[RegionId] = (Q, R),
) -> tuple[Cargo, ...]:
    """Collect all regions, as they travel: encoded and decoded."""
    store = ShardStore.open(path)
    found = []
    for region in regions:
        at = marker_of(store, region)
        cargo = collect(
            store,
            fence(step, attempt, epoch),
            region,
            TABLES[region],
            hashes,
            at if at != step else before_of(store, region),
            None if marks is None else Step(marks),
            None if since is None else Step(since),
        )
        found.append(Cargo.decode(cargo.encode()))
        assert found[-1].keys == cargo.keys
        assert found[-1].size == cargo.size
    return tuple(found)


def before_of(store: ShardStore, region: RegionId) -> Step | None:
    """Where the region was before the step that it is at."""
    from anabranch.state.undo import UndoRing

    with store.begin(write=False) as txn:
        ring = UndoRing(store, txn)
        marker = ring.marker(region)
        assert marker is not None
        before = ring.record(region, marker.step)[0]
    return None if before is None else before.step


def content(path: Path, hashes: HashRange = ALL) -> State:
    """All that counts in a store, by the tables' full names."""
    found: State = {}
    for cargo in _peek(path, hashes):
        for table in cargo.tables:
            for place, value in zip(table.addresses, table.values, strict=True):
                assert value is not None
                found[table.name, place] = value
    return found


def _peek(path: Path, hashes: HashRange) -> list[Cargo]:
    from anabranch.model.ids import Epoch
    from anabranch.state.asof import AsOf
    from anabranch.state.cargo import CargoTable
    from anabranch.state.undo import short_name

    names = {short_name(name): (region, name) for region, many in TABLES.items() for name in many}
    cargos = []
    for rows in AsOf(ShardStore.open(path), Step(1 << 40), Epoch(99)).scan([hashes]):
        region, name = names[rows.table]
        table = CargoTable(name, rows.addresses, rows.values, bytes(len(rows.addresses)), ())
        cargos.append(Cargo(identity().shard, region, *hashes, None, None, Step(0), (table,)))
    assert all(is_long(a) or len(a) <= 511 for c in cargos for t in c.tables for a in t.addresses)
    return cargos
