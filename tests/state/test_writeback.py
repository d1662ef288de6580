"""Shards are written to disk in turn, and nothing hangs on it."""

from __future__ import annotations

import threading
from pathlib import Path

from anabranch.state.writeback import PERIOD, Turns, begin_writing


def test_every_shard_has_its_turn_in_a_period() -> None:
    turns = Turns()
    shards = 16
    steps = [turns.next(number * 0.1, shards) for number in range(1, int(10 * PERIOD) + 1)]
    seen = [turn % shards for turn in steps if turn is not None]
    assert sorted(set(seen)) == [*range(shards)]
    assert len(seen) <= shards + 1


def test_few_steps_have_few_turns() -> None:
    turns = Turns()
    assert turns.next(5.0, 1000) is not None
    assert turns.next(5.0, 1000) is None


def settled() -> None:
    for thread in threading.enumerate():
        if thread.name == "anabranch-writeback":
            thread.join()


def test_a_store_that_is_there_or_gone(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"x" * 8192)
    begin_writing(tmp_path)
    begin_writing(tmp_path / "gone")
    settled()
    assert (tmp_path / "data.mdb").read_bytes() == b"x" * 8192
