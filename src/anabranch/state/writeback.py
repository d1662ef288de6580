"""Have shards written to disk a little at a time.

What steps write is in LMDB's maps, and the kernel writes it to disk when it has been there for half a minute: the pages of
all shards at once, since all became dirty at the same time.  With a million keys under load that was a burst of 600 MB every
30 s, and the few bytes of a step that must be durable waited behind it: a step of 0.3 to 0.7 s instead of 0.1.  So now and
then a step has one shard written, and over `PERIOD` all have their turn: about as many bytes, evenly.

WB-1  Nothing depends on it: no step waits for it, and nobody takes a shard for durable because of it.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

log = logging.getLogger(__name__)

PERIOD = 20.0
"""Seconds in which every shard has its turn: sooner than the kernel comes by itself."""


class Turns:
    """Which of a worker's shards a step has written; on the coordinator's clock, so that processes need not agree.

    >>> turns = Turns()
    >>> [turns.next(now, shards=10) for now in (100.0, 101.0, 102.1, 102.2, 104.1)]
    [50, None, 51, None, 52]
    """

    def __init__(self) -> None:
        self._last: int | None = None

    def next(self, now: float, shards: int) -> int | None:
        """The number of the turn that begins now, if one does; the shard is its remainder."""
        turn = int(now * shards / PERIOD)
        if turn == self._last:
            return None
        self._last = turn
        return turn


def begin_writing(path: Path) -> None:
    """Have a store's dirty pages written, on a thread that waits for it."""
    threading.Thread(target=_write, args=(path,), name="anabranch-writeback", daemon=True).start()


def _write(path: Path) -> None:
    try:
        file = os.open(path / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        # It was dropped meanwhile.
        return
    try:
        # Waits until all is there.  If the writing is only begun, the file keeps its age, and the kernel comes all the same.
        os.fdatasync(file)
    except OSError as error:
        log.warning("could not write a shard to disk ahead of time path=%s error=%s", path, error)
    finally:
        os.close(file)
