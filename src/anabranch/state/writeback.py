"""Have shards written to disk a little at a time.

What steps write is in LMDB's maps, and the kernel writes it to disk when it has been there for half a minute: the pages of
all shards at once, since all became dirty at the same time.  With a million keys under load that was a burst of 600 MB every
30 s, and the few bytes of a step that must be durable waited behind it: a step of 0.3 to 0.7 s instead of 0.1.  So now and
then a step has a shard written, and over `PERIOD` all have their turn: about as many bytes, evenly.

The kernel counts a file's age from its first change since it was last clean.  `fdatasync` leaves that as it was, so the
kernel came all the same: with 5 million keys at 20,000 rows/s it cleaned 20,000 to 70,000 pages every 5 s, up to 235 ms of
a processor, most of it in telling the other one that they are no longer writable.  On ext4 without a journal `fsync` begins
the count anew, and the kernel does not come; with a journal, which was not tried, it may not.  With a period of 4 s
instead, syncing took 9% of a processor instead of 3, and steps waited for the disk.

WB-1  Nothing depends on it: no step waits for it, and nobody takes a shard for durable because of it.
WB-2  Turns go by the shard's number, whoever has it.  By its place among the shards of a worker, some were left out while
      shards moved, until the kernel came for all of them at once.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection
from pathlib import Path

from anabranch.model.ids import ShardId

log = logging.getLogger(__name__)

PERIOD = 20.0
"""Seconds in which every shard has its turn: sooner than the kernel comes by itself."""


class Turns:
    """Which shards a step has written; on the coordinator's clock, so that processes need not agree.

    >>> turns = Turns()
    >>> [turns.next(now, shards=10) for now in (100.0, 101.0, 102.1, 102.2, 106.1)]
    [(), (), (1,), (), (2, 3)]
    """

    def __init__(self) -> None:
        self._last: float | None = None
        """When it was asked last, in periods."""

    def next(self, now: float, shards: int) -> tuple[ShardId, ...]:
        """The shards whose turn has come since the last time."""
        last, self._last = self._last, now / PERIOD
        if last is None:
            return ()
        first, end = int(last * shards) + 1, int(self._last * shards) + 1
        return tuple(ShardId(turn % shards) for turn in range(max(first, end - shards), end))


def begin_writing(paths: Collection[Path]) -> None:
    """Have the dirty pages of these stores written, on a thread that waits for it."""
    if paths:
        threading.Thread(target=_write_all, args=(paths,), name="anabranch-writeback", daemon=True).start()


def _write_all(paths: Collection[Path]) -> None:
    for path in paths:
        _write(path)


def _write(path: Path) -> None:
    try:
        file = os.open(path / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        # It was dropped meanwhile.
        return
    try:
        # Not `fdatasync`: the file's age must begin anew.
        os.fsync(file)
    except OSError as error:
        log.warning("could not write a shard to disk ahead of time path=%s error=%s", path, error)
    finally:
        os.close(file)
