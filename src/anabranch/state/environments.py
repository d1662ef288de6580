"""The open environments of this process.

LMDB forbids opening an environment twice in one process, and Spark runs task after task in one Python
process, so open stores are kept: 1,000 rows over 256 shards cost 10 ms with them open and 54 ms without.
An entry is valid only while the file at its path is still the file that was opened: a directory that was
deleted and made again has another inode (the old one cannot be reused while we hold it open).

A deleted file takes its disk space as long as a process has it open, so a host that gives shards away would free nothing.
Whoever opens a store, and every stage of a step, also one of a worker without shards, therefore has those that are gone
closed: all that are open are looked at, at most every few seconds (256 took 0.8 ms on a busy machine).  A process that gets
no task any more is ended by Spark, after a minute in which none of its pool got one.

Whoever closes a deleted file last waits until the kernel has freed its pages: 10 ms with 16 MB, 39 with 64, 110 to 170 with
256.  So a second descriptor of the file is closed on a thread, behind the environment.  Not the environment itself: while it
is being closed, its inode would be free and might be that of a new file, which LMDB takes for the one it still has open.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

LIMIT = 256
"""Kept open per process.  Each costs three file descriptors and address space, no memory to speak of."""
SECONDS = 5.0
"""Between two looks at whether the files of open stores are still there."""


class Cached(Protocol):
    env: Any
    writing: bool


T = TypeVar("T", bound=Cached)
Inode = tuple[int, int]


class OpenEnvironments(Generic[T]):
    """Least recently used first out; one with a write transaction open stays, beyond the limit if need be."""

    def __init__(self, limit: int = LIMIT, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._look_at = clock() + SECONDS
        """When to look next for files that are gone."""
        self._open: OrderedDict[str, tuple[Inode, T]] = OrderedDict()
        os.register_at_fork(after_in_child=self._forget_parents)

    def find(self, path: str) -> T | None:
        """The open store at this path, unless the files there are no longer the ones it has open."""
        self.forget_gone()
        entry = self._open.get(path)
        if entry is None:
            return None
        if entry[0] != _inode(path):
            self.forget(path)
            return None
        self._open.move_to_end(path)
        return entry[1]

    def remember(self, path: str, store: T, found: Inode | None = None) -> bool:
        """Keep a store that was opened, unless the file at its path is gone, or another than was `found` before; whoever has
        opened it closes it then."""
        inode = _inode(path)
        if inode is None or found not in (None, inode):
            return False
        self._open[path] = (inode, store)
        for victim in list(self._open):
            if len(self._open) <= self.limit:
                break
            if victim != path and not self._open[victim][1].writing:
                self.forget(victim)
        return True

    def forget(self, path: str) -> None:
        """Close the store at this path, if it is open."""
        entry = self._open.pop(path, None)
        if entry is None:
            return
        inode, store = entry
        last = None if inode == _inode(path) else _another_descriptor(inode)
        store.env.close()
        if last is not None:
            threading.Thread(target=os.close, args=(last,), name="anabranch-close", daemon=True).start()

    def forget_gone(self) -> None:
        """Close stores whose files are not at their paths any more, unless one was looked for lately; one with a write
        transaction open stays until later."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + SECONDS
        for path, (inode, store) in list(self._open.items()):
            if not store.writing and inode != _inode(path):
                self.forget(path)

    def clear(self) -> None:
        for path in list(self._open):
            self.forget(path)

    def _forget_parents(self) -> None:
        # An environment must not be used across a fork.  Closing the child's copy is safe, since locks belong
        # to the parent's process, and without it the child could not open the shard itself; but a
        # transaction of the parent is not the child's to end.
        for path, (_, store) in list(self._open.items()):
            if not store.writing:
                self.forget(path)
        self._open.clear()

    def __len__(self) -> int:
        return len(self._open)


def _inode(path: str) -> Inode | None:
    try:
        stat = os.stat(path + "/data.mdb")
    except FileNotFoundError:
        return None
    return stat.st_dev, stat.st_ino


def _another_descriptor(inode: Inode) -> int | None:
    """Of a file that this process has open somewhere, LMDB does not tell where; None where that cannot be found."""
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            # Not the one by which the list was read.
            with suppress(OSError):
                stat = os.fstat(int(name))
                if (stat.st_dev, stat.st_ino) == inode:
                    return os.dup(int(name))
    return None
