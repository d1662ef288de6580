"""Records: once, whole, or not at all."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import CorruptError, StorageFullError
from anabranch.log import record


def test_what_was_created_is_read(tmp_path: Path) -> None:
    payload = {"b": [1, None, "ünï"], "a": {"x": 1.5}, "n": 1 << 70}
    record.create(tmp_path / "r", payload)
    assert record.read(tmp_path / "r") == payload
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_a_record_is_created_once(tmp_path: Path) -> None:
    record.create(tmp_path / "r", 1)
    with pytest.raises(FileExistsError):
        record.create(tmp_path / "r", 2)
    assert record.read(tmp_path / "r") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


@pytest.mark.parametrize("durable", [True, False])
def test_replace(tmp_path: Path, durable: bool) -> None:
    for value in (1, {"two": 2}, [3]):
        record.replace(tmp_path / "r", value, durable=durable)
        assert record.read(tmp_path / "r") == value
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_a_missing_record(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        record.read(tmp_path / "r")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_bytes_are_never_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("record") / "r"
    record.create(path, {"step": 7, "slices": {"lines": [{"start": 0, "end": 10}]}})
    raw = bytearray(path.read_bytes())
    if data.draw(st.booleans(), "torn"):
        damaged = bytes(raw[: data.draw(st.integers(0, len(raw) - 1), "kept")])
    else:
        raw[data.draw(st.integers(0, len(raw) - 1), "at")] ^= data.draw(st.integers(1, 255), "bits")
        damaged = bytes(raw)
    path.write_bytes(damaged)
    with pytest.raises(CorruptError, match=str(path)):
        record.read(path)


CREATOR = """
import sys, pathlib
from anabranch.log import record
path = pathlib.Path(sys.argv[1])
sys.stdin.readline()
won = []
for number in range(40):
    try:
        record.create(path / str(number), {"by": sys.argv[2], "filler": "x" * 2000})
        won.append(number)
    except FileExistsError:
        pass
print(won)
"""


def test_of_two_processes_exactly_one_creates(tmp_path: Path) -> None:
    creators = [
        subprocess.Popen(
            [sys.executable, "-c", CREATOR, str(tmp_path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("first", "second")
    ]
    for creator in creators:
        assert creator.stdin is not None
        creator.stdin.write("go\n")
        creator.stdin.flush()
    won = [set(json.loads(creator.communicate(timeout=60)[0])) for creator in creators]
    assert won[0] | won[1] == set(range(40))
    assert not won[0] & won[1]
    for number in range(40):
        assert record.read(tmp_path / str(number))["by"] == ("first" if number in won[0] else "second")


def test_of_many_threads_exactly_one_creates(tmp_path: Path) -> None:
    # Threads share a process number, as do processes of two containers: names must not depend on it.
    winners: list[int] = []
    barrier = threading.Barrier(8)

    def create(thread: int) -> None:
        barrier.wait()
        try:
            record.create(tmp_path / "r", {"by": thread})
        except FileExistsError:
            return
        winners.append(thread)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(winners) == 1
    assert record.read(tmp_path / "r") == {"by": winners[0]}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    record.replace(tmp_path / "old", 1)

    def full(descriptor: int) -> None:
        raise OSError(code, "no room")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFullError, match=r"new: the disk is full"):
        record.create(tmp_path / "new", 1)
    with pytest.raises(StorageFullError, match=r"old: the disk is full"):
        record.replace(tmp_path / "old", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert record.read(tmp_path / "old") == 1


def test_other_errors_are_themselves(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        record.create(tmp_path / "no" / "such", 1)
