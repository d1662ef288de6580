"""One checksummed JSON record in one file: created once, whole, synced; or not at all.

REC-1  A record that `create` returned from is on disk, and so is its name in the directory.
REC-2  A record is created at most once: the second creator gets FileExistsError, whoever it is.
REC-3  A reader sees a whole record or none; damaged bytes raise CorruptError naming the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from anabranch.errors import CorruptError


def create(path: Path, payload: Any) -> None:
    """Write a new record.  Raises FileExistsError when it is there already."""
    temporary = _write_temporary(path, payload)
    try:
        # link() is exclusive where rename() would replace, and the name appears with the whole content.
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def replace(path: Path, payload: Any, *, durable: bool = True) -> None:
    """Write a record in the place of an older one, atomically."""
    os.replace(_write_temporary(path, payload, durable=durable), path)
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


def _write_temporary(path: Path, payload: Any, *, durable: bool = True) -> Path:
    body = json.dumps(payload, separators=(",", ":"), sort_keys=True).encode()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(_checksum(body).encode("ascii") + b"\n" + body)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    return temporary


def _checksum(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()
