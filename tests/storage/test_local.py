"""What is particular to a local disk: temporary names, folders, a full disk."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from anabranch.errors import ConfigError, StorageFullError
from anabranch.storage import open_storage
from anabranch.storage.local import LocalStorage


def test_paths_and_file_urls_are_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    at = tmp_path / "a b"
    for where in (
        at,
        str(at),
        "a b",
        "./a b/",
        at.as_uri(),
        f"file://localhost{str(at).replace(' ', '%20')}",
    ):
        storage = open_storage(where)
        assert storage.url == str(at)
        assert storage.local == at
    assert not at.exists()


@pytest.mark.parametrize("where", ["ftp://host/x", "file://elsewhere/x", "memory:///", "hdfs://x"])
def test_other_urls_are_refused(where: str) -> None:
    with pytest.raises(ConfigError, match=where.split(":")[0]):
        open_storage(where)


def test_leftovers_of_killed_writers_are_not_seen_and_can_be_swept(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    storage.create("f/a", b"1")
    (tmp_path / "f" / ".a.0123.tmp").write_bytes(b"half")
    assert storage.list("f") == ["a"]
    storage.sweep("f")
    storage.sweep("no")
    assert os.listdir(tmp_path / "f") == ["a"]


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "root")
    storage.create("f/g/a", b"1")
    shutil.rmtree(tmp_path / "root")
    storage.create("f/g/a", b"2")
    storage.replace("f/b", b"3")
    assert storage.list("f") == ["b", "g/"]


def test_every_new_folder_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    open_storage(tmp_path / "p" / "root").create("f/g/a", b"1")
    folders = [Path(name) for name in synced if Path(name).is_dir()]
    root = tmp_path / "p" / "root"
    assert set(folders) == {tmp_path, tmp_path / "p", root, root / "f", root / "f" / "g"}
    assert folders[-1] == root / "f" / "g"
    synced.clear()
    open_storage(root).create("f/g/b", b"1")
    assert len(synced) == 2


def test_rename_takes_the_place(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("s/a", b"new")
    storage.create("a", b"old")
    storage.rename("s/a", "a")
    storage.sync()
    storage.sync("s")
    assert storage.read("a") == b"new"
    assert storage.list("s") == []
    with pytest.raises(FileNotFoundError):
        storage.rename("s/a", "a")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    storage = open_storage(tmp_path)
    storage.replace("old", b"1")

    def full(descriptor: int) -> None:
        raise OSError(code, "no room")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFullError, match=r"new: the disk is full"):
        storage.create("new", b"1")
    with pytest.raises(StorageFullError, match=r"old: the disk is full"):
        storage.replace("old", b"2")
    assert os.listdir(tmp_path) == ["old"]
    assert storage.read("old") == b"1"
