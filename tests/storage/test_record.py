"""Records: once, whole, or not at all."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import CorruptError, StorageFullError
from anabranch.storage import open_storage, record


def test_what_was_created_is_read(tmp_path: Path) -> None:
    payload = {"b": [1, None, "ünï"], "a": {"x": 1.5}, "n": 1 << 70}
    record.create(open_storage(tmp_path), "r", payload)
    assert record.read(open_storage(tmp_path), "r") == payload
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_a_record_is_created_once(tmp_path: Path) -> None:
    record.create(open_storage(tmp_path), "r", 1)
    with pytest.raises(FileExistsError):
        record.create(open_storage(tmp_path), "r", 2)
    assert record.read(open_storage(tmp_path), "r") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


@pytest.mark.parametrize("durable", [True, False])
def test_replace(tmp_path: Path, durable: bool) -> None:
    for value in (1, {"two": 2}, [3]):
        record.replace(open_storage(tmp_path), "r", value, durable=durable)
        assert record.read(open_storage(tmp_path), "r") == value
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_a_missing_record(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        record.read(open_storage(tmp_path), "r")


@settings(max_examples=60)
@given(st.data())
def test_damaged_bytes_are_never_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("record") / "r"
    record.create(open_storage(path.parent), "r", {"step": 7, "slices": {"lines": [{"start": 0, "end": 10}]}})
    raw = bytearray(path.read_bytes())
    if data.draw(st.booleans(), "torn"):
        damaged = bytes(raw[: data.draw(st.integers(0, len(raw) - 1), "kept")])
    else:
        raw[data.draw(st.integers(0, len(raw) - 1), "at")] ^= data.draw(st.integers(1, 255), "bits")
        damaged = bytes(raw)
    path.write_bytes(damaged)
    with pytest.raises(CorruptError, match=str(path)):
        record.read(open_storage(path.parent), "r")


CREATOR = """
import sys
from anabranch.storage import open_storage, record
storage = open_storage(sys.argv[1])
sys.stdin.readline()
won = []
for number in range(40):
    try:
        record.create(storage, str(number), {"by": sys.argv[2], "filler": "x" * 2000})
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
        assert record.read(open_storage(tmp_path), str(number))["by"] == (
            "first" if number in won[0] else "second"
        )


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    record.replace(open_storage(tmp_path), "old", 1)

    def full(descriptor: int) -> None:
        raise OSError(code, "no room")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFullError, match=r"new: the disk is full"):
        record.create(open_storage(tmp_path), "new", 1)
    with pytest.raises(StorageFullError, match=r"old: the disk is full"):
        record.replace(open_storage(tmp_path), "old", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert record.read(open_storage(tmp_path), "old") == 1
