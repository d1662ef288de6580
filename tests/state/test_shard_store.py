"""Shards: made on purpose, opened only as themselves, growing by themselves."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import pytest
from shard_helpers import dump, fence, identity, make_shards, run_step
from shard_processes import grow_map, start

from anabranch.errors import CorruptError, EngineError, ShardMismatch
from anabranch.model.ids import HostId, ShardId
from anabranch.state import store as store_module
from anabranch.state.boot import current_boot_id
from anabranch.state.environments import SECONDS, OpenEnvironments
from anabranch.state.identity import ShardIdentity, decode_fence, encode_fence
from anabranch.state.store import ShardStore, shard_path
from anabranch.state.worker import OwnedShard


def test_a_missing_shard_is_named_and_not_made(tmp_path: Path) -> None:
    path = shard_path(tmp_path, ShardId(7))
    with pytest.raises(ShardMismatch, match="shard-00007"):
        ShardStore.open(path, identity(7, 8))
    assert not path.exists()


@pytest.mark.parametrize(
    "changes",
    [{"job": "other"}, {"shard": 1}, {"of": 2}, {"incarnation": 3}, {"host": "x"}, {"hash_version": 2}],
)
def test_another_identity_is_refused_with_both_values(tmp_path: Path, changes: dict) -> None:
    ShardStore.create(tmp_path / "s", identity()).close()
    field, wanted = next(iter(changes.items()))
    expected = replace(identity(), **changes)
    found = getattr(identity(), field)
    with pytest.raises(ShardMismatch, match=f"{field}: expected {wanted!r}, found {found!r}"):
        ShardStore.open(tmp_path / "s", expected)
    assert ShardStore.open(tmp_path / "s", identity()).identity == identity()
    with pytest.raises(ShardMismatch, match=field):
        ShardStore.create(tmp_path / "s", expected)


def test_creating_again_is_allowed_only_while_empty(tmp_path: Path) -> None:
    (owned,) = make_shards(tmp_path, 1)
    ShardStore.create(owned.path, owned.identity)
    run_step([owned], 0, {(1, b"k"): b"v"})
    before = dump(ShardStore.open(owned.path))
    with pytest.raises(ShardMismatch, match="already holds state"):
        ShardStore.create(owned.path, owned.identity)
    assert dump(ShardStore.open(owned.path)) == before


def test_a_shard_whose_creation_was_cut_short_is_refused_and_can_be_created(tmp_path: Path) -> None:
    lmdb.open(str(tmp_path / "s")).close()
    with pytest.raises(ShardMismatch, match="cut short"):
        ShardStore.open(tmp_path / "s")
    assert ShardStore.create(tmp_path / "s", identity()).identity == identity()


def test_a_shard_that_is_an_empty_file_is_refused_and_can_be_ensured(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "data.mdb").touch()
    with pytest.raises(ShardMismatch, match="cut short"):
        ShardStore.open(tmp_path / "s", identity())
    assert ShardStore.ensure(tmp_path / "s", identity()).identity == identity()


def test_a_directory_made_again_is_not_served_from_the_cache(tmp_path: Path) -> None:
    (owned,) = make_shards(tmp_path, 1)
    run_step([owned], 0, {(1, b"k"): b"v"})
    assert b"op.t" in dump(ShardStore.open(owned.path))
    shutil.rmtree(owned.path)
    with pytest.raises(ShardMismatch, match="found none"):
        ShardStore.open(owned.path, owned.identity)
    ShardStore.create(owned.path, owned.identity)
    assert b"op.t" not in dump(ShardStore.open(owned.path))

    # Replaced behind the cache's back, by another process.
    stale = ShardStore.open(owned.path)
    ShardStore.create(tmp_path / "new", replace(owned.identity, host=HostId("new"))).close()
    shutil.rmtree(owned.path)
    (tmp_path / "new").rename(owned.path)
    fresh = ShardStore.open(owned.path)
    assert fresh is not stale
    assert fresh.identity.host == "new"


@pytest.mark.parametrize("replaced", [False, True])
def test_a_shard_that_is_removed_while_it_is_opened_is_refused_and_not_kept_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    path, new = tmp_path / "s", tmp_path / "new"
    ShardStore.create(path, identity()).close()
    ShardStore.create(new, identity(incarnation=1)).close()
    opened = store_module.open_environment

    def open_and_remove(where: Path, map_size: int, *, create: bool) -> lmdb.Environment:
        env = opened(where, map_size, create=create)
        path.rename(tmp_path / "gone")
        if replaced:
            new.rename(path)
        return env

    with monkeypatch.context() as patched:
        patched.setattr(store_module, "open_environment", open_and_remove)
        with pytest.raises(ShardMismatch, match="has removed it"):
            ShardStore.open(path, identity())
    assert ShardStore.open(tmp_path / "gone").identity == identity()
    found = ShardStore.open(path) if replaced else ShardStore.create(path, identity(incarnation=1))
    assert found.identity == identity(incarnation=1)


def test_a_shard_that_is_removed_before_lmdb_opens_it_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    ShardStore.create(path, identity()).close()
    opened = lmdb.open

    def remove_and_open(*where: Any, **how: Any) -> lmdb.Environment:
        path.rename(tmp_path / "gone")
        return opened(*where, **how)

    monkeypatch.setattr(lmdb, "open", remove_and_open)
    with pytest.raises(EngineError, match="No such file"):
        ShardStore.open(path, identity())
    assert not path.exists()


def test_open_returns_the_one_object_of_the_process(tmp_path: Path) -> None:
    made = ShardStore.create(tmp_path / "s", identity())
    assert ShardStore.open(tmp_path / "s") is made
    assert ShardStore.open(os.path.relpath(tmp_path / "s")) is made


class _Environment:
    closed = False

    def close(self) -> None:
        self.closed = True


class _Store:
    def __init__(self, writing: bool = False) -> None:
        self.env = _Environment()
        self.writing = writing


def test_the_least_recently_used_is_closed_unless_it_is_written(tmp_path: Path) -> None:
    cache: OpenEnvironments[_Store] = OpenEnvironments(limit=2)
    stores = {name: _Store(writing=name == "a") for name in "abcd"}
    for name, store in stores.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.mdb").touch()
        cache.remember(str(tmp_path / name), store)
        cache.find(str(tmp_path / "b"))
    assert [name for name, store in stores.items() if store.env.closed] == ["b", "c"]
    assert cache.find(str(tmp_path / "a")) is stores["a"]
    assert len(cache) == 2


def test_stores_whose_files_are_gone_are_closed_in_time_unless_they_are_written(tmp_path: Path) -> None:
    now = 100.0
    cache: OpenEnvironments[_Store] = OpenEnvironments(clock=lambda: now)
    stores = {name: _Store() for name in ("stays", "dropped", "replaced", "written")}
    for name, store in stores.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.mdb").touch()
        cache.remember(str(tmp_path / name), store)

    def closed() -> list[str]:
        assert cache.find(str(tmp_path / "stays")) is stores["stays"]
        return [name for name, store in stores.items() if store.env.closed]

    now += SECONDS
    assert closed() == []
    for name in ("dropped", "replaced", "written"):
        (tmp_path / name).rename(tmp_path / f"{name}~dropped")
    (tmp_path / "replaced").mkdir()
    (tmp_path / "replaced" / "data.mdb").touch()
    stores["written"].writing = True
    now += SECONDS / 2
    assert closed() == []
    now += SECONDS / 2
    assert closed() == ["dropped", "replaced"]
    stores["written"].writing = False
    now += SECONDS
    assert closed() == ["dropped", "replaced", "written"]
    assert len(cache) == 1


def test_the_file_of_a_store_that_is_gone_outlives_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no new store gets its inode before LMDB has forgotten it, and no step waits until the kernel has freed it."""
    freed, may_free, close = threading.Event(), threading.Event(), os.close

    def slowly(descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert may_free.wait(30)
            assert os.fstat(descriptor).st_ino == inode
            freed.set()
        close(descriptor)

    monkeypatch.setattr(os, "close", slowly)
    path = tmp_path / "s"
    ShardStore.create(path, identity())
    inode = (path / "data.mdb").stat().st_ino
    shutil.rmtree(path)
    ShardStore.forget(path)
    for _ in range(4):
        ShardStore.create(path, identity()).close()
        assert (path / "data.mdb").stat().st_ino != inode
        shutil.rmtree(path)
    may_free.set()
    assert freed.wait(30)


@pytest.mark.parametrize("write", [False, True])
def test_a_map_grown_by_another_process_is_adopted(tmp_path: Path, write: bool) -> None:
    store = ShardStore.create(tmp_path / "s", identity(), map_size=256 << 10)
    with store.begin(write=True):
        pass
    child = start(grow_map, tmp_path / "s", 8 << 20)
    child.join()
    assert child.exitcode == 0
    with pytest.raises(lmdb.MapResizedError):
        store.env.begin()
    with store.begin(write=write) as txn:
        assert len(txn.get(b"big", db=store.env.open_db(b"elsewhere", txn=txn))) == 8 << 20
    run_step([OwnedShard(store.path, identity())], 0, {(1, b"k"): b"v"})


def test_a_forked_process_opens_for_itself(tmp_path: Path) -> None:
    store = ShardStore.create(tmp_path / "s", identity())
    pid = os.fork()
    if pid == 0:
        try:
            run_step([OwnedShard(tmp_path / "s", identity())], 0, {(1, b"k"): b"child"})
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert b"op.t" in dump(store)
    run_step([OwnedShard(store.path, identity())], 1, {(1, b"k"): b"parent"})


def test_stamps_tell_what_may_have_been_lost(tmp_path: Path) -> None:
    (owned,) = make_shards(tmp_path, 1)
    store = ShardStore.open(owned.path)
    assert store.boot_id() == current_boot_id()
    assert store.trusted(current_boot_id())
    assert not store.trusted("next boot")

    run_step([owned], 0, {(1, b"k"): b"v"})
    store.stamp_clean(current_boot_id())
    assert store.trusted("next boot")

    run_step([owned], 1, {(1, b"k"): b"w"})
    assert not store.trusted("next boot")
    store.stamp("next boot")
    assert store.trusted("next boot")

    (store.path / "stamp.json").write_text("{torn")
    assert store.boot_id() is None
    assert not store.trusted(current_boot_id())


def test_identity_and_fence_survive_encoding_and_damage_is_told() -> None:
    assert ShardIdentity.decode(identity(3, 9).encode()) == identity(3, 9)
    assert decode_fence(encode_fence(fence(5, 2, 1))) == fence(5, 2, 1)
    for damaged in (b"", b"\x01", b"\x80", b"\xc1"):
        with pytest.raises(CorruptError):
            ShardIdentity.decode(damaged)
        with pytest.raises(CorruptError):
            decode_fence(damaged)


def test_a_file_that_is_no_lmdb_is_told_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "data.mdb").write_bytes(b"not lmdb" * 4096)
    with pytest.raises(EngineError, match=str(tmp_path / "s")):
        ShardStore.open(tmp_path / "s")


class _Panicking:
    closed = False

    def info(self) -> dict[str, int]:
        return {"last_pgno": 0, "map_size": 1 << 20}

    def begin(self, *, write: bool) -> None:
        raise lmdb.PanicError("mdb_txn_begin")

    def close(self) -> None:
        self.closed = True


def test_a_handle_that_lmdb_gave_up_is_opened_anew(tmp_path: Path) -> None:
    store = ShardStore.create(tmp_path / "s", identity())
    real, store.env = store.env, _Panicking()
    with pytest.raises(EngineError, match="mdb_txn_begin"):
        store.begin(write=True)
    assert store.env.closed
    real.close()
    assert ShardStore.open(tmp_path / "s") is not store
