"""What tests run in other processes.  Imports little: every process imports it anew."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from shard_helpers import R, apply, dump_all, fence, identity, run_step

from anabranch.errors import AnabranchError, Fenced
from anabranch.state.mapping import remap
from anabranch.state.removal import sweep_host
from anabranch.state.store import ShardStore
from anabranch.state.transaction import StageTransaction, write_transaction
from anabranch.state.worker import OwnedShard, WorkerState

SPAWN = multiprocessing.get_context("spawn")


def start(target: Callable[..., None], *args: Any) -> BaseProcess:
    child = SPAWN.Process(target=target, args=args)
    child.start()
    return child


def grow_map(path: Path, size: int) -> None:
    store = ShardStore.open(path)
    store.expect(1, size)
    with write_transaction(store) as txn:
        txn.put(b"big", b"x" * size, db=store.env.open_db(b"elsewhere", txn=txn))


def write_late(owned: list[OwnedShard], opened: Any, go: Any, outcome: Any) -> None:
    """A zombie: its shard is open, but it begins only after a newer attempt has committed."""
    ShardStore.open(owned[0].path)
    opened.set()
    go.wait(30)
    try:
        run_step(owned, 1, {(1, b"a"): b"zombie", (2, b"z"): b"zombie"})
        outcome.put("committed")
    except Fenced as error:
        outcome.put(str(error))


def hold_lock(owned: list[OwnedShard], holding: Any, go: Any) -> None:
    with WorkerState(len(owned), owned, fence(1), [R]) as state:
        apply(state, {(1, b"a"): b"first", (2, b"only first"): b"1"})
        holding.set()
        go.wait(30)
        state.commit()


def die_inside(owned: list[OwnedShard]) -> None:
    transaction = StageTransaction(ShardStore.open(owned[0].path), fence(1), [R])
    rows: list[tuple[bytes, bytes]] = [(b"a", b"torn"), (b"b", b"torn" * 10_000)]
    addresses = [b"\0" * 7 + b"\1\0" + key for key, _ in rows]
    transaction.put(R, "op.t", addresses, [value for _, value in rows], [b"0", None], False)
    transaction.prepare()
    os.kill(os.getpid(), signal.SIGKILL)


def run_steps(owned: list[OwnedShard], attempt: int, steps: int, ready: Any, go: Any) -> None:
    """Steps over all shards, in an order of calls that depends on the attempt."""
    ready.release()
    go.wait(30)
    for step in range(steps):
        try:
            with WorkerState(len(owned), owned, fence(step, attempt), [R]) as state:
                for shard in range(len(owned))[:: 1 if attempt else -1]:
                    key = (shard << 64) // len(owned) + 1
                    apply(state, {(key, b"k"): b"step %d attempt %d" % (step, attempt)})
                state.commit()
        except Fenced:
            continue


def fill_disk(owned: list[OwnedShard], limit: int, outcome: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    before = dump_all(owned)
    try:
        run_step(owned, 1, {(n, b"k"): os.urandom(1000) for n in range(1, 20_000)})
        outcome.put(("committed", "", False))
    except AnabranchError as error:
        outcome.put((type(error).__name__, str(error), dump_all(owned) == before))
    # The shard is usable at once, as long as there is room for what is written.
    run_step(owned, 1, {(1, b"k"): b"small"}, attempt=1)


def read_often(owned: OwnedShard, opened: Any, go: Any) -> None:
    """Opens the shard, and maps it anew, while another process writes there."""
    store = ShardStore.open(owned.path, owned.identity)
    opened.set()
    go.wait(30)
    before = dump_all([owned])
    remap(store.env, store.path)
    store.close()
    assert dump_all([owned]) == before


def fill_small_disk(disk: Path, rows: dict[tuple[int, bytes], bytes | None], outcome: Any) -> None:
    """A disk that is full when a shard is made, when it grows, and while it is read."""
    told: list[str] = []
    owned = [OwnedShard(disk / "s", identity())]
    _fill(disk / "junk")
    try:
        ShardStore.create(disk / "s", identity())
    except AnabranchError as error:
        told.append(f"creating: {type(error).__name__}")
    (disk / "junk").unlink()
    ShardStore.create(disk / "s", identity())
    run_step(owned, 0, {(1, b"k"): b"small"})
    before = dump_all(owned)
    _fill(disk / "junk")
    try:
        run_step(owned, 1, rows)
    except AnabranchError as error:
        told.append(
            f"writing: {type(error).__name__}, {'as before' if dump_all(owned) == before else 'changed'}"
        )
    ShardStore.open(disk / "s").close()
    told.append(f"reading: {'as before' if dump_all(owned) == before else 'changed'}")
    run_step(owned, 1, {(1, b"k"): b"fits"}, attempt=1)
    (disk / "junk").unlink()
    run_step(owned, 1, {(1, b"k"): None, **rows}, attempt=2)
    outcome.put(told)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)


def sweep_beside(root: Path, ready: Any, outcome: Any) -> None:
    """Sweeps a host at the same time as others."""
    ready.wait(30)
    try:
        sweep_host(root, [], fence(1))
        outcome.put(None)
    except BaseException as error:
        outcome.put(repr(error))
        raise
