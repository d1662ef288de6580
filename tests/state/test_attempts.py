"""Attempts of one step at the same time, and deaths, in real processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from shard_helpers import R, dump_all, make_shards, run_step
from shard_processes import SPAWN, die_inside, fill_disk, hold_lock, run_steps, start, write_late

from anabranch.state.store import ShardStore
from anabranch.state.transaction import marker_of
from anabranch.state.worker import OwnedShard


@pytest.fixture
def owned(tmp_path: Path) -> list[OwnedShard]:
    owned = make_shards(tmp_path, 1)
    run_step(owned, 0, {(1, b"a"): b"0"})
    return owned


def values(owned: list[OwnedShard]) -> list[bytes]:
    return [v for entries in dump_all(owned, meta=False) for _, v in entries.get(b"op.t", [])]


def test_a_zombie_in_another_process_is_fenced(owned: list[OwnedShard]) -> None:
    opened, go, outcome = SPAWN.Event(), SPAWN.Event(), SPAWN.Queue()
    child = start(write_late, owned, opened, go, outcome)
    assert opened.wait(30)
    run_step(owned, 1, {(1, b"a"): b"new"}, attempt=1)
    before = dump_all(owned)
    go.set()
    assert "comes too late" in outcome.get(timeout=30)
    child.join()
    assert dump_all(owned) == before


def test_an_attempt_that_waits_for_an_older_one_undoes_it(owned: list[OwnedShard]) -> None:
    holding, go = SPAWN.Event(), SPAWN.Event()
    child = start(hold_lock, owned, holding, go)
    assert holding.wait(30)
    go.set()
    run_step(owned, 1, {(1, b"a"): b"second"}, attempt=1)
    child.join()
    assert child.exitcode == 0
    assert values(owned) == [b"second"]


def test_a_process_killed_inside_a_transaction_leaves_the_shard_as_it_was(owned: list[OwnedShard]) -> None:
    before = dump_all(owned)
    child = start(die_inside, owned)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert dump_all(owned) == before
    run_step(owned, 1, {(1, b"a"): b"1"}, attempt=1)
    assert values(owned) == [b"1"]


def test_two_attempts_over_many_shards_at_once_end_as_the_newer(tmp_path: Path) -> None:
    owned = make_shards(tmp_path, 5)
    ready, go = SPAWN.Semaphore(0), SPAWN.Event()
    children = [start(run_steps, owned, attempt, 25, ready, go) for attempt in (0, 1)]
    for _ in children:
        assert ready.acquire(timeout=30)
    go.set()
    for child in children:
        child.join(30)
        assert child.exitcode == 0
    assert values(owned) == [b"step 24 attempt 1"] * 5
    assert [marker_of(ShardStore.open(o.path), R) for o in owned] == [24] * 5


def test_a_full_disk_is_named_and_the_step_rolled_back(owned: list[OwnedShard]) -> None:
    outcome = SPAWN.Queue()
    child = start(fill_disk, owned, 4 << 20, outcome)
    kind, message, as_before = outcome.get(timeout=60)
    child.join()
    assert kind == "StorageFullError", message
    assert str(owned[0].path) in message
    assert "bytes free" in message
    assert as_before
    assert child.exitcode == 0
    assert values(owned) == [b"0", b"small"]
