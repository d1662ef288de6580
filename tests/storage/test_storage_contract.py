"""What every storage promises, over each of them."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

import pytest

from anabranch.errors import ConfigError
from anabranch.storage import Storage, open_storage


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "s3":
        return open_storage(request.getfixturevalue("object_url"))
    return open_storage(tmp_path / "root")


def test_what_was_created_is_read(storage: Storage) -> None:
    storage.create("a/b/c", b"one")
    storage.create("d", b"")
    assert storage.read("a/b/c") == b"one"
    assert storage.read("d") == b""
    assert storage.size("a/b/c") == 3
    assert storage.size("d") == 0
    assert storage.exists("d")


def test_a_name_is_created_once(storage: Storage) -> None:
    storage.create("a", b"one")
    for data in (b"two", b"one"):
        with pytest.raises(FileExistsError):
            storage.create("a", data)
    assert storage.read("a") == b"one"
    assert storage.list() == ["a"]


@pytest.mark.parametrize("durable", [True, False])
def test_replace(storage: Storage, durable: bool) -> None:
    for data in (b"one", b"", memoryview(b"three")):
        storage.replace("f/a", data, durable)
        assert storage.read("f/a") == data
    assert storage.list("f") == ["a"]
    with pytest.raises(FileExistsError):
        storage.create("f/a", b"new")


def test_what_is_absent(storage: Storage) -> None:
    storage.create("file", b"x")
    for name in ("no", "no/such", "file/below"):
        with pytest.raises(FileNotFoundError):
            storage.read(name)
        with pytest.raises(FileNotFoundError):
            storage.size(name)
        assert not storage.exists(name)
        storage.delete(name)
        assert storage.list(name) == []
    assert storage.list() == ["file"]


def test_delete_and_create_again(storage: Storage) -> None:
    storage.create("f/a", b"one")
    storage.delete("f/a")
    assert not storage.exists("f/a")
    assert storage.list("f") == []
    storage.create("f/a", b"two")
    assert storage.read("f/a") == b"two"


def test_list_is_sorted_and_one_level_deep(storage: Storage) -> None:
    names = ["b", "a", "f/x", "f/g/y", "fx", "é ü", "a+b", "sixty%20"]
    for name in names:
        storage.create(name, b"")
    assert storage.list() == sorted(["b", "a", "f/", "fx", "é ü", "a+b", "sixty%20"])
    assert storage.list("f") == ["g/", "x"]
    assert storage.list("f/g") == ["y"]
    assert not storage.exists("f")


def test_list_after_a_name(storage: Storage) -> None:
    names = ["a", "b", "c/x", "c/y", "d", "é"]
    for name in names:
        storage.create(f"f/{name}", b"")
    for after in ("", "a", "b", "bb", "c/", "d", "é", "zz"):
        assert storage.list("f", after) == [n for n in ["a", "b", "c/", "d", "é"] if n > after]


def test_the_beginning_of_a_file(storage: Storage) -> None:
    storage.create("a", b"12345")
    assert storage.read("a", 2) == b"12"
    assert storage.read("a", 9) == b"12345"
    with pytest.raises(FileNotFoundError):
        storage.read("b", 2)


def test_many_are_deleted_at_once(storage: Storage) -> None:
    for name in ("f/a", "f/b", "c"):
        storage.create(name, b"")
    storage.delete("f/a", "no", "f/b", "c")
    storage.delete()
    storage.prune("f")
    storage.prune("no")
    assert storage.list() == []


def test_a_folder_that_holds_something_is_not_pruned(storage: Storage) -> None:
    storage.create("f/a", b"")
    storage.prune("f")
    assert storage.list() == ["f/"]


def test_children_are_rooted_in_folders(storage: Storage) -> None:
    child = storage.child("a", "b")
    child.create("c", b"1")
    assert storage.read("a/b/c") == b"1"
    assert child == storage.child("a").child("b")
    assert child.list() == ["c"]
    assert child.url == storage.where("a/b")
    assert child.where("c") == storage.where("a/b/c")
    assert open_storage(child.url).read("c") == b"1"


def test_storages_travel(storage: Storage) -> None:
    storage.create("a", b"1")
    travelled: Storage = pickle.loads(pickle.dumps(storage.child("f")))
    travelled.create("b", b"2")
    assert travelled == storage.child("f")
    assert travelled.url == storage.child("f").url
    assert storage.read("f/b") == b"2"


@pytest.mark.parametrize("name", ["../a", "a/../b", "/a", "a//b", "a/", ".", "a/."])
def test_names_stay_below_the_root(storage: Storage, name: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a name in a storage"):
        storage.create(name, b"")
    with pytest.raises(ConfigError, match=r"is not a name in a storage"):
        storage.child(name)


def test_of_many_threads_exactly_one_creates(storage: Storage) -> None:
    # Threads share a process number, as do processes of two containers: names must not depend on it.
    winners: list[int] = []
    barrier = threading.Barrier(6)

    def create(thread: int) -> None:
        barrier.wait()
        try:
            # The same bytes from all: whoever did not write them must be told so.
            storage.create("r", b"same" * 1000)
        except FileExistsError:
            return
        winners.append(thread)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(winners) == 1
    assert storage.read("r") == b"same" * 1000
    assert storage.list() == ["r"]


def test_a_large_file(storage: Storage) -> None:
    data = bytes(range(256)) * 4096 * 8
    storage.create("large", data)
    assert storage.read("large") == data
    assert storage.size("large") == len(data)
