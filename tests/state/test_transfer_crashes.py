"""A process killed while state moves: whoever tries again ends with all of it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from shard_helpers import identity
from shard_processes import start
from transfer_helpers import content
from transfer_process import LAST, ROWS, copy, move, prepare

from anabranch import crash
from anabranch.state import copying, removal, transaction, transfer
from anabranch.state.removal import drop_shard


@pytest.mark.parametrize(
    ("point", "passage", "action"),
    [
        (transfer.COLLECTED, 1, move),
        (transfer.COLLECTED, 2, move),
        (transaction.ACQUIRED, 1, move),
        (transaction.ACQUIRED, 2, move),
        (copying.FILLED, 1, copy),
        (copying.FILLED, 2, copy),
        (transaction.ACQUIRED, 1, copy),
        (transaction.ACQUIRED, 2, copy),
    ],
)
def test_a_move_that_was_cut_short_is_made_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    passage: int,
    action: Callable[[Path, int], None],
) -> None:
    prepare(tmp_path)
    die(point, passage, action, tmp_path, monkeypatch)
    assert content(tmp_path / "old") == ROWS
    action(tmp_path, 1)
    assert content(tmp_path / "new") == {**ROWS, **LAST}


def test_a_store_that_was_being_dropped_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path)
    die(removal.RENAMED, 1, move, tmp_path, monkeypatch)
    assert content(tmp_path / "new") == {**ROWS, **LAST}
    assert not (tmp_path / "old").exists()
    assert [path.name[:12] for path in tmp_path.glob("old~*")] == ["old~dropped-"]
    # Whoever drops it again finishes that.
    assert drop_shard(tmp_path / "old", identity()) == 0
    assert list(tmp_path.glob("old~*")) == []


def die(
    point: str,
    passage: int,
    action: Callable[[Path, int], None],
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = root.with_name(f"{root.name}-left")
    left.mkdir()
    for number in range(passage):
        (left / str(number)).touch()
    monkeypatch.setenv(crash.VARIABLE, f"{point}={left}")
    child = start(action, root, 0)
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
