"""Killed at every point of a write, a storage has the whole file or none, and the next writer gets on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch import crash
from anabranch.storage import Storage, open_storage, record

WRITER = """
import sys
from anabranch import crash
from anabranch.storage import open_storage, record
crash.declare_write("here", "a test writes")
getattr(record, sys.argv[2])(open_storage(sys.argv[1]), "f/r", {"new": "x" * 5000}, point="here")
"""


def written(storage: Storage, kind: str, armed: str) -> int:
    env = {**os.environ, crash.VARIABLE: armed}
    return subprocess.run([sys.executable, "-c", WRITER, storage.url, kind], env=env, check=False).returncode


@pytest.mark.parametrize("where", ["local", "s3"])
@pytest.mark.parametrize("kind", ["create", "replace"])
@pytest.mark.parametrize("when", ["before", "torn", "after"])
def test_a_killed_writer(
    request: pytest.FixtureRequest, tmp_path: Path, where: str, kind: str, when: str
) -> None:
    url = str(tmp_path / "root") if where == "local" else request.getfixturevalue("object_url")
    storage = open_storage(url)
    old = {"old": 1} if kind == "replace" else None
    if old is not None:
        record.replace(storage, "f/r", old)
    left = tmp_path / "left"
    left.mkdir()
    (left / "once").touch()
    assert written(storage, kind, f"here.{when}={left}") == -signal.SIGKILL
    assert not any(left.iterdir())
    if when == "after":
        assert record.read(storage, "f/r") == {"new": "x" * 5000}
    elif old is not None:
        assert record.read(storage, "f/r") == old
    else:
        assert storage.list("f") == []
    if when != "after" or kind == "replace":
        getattr(record, kind)(storage, "f/r", {"new": "x" * 5000})
    storage.sweep("f")
    assert record.read(storage, "f/r") == {"new": "x" * 5000}
    assert storage.list("f") == ["r"]
    if where == "local":
        assert os.listdir(tmp_path / "root" / "f") == ["r"]
