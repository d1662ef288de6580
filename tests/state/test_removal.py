"""Removing stores that count no more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shard_helpers import fence, identity
from shard_processes import SPAWN, start, sweep_beside

from anabranch.model.ids import RegionId, ShardId
from anabranch.state.removal import drop_shard, sweep_host
from anabranch.state.store import ShardStore, shard_path
from anabranch.state.transaction import StageTransaction


def make(root: Path, shard: int, incarnation: int = 0, step: int = 0) -> Path:
    path = shard_path(root, ShardId(shard))
    store = ShardStore.create(path, identity(shard, 8, incarnation))
    StageTransaction(store, fence(step), [RegionId("r")]).commit()
    return path


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def age(path: Path) -> None:
    """As if it had been written before the last boot."""
    (path / "stamp.json").write_text(json.dumps({"boot": "another", "synced": None}))


def test_what_is_dropped_is_told_in_bytes_and_can_be_made_again(tmp_path: Path) -> None:
    path = make(tmp_path, 1)
    size = sum(file.stat().st_blocks * 512 for file in path.iterdir())
    assert drop_shard(path, identity(1, 8)) == size > 0
    assert names(tmp_path) == []
    assert drop_shard(path, identity(1, 8)) == 0
    make(tmp_path, 1, incarnation=2)
    assert ShardStore.open(path).identity == identity(1, 8, 2)


def test_what_a_process_that_died_was_deleting_is_deleted_by_the_next_one(tmp_path: Path) -> None:
    path = make(tmp_path, 1)
    other = make(tmp_path, 10)
    for one in (path, other):
        one.rename(f"{one}~dropped-abc")
    assert drop_shard(path, identity(1, 8)) == 0
    assert names(tmp_path) == ["shard-00010~dropped-abc"]


@pytest.mark.parametrize("torn", [False, True])
def test_another_store_and_one_that_may_be_torn_stay(tmp_path: Path, torn: bool) -> None:
    path = make(tmp_path, 1, incarnation=3)
    if torn:
        age(path)
        (path / "data.mdb").write_bytes(b"torn")
    assert drop_shard(path, identity(1, 8, 3 if torn else 2)) == 0
    assert names(tmp_path) == ["shard-00001"]


def test_sweeping_leaves_what_is_kept_and_what_a_newer_writer_has(tmp_path: Path) -> None:
    make(tmp_path, 0)
    make(tmp_path, 1, incarnation=1)
    make(tmp_path, 2)
    make(tmp_path, 3, step=9)
    (tmp_path / "shard-00004").mkdir()
    for shard in (5, 6):
        age(make(tmp_path, shard))
    (tmp_path / "shard-00000~dropped-1").mkdir()
    (tmp_path / "shard-00007~restoring-1").mkdir()
    (tmp_path / "restore.lock").touch()
    keep = [identity(0, 8), identity(1, 8, 2), identity(5, 8, 4)]
    assert sweep_host(tmp_path, keep, fence(5)) == [
        "shard-00000~dropped-1",
        "shard-00001",
        "shard-00002",
        "shard-00004",
        "shard-00006",
        "shard-00007~restoring-1",
    ]
    assert names(tmp_path) == ["restore.lock", "shard-00000", "shard-00003", "shard-00005"]
    assert sweep_host(tmp_path, keep, fence(5)) == []
    assert sweep_host(tmp_path / "nowhere", keep, fence(5)) == []


def test_several_processes_may_sweep_a_host_at_the_same_time(tmp_path: Path) -> None:
    """As the first workers of all hosts do with the directories of hosts that are no longer used."""
    for shard in range(96):
        ShardStore.forget(make(tmp_path, shard))
    ready, outcome = SPAWN.Barrier(3), SPAWN.Queue()
    children = [start(sweep_beside, tmp_path, ready, outcome) for _ in range(3)]
    assert [outcome.get(timeout=60) for _ in children] == [None, None, None]
    for child in children:
        child.join()
    assert names(tmp_path) == []
