"""The map over a shard's file: no hole under it, never cut off, and a full disk that kills nobody."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
from shard_helpers import R, apply, dump, fence, identity, make_shards, run_step
from shard_processes import SPAWN, die_inside, fill_small_disk, read_often, start

from anabranch.state import mapping
from anabranch.state.mapping import open_environment, remap
from anabranch.state.store import MAP_SIZE, ShardStore
from anabranch.state.transaction import write_transaction
from anabranch.state.worker import OwnedShard, WorkerState

ROWS = {(n, b"k%d" % n): os.urandom(300) for n in range(1, 6_000)}


def holes(path: Path) -> dict[str, int]:
    """Bytes of each of LMDB's files that have no block on the disk."""
    stats = {name: (path / name).stat() for name in ("data.mdb", "lock.mdb")}
    return {name: max(0, stat.st_size - stat.st_blocks * 512) for name, stat in stats.items()}


def whole(path: Path, env: lmdb.Environment) -> bool:
    same = (path / "data.mdb").stat().st_size == env.info()["map_size"]
    return same and holes(path) == {"data.mdb": 0, "lock.mdb": 0}


def test_a_new_shard_is_small_and_without_holes(tmp_path: Path) -> None:
    store = ShardStore.create(tmp_path / "s", identity())
    assert store.env.flags()["writemap"]
    assert store.env.info()["map_size"] == MAP_SIZE
    assert whole(store.path, store.env)


def unwritten(path: Path) -> int:
    """Bytes of the data file from the first on that was allocated and never written: to the file system, no data."""
    with (path / "data.mdb").open("rb") as file:
        end = os.lseek(file.fileno(), 0, os.SEEK_END)
        return end - os.lseek(file.fileno(), 0, os.SEEK_HOLE)


def test_new_space_is_written(tmp_path: Path) -> None:
    store = ShardStore.create(tmp_path / "s", identity(), map_size=1 << 20)
    assert unwritten(store.path) == 0
    store.grow()
    assert store.env.info()["map_size"] > 1 << 20
    assert unwritten(store.path) == 0


def test_a_shard_grows_without_holes_and_not_far_beyond_its_data(tmp_path: Path) -> None:
    (owned,) = make_shards(tmp_path, 1)
    store = ShardStore.open(owned.path)
    for step in range(6):
        run_step([owned], step, ROWS, keep=step)
        assert whole(store.path, store.env)
    used = (store.env.info()["last_pgno"] + 1) * 4096
    assert store.env.info()["map_size"] < 2 * used
    for step in range(6, 20):
        run_step([owned], step, ROWS, keep=step)
    assert (store.env.info()["last_pgno"] + 1) * 4096 < 1.2 * used


def test_a_file_with_holes_is_filled_before_it_is_written(tmp_path: Path) -> None:
    (owned,) = make_shards(tmp_path, 1)
    run_step([owned], 0, ROWS)
    before = dump(ShardStore.open(owned.path))
    ShardStore.open(owned.path).close()
    subprocess.run(
        ["cp", "--sparse=always", owned.path / "data.mdb", owned.path / "copy"],
        check=True,
        capture_output=True,
    )
    os.truncate(owned.path / "copy", (owned.path / "copy").stat().st_size + (1 << 20))
    (owned.path / "copy").rename(owned.path / "data.mdb")
    assert holes(owned.path)["data.mdb"] >= 1 << 20
    store = ShardStore.open(owned.path)
    assert whole(store.path, store.env)
    assert dump(store) == before


def test_a_shard_that_was_written_without_the_map_is_taken_over(tmp_path: Path) -> None:
    plain = lmdb.open(str(tmp_path / "s"), map_size=1 << 30, max_dbs=9)
    with plain.begin(write=True) as txn:
        txn.put(b"identity", identity().encode(), db=plain.open_db(b"_meta", txn=txn))
        plain.open_db(b"_undo", txn=txn)
    plain.close()
    store = ShardStore.open(tmp_path / "s", identity())
    assert whole(store.path, store.env)
    run_step([OwnedShard(store.path, identity())], 0, ROWS)
    assert whole(store.path, store.env)


def test_a_creation_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    for left in (0, 100, 4096):
        path = tmp_path / str(left)
        path.mkdir()
        (path / "data.mdb").write_bytes(b"\0" * left)
        assert ShardStore.create(path, identity()).identity == identity()


