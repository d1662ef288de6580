"""One checksummed JSON record in one file: a checksum in the first line, the payload in the second.

REC-1  A record that `create` returned from is durable (STO-1).
REC-2  A record is created at most once: the second creator gets FileExistsError, whoever it is (STO-2).
REC-3  A reader sees a whole record or none; damaged bytes raise CorruptError naming the file.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from anabranch.errors import CorruptError
from anabranch.storage.base import Storage


def create(storage: Storage, name: str, payload: Any, point: str = "") -> None:
    """Write a new record.

    Raises:
        FileExistsError: it is there already.
        StorageFullError: the disk is full; there is no record.
    """
    storage.create(name, _encoded(payload), point)


def replace(storage: Storage, name: str, payload: Any, *, durable: bool = True, point: str = "") -> None:
    """Write a record in the place of an older one, atomically.

    Raises:
        StorageFullError: the disk is full; the older record is still there.
    """
    storage.replace(name, _encoded(payload), durable, point)


def read(storage: Storage, name: str) -> Any:
    """The payload of a record.  Raises FileNotFoundError, or CorruptError when the checksum does not fit."""
    raw = storage.read(name)
    checksum, _, body = raw.partition(b"\n")
    if checksum.decode("ascii", "replace") != _checksum(body):
        raise CorruptError(
            f"record {storage.where(name)}: the checksum does not fit its {len(raw)} bytes; the file was damaged "
            "or edited"
        )
    return json.loads(body)


def _encoded(payload: Any) -> bytes:
    body = json.dumps(payload, separators=(",", ":")).encode()
    return _checksum(body).encode("ascii") + b"\n" + body


def _checksum(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()
