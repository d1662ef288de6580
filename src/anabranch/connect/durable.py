"""Bytes that survive: written whole, synced, and given their name only then.

Must not know: what the bytes are.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from anabranch.errors import StorageFullError


@contextmanager
def disk_full(path: Path) -> Iterator[None]:
    """Turn the operating system's word for a full disk into ours.

    Raises:
        StorageFullError: no space, or no quota, is left for `path`.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFullError(f"no space left for {path}; free some, and the flow goes on") from error
        raise


def sync_directory(path: Path) -> None:
    """Make names that were created in or removed from a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, data: bytes | memoryview) -> None:
    """Create or replace a file with these bytes, synced with its directory, which is created if need be."""
    with disk_full(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(path.parent)
