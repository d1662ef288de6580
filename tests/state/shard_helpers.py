"""Making shards, and looking at all that is in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from anabranch.model.ids import Attempt, Epoch, HostId, Incarnation, RegionId, ShardId, Step
from anabranch.state.identity import Fence, ShardIdentity
from anabranch.state.store import ShardStore, shard_path
from anabranch.state.worker import OwnedShard, WorkerState, run_with_growth

R = RegionId("r")


def identity(shard: int = 0, of: int = 1, incarnation: int = 0, host: str = "h") -> ShardIdentity:
    return ShardIdentity("job", ShardId(shard), of, Incarnation(incarnation), HostId(host))


def fence(step: int, attempt: int = 0, epoch: int = 0) -> Fence:
    return Fence(Epoch(epoch), Step(step), Attempt(attempt))


def make_shards(root: Path, of: int, **create: int) -> list[OwnedShard]:
    owned = []
    for shard in range(of):
        who = identity(shard, of)
        path = shard_path(root, ShardId(shard))
        ShardStore.create(path, who, **create)
        owned.append(OwnedShard(path, who))
    return owned


def dump(store: ShardStore, *, meta: bool = True) -> dict[bytes, list[tuple[bytes, bytes]]]:
    """All entries of all named databases that have any."""
    found = {}
    with store.begin(write=False) as txn:
        names = [bytes(name) for name, _ in txn.cursor()]
        for name in names:
            if meta or not name.startswith(b"_"):
                entries = list(txn.cursor(db=store.env.open_db(name, txn=txn)))
                if entries:
                    found[name] = entries
    return found


def dump_all(shards: list[OwnedShard], *, meta: bool = True) -> list[dict[bytes, list[tuple[bytes, bytes]]]]:
    return [dump(ShardStore.open(owned.path), meta=meta) for owned in shards]


def sorted_rows(rows: dict[tuple[int, bytes], object]) -> tuple[np.ndarray, list[bytes], list]:
    """hashes, keys and values of a dict from (hash, key), in the order that state wants."""
    items = sorted(rows.items(), key=lambda item: item[0])
    hashes = np.array([h for (h, _), _ in items], dtype=np.uint64)
    return hashes, [k for (_, k), _ in items], [v for _, v in items]


def apply(state: WorkerState, rows: dict[tuple[int, bytes], bytes | None], table: str = "t") -> None:
    """Read, then write, as kernels do."""
    hashes, keys, values = sorted_rows(rows)
    view = state.scoped("op", R)
    view.put(table, hashes, keys, values, view.get(table, hashes, keys))


def run_step(
    shards: list[OwnedShard],
    step: int,
    rows: dict[tuple[int, bytes], bytes | None],
    *,
    attempt: int = 0,
    epoch: int = 0,
    keep: int = 0,
) -> list:
    def body(state: WorkerState) -> list:
        apply(state, rows)
        return state.commit()

    return run_with_growth(
        lambda: WorkerState(len(shards), shards, fence(step, attempt, epoch), [R], Step(keep)), body
    )
