"""One checksummed JSON record in one file: created once, whole, synced; or not at all.

REC-1  A record that `create` returned from is on disk, and so is its name in the directory.
REC-2  A record is created at most once: the second creator gets FileExistsError, whoever it is.
REC-3  A reader sees a whole record or none; damaged bytes raise CorruptError naming the file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anabranch.errors import CorruptError, StorageFullError


def create(path: Path, payload: Any) -> None:
    """Write a new record.

    Raises:
        FileExistsError: it is there already.
        StorageFullError: the disk is full; there is no record.
    """
    with _temporary(path, payload, durable=True) as temporary:
        # link() is exclusive where rename() would replace, and the name appears with the whole content.
        os.link(temporary, path)
    sync_directory(path.parent)


def replace(path: Path, payload: Any, *, durable: bool = True) -> None:
    """Write a record in the place of an older one, atomically.

    Raises:
        StorageFullError: the disk is full; the older record is still there.
    """
    with _temporary(path, payload, durable=durable) as temporary:
        os.replace(temporary, path)
    if durable:
        sync_directory(path.parent)


def read(path: Path) -> Any:
    """The payload of a record.  Raises FileNotFoundError, or CorruptError when the checksum does not fit."""
    raw = path.read_bytes()
    checksum, _, body = raw.partition(b"\n")
    if checksum.decode("ascii", "replace") != _checksum(body):
        raise CorruptError(
            f"record {path}: the checksum does not fit its {len(raw)} bytes; the file was damaged or edited"
        )
    return json.loads(body)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _temporary(path: Path, payload: Any, *, durable: bool) -> Iterator[Path]:
    """The record under a name of its own beside its place; the name is gone afterwards."""
    body = json.dumps(payload, separators=(",", ":")).encode()
    # A process number would not do: two containers on shared storage may both be number 1.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(_checksum(body).encode("ascii") + b"\n" + body)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        yield temporary
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFullError(f"record {path}: the disk is full; make room and start again") from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _checksum(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()
