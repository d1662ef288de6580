"""Shards are written to disk in turn, and nothing hangs on it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from anabranch.state.writeback import PERIOD, Turns, begin_writing


@pytest.mark.parametrize("every", [0.01, 0.1, 1.7, 50.0])
@pytest.mark.parametrize("shards", [1, 16, 256])
def test_every_shard_has_its_turn_in_a_period_however_long_steps_last(every: float, shards: int) -> None:
    turns = Turns()
    assert turns.next(0.0, shards) == ()
    seen = []
    for number in range(1, int(PERIOD / every) + 2):
        seen += turns.next(number * every, shards)
    assert {*seen} == {*range(shards)}
    assert len(seen) <= shards + every * shards / PERIOD + 1


def test_nothing_is_written_twice_in_a_step() -> None:
    turns = Turns()
    turns.next(0.0, 4)
    assert sorted(turns.next(1000.0, 4)) == [0, 1, 2, 3]
    assert turns.next(1000.0, 4) == ()


def test_a_number_of_shards_that_changes_leaves_nobody_out_for_long() -> None:
    turns = Turns()
    turns.next(0.0, 4)
    turns.next(PERIOD / 2, 4)
    seen = [shard for tenth in range(1, 13) for shard in turns.next(PERIOD / 2 + tenth * PERIOD / 10, 8)]
    assert {*seen} == {*range(8)}


def settled() -> None:
    for thread in threading.enumerate():
        if thread.name == "anabranch-writeback":
            thread.join()


def test_a_store_that_is_there_or_gone(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"x" * 8192)
    begin_writing([])
    begin_writing([tmp_path / "gone", tmp_path])
    settled()
    assert (tmp_path / "data.mdb").read_bytes() == b"x" * 8192