def test_what_a_killed_process_had_added_to_the_file_is_adopted(tmp_path: Path) -> None:
    (owned,) = make_shards(tmp_path, 1)
    run_step([owned], 0, {(1, b"a"): b"0"})
    size = (Path(owned.path) / "data.mdb").stat().st_size
    os.truncate(owned.path / "data.mdb", size + (1 << 20))
    store = ShardStore.open(owned.path)
    store.grow()
    assert store.env.info()["map_size"] >= size + (1 << 20)
    assert whole(store.path, store.env)
    child = start(die_inside, [owned])
    child.join()
    run_step([owned], 1, ROWS, attempt=1)
    assert whole(store.path, store.env)


def test_others_never_cut_off_what_a_writer_has_mapped(tmp_path: Path) -> None:
    """Before its commit a writer's pages lie beyond the size that LMDB has on record and that others would set."""
    (owned,) = make_shards(tmp_path, 1, map_size=64 << 10)
    opened, go = SPAWN.Event(), SPAWN.Event()
    early = start(read_often, owned, opened, go)
    assert opened.wait(30)
    store = ShardStore.open(owned.path)
    store.expect(len(ROWS), 8 << 20)
    with WorkerState(1, [owned], fence(0), [R]) as state:
        apply(state, ROWS)
        size = (owned.path / "data.mdb").stat().st_size
        go.set()
        late = start(read_often, owned, opened, go)
        late.join(30)
        early.join(30)
        assert [early.exitcode, late.exitcode] == [0, 0]
        assert (owned.path / "data.mdb").stat().st_size >= size
        state.commit()
    stored = dump(store)[b"op.t"]
    assert sorted(value for _, value in stored) == sorted(ROWS.values())


@pytest.mark.parametrize("how", ["allocation is not supported", "blocks are not rewritten in place"])
def test_other_file_systems_do_without_writing_into_the_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "allocation is not supported":
        monkeypatch.setattr(mapping, "_allocate", lambda file, size: False)
    else:
        monkeypatch.setattr(mapping, "_IN_PLACE", {"minix"})
    (owned,) = make_shards(tmp_path, 1)
    store = ShardStore.open(owned.path)
    assert not store.env.flags()["writemap"]
    run_step([owned], 0, ROWS)
    assert sorted(value for _, value in dump(store)[b"op.t"]) == sorted(ROWS.values())
    store.close()
    assert sorted(value for _, value in dump(ShardStore.open(owned.path))[b"op.t"]) == sorted(ROWS.values())


def test_a_file_that_cannot_be_allocated_is_told() -> None:
    file = os.open("/proc/self/comm", os.O_RDWR)
    try:
        assert not mapping._allocate(file, 4096)
    finally:
        os.close(file)


def test_what_another_has_written_meanwhile_stays_where_nothing_can_be_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Libc:
        @staticmethod
        def fallocate(*_: Any) -> int:
            with (tmp_path / "data.mdb").open("ab") as other:
                other.write(b"committed")
            ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

    monkeypatch.setattr(mapping, "_LIBC", Libc)
    with (tmp_path / "data.mdb").open("wb") as file:
        assert not mapping._allocate(file.fileno(), 4096)
    assert (tmp_path / "data.mdb").read_bytes() == b"committed"


def test_a_map_that_found_no_room_is_as_before_and_gives_back_what_it_took(small_disk: Path) -> None:
    env = open_environment(_made(small_disk / "s"), MAP_SIZE, create=True)
    free = os.statvfs(small_disk).f_bavail
    with pytest.raises(OSError, match="No space"):
        remap(env, small_disk / "s", 1 << 30)
    assert os.statvfs(small_disk).f_bavail >= free - 16
    assert whole(small_disk / "s", env)
    env.close()


def test_a_disk_that_is_full_before_during_and_after(small_disk: Path) -> None:
    """All in a process of its own: what is tested for is that it is not killed."""
    outcome = SPAWN.Queue()
    child = start(fill_small_disk, small_disk, ROWS, outcome)
    child.join(60)
    assert child.exitcode == 0
    told = outcome.get(timeout=5)
    assert told == [
        "creating: StorageFullError",
        "writing: StorageFullError, as before",
        "reading: as before",
    ]
    store = ShardStore.open(small_disk / "s")
    assert sorted(value for _, value in dump(store)[b"op.t"]) == sorted(ROWS.values())
    with write_transaction(store) as txn:
        txn.put(b"more", b"x" * 100_000, db=store.env.open_db(b"elsewhere", txn=txn))
    store.close()


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    disk, image = tmp_path / "disk", tmp_path / "image"
    disk.mkdir()
    if request.param == "tmpfs":
        mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)]
    else:
        image.touch()
        os.truncate(image, 24 << 20)
        mount = ["sh", "-c", f"mkfs.ext4 -q '{image}' && mount -o loop '{image}' '{disk}'"]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def _made(path: Path) -> Path:
    path.mkdir()
    return path
