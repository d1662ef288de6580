"""A process killed at every point of a checkpoint and of a restoration: the old set of versions, or the new one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_process import VALUES
from shard_helpers import fence
from test_checkpoints import Flow, content, on_disk, restored, rows

from anabranch import crash
from anabranch.state import pieces, restore, snapshot, versions
from anabranch.state.restore import restore_shards
from anabranch.state.survey import survey
from anabranch.state.versions import Versions
from anabranch.storage.local import LocalStorage

OURS = sorted(
    name
    for name in crash.POINTS
    if name.startswith(
        (pieces.WRITE + ".", versions.COMMIT + ".", "trim.", "restore.", snapshot.SHARD_READ, restore.FILLED)
    )
)


TIMES = {name: 5 if name.startswith(pieces.WRITE) else 3 for name in OURS} | {
    versions.TRIM_MANIFEST: 2,
    versions.TRIM_PIECE: 1,
    restore.FILLED: 2,
    restore.BETWEEN: 2,
    restore.PLACED: 2,
}
"""How often each point is reached before it fires: somewhere in the middle."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for each point, left by a process that was killed there."""
    root = tmp_path_factory.mktemp("killed")
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).parent / "checkpoint_process.py"),
            str(root),
            *(f"{name}={times}" for name, times in TIMES.items()),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert done.stdout.decode().split("\n")[:-1] == [f"{name} {-signal.SIGKILL}" for name in OURS], (
        done.stdout.decode(),
        done.stderr.decode(),
    )
    return root


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Flow:
    """What the process does, in this one."""
    flow = Flow(tmp_path_factory.mktemp("undisturbed"), 2, 1)
    for value in VALUES:
        flow.run(rows(1, 2, 200, value=value))
    return flow


def test_there_are_points() -> None:
    assert len(OURS) == 12


@pytest.mark.parametrize("point", OURS)
def test_killed_at_a_point(killed: Path, undisturbed: Flow, point: str) -> None:
    job = killed / point / "job"
    storage = LocalStorage(job / "checkpoints")
    there = Versions(storage)
    newest, problems = there.newest_usable()
    assert problems == []
    assert newest is not None
    said = int((job / "newest").read_text())
    assert said <= newest.version <= said + 1

    undisturbed.paths = [job / "h0" / path.name for path in undisturbed.paths]
    targets = restored(undisturbed, newest, incarnation=2)
    for target in targets:
        # At its place is a whole shard, old or restored, or nothing.
        assert survey(target.path, target.identity, []).state in ("foreign", "missing")
    assert restore_shards(storage, newest, targets, fence(newest.step, epoch=9)) == 3
    assert content(targets) == on_disk(undisturbed.states[newest.step])

    there.trim(1)
    assert there.list() == [newest.version]
    left = {str(path.relative_to(storage.local)) for path in storage.local.rglob("*") if path.is_file()}
    needed = {piece.path for piece in newest.pieces}
    named = needed | {f"{newest.version:09d}/manifest"}
    assert needed <= left
    assert all(int(name.split("/")[0]) > newest.version for name in left - named)
    assert not list((job / "h0").glob("*~*"))
