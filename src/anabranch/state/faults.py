"""LMDB's errors in our words.

Room is asked of the disk before LMDB may need it (see `mapping`), so a full disk is an error of the system call that
asks.  On file systems where that is not possible LMDB answers a full disk with EIO as often as with ENOSPC,
because the write that fills the disk is short and not refused.  So EIO is a full disk when the file system, or the
process's limit on file sizes, has no room left.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import lmdb

from anabranch.errors import AnabranchError, CorruptError, EngineError, StepAborted, StorageFullError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_MAX_RERUNS = 32
T = TypeVar("T")
_LOW_WATER = 1 << 20
"""Free bytes below which an I/O error is blamed on a full disk."""


class MapFull(StepAborted):
    """A shard outgrew its memory map.  The map has been enlarged: run the same again."""


def with_growth(action: Callable[[], T]) -> T:
    """Do it again as long as a map was full; every time the map has grown, so that is seldom."""
    for _ in range(_MAX_RERUNS):
        try:
            return action()
        except MapFull as error:
            last = error
    raise EngineError(f"a map was full {_MAX_RERUNS} times over: {last}") from last


def translate(error: lmdb.Error, path: Path) -> AnabranchError:
    """Our error for LMDB's; the caller has aborted the transaction."""
    code = getattr(error, "code", 0)
    if code in _FULL or (code == errno.EIO and _room(path) < _LOW_WATER):
        return _full(path)
    if isinstance(error, lmdb.CorruptedError | lmdb.PageNotFoundError | lmdb.InvalidError):
        return CorruptError(f"shard {path}: its LMDB file is damaged ({error}); recover from a checkpoint")
    return EngineError(f"shard {path}: {error}")


def translate_os(error: OSError, path: Path) -> AnabranchError:
    """Our error for one of the operating system's on a file beside the data."""
    return _full(path) if error.errno in _FULL else EngineError(f"shard {path}: {error}")


def _full(path: Path) -> StorageFullError:
    return StorageFullError(
        f"shard {path}: the disk is full ({_room(path):,} bytes free) and the transaction was rolled back; "
        "free some space or move the job, then run it again"
    )


def _room(path: Path) -> int:
    """Bytes that the shard's file may still grow by."""
    there = next(part for part in (path, *path.parents) if part.exists())
    stat = os.statvfs(there)
    free = stat.f_bavail * stat.f_frsize
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    data = path / "data.mdb"
    if limit != resource.RLIM_INFINITY and data.exists():
        free = min(free, max(0, limit - data.stat().st_size))
    return free
