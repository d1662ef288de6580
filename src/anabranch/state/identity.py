"""Who a shard is, and who may write to it.

Must not know: LMDB, flows, operators.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

import msgpack

from anabranch.errors import CorruptError
from anabranch.model.ids import Attempt, Epoch, HostId, Incarnation, ShardId, Step

FORMAT_VERSION = 1
"""Layout of the bytes in a shard: table names, key addresses, undo records, markers."""


@dataclass(frozen=True, slots=True)
class ShardIdentity:
    """What a shard's files must say about themselves before anyone reads a key from them.

    A task that landed on a wrong host, a directory of another job, a copy that was handed over,
    or a hash function that has changed: each differs in one of these fields.
    """

    job: str
    shard: ShardId
    of: int
    """S, the number of shards; with `shard` it gives the range of hashes."""
    incarnation: Incarnation
    host: HostId
    hash_version: int = 1
    format_version: int = FORMAT_VERSION

    def encode(self) -> bytes:
        return bytes(msgpack.packb(asdict(self)))

    @classmethod
    def decode(cls, raw: bytes) -> ShardIdentity:
        """Inverse of `encode`; raises CorruptError."""
        try:
            found = msgpack.unpackb(raw)
            return cls(**{field.name: found[field.name] for field in fields(cls)})
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptError(f"a shard's identity does not parse: {error!r}") from error

    def differences(self, other: ShardIdentity) -> str:
        """The fields in which another differs, for a message: `field expected x found y`."""
        mine, theirs = asdict(self), asdict(other)
        return ", ".join(
            f"{name}: expected {mine[name]!r}, found {theirs[name]!r}"
            for name in mine
            if mine[name] != theirs[name]
        )


class Fence(NamedTuple):
    """The writer's place in the order of all writers; compared lexicographically.

    A coordinator that goes back to an earlier step must take a new epoch, or its own
    earlier fences shut it out.
    """

    epoch: Epoch
    step: Step
    attempt: Attempt


class Marker(NamedTuple):
    """Which step a region of a shard is at, and whose transaction brought it there."""

    step: Step
    epoch: Epoch
    attempt: Attempt
    run: bytes
    """Names the task that wrote, so that a task may repeat itself but not its twin."""

    def encode(self) -> bytes:
        return bytes(msgpack.packb(tuple(self)))

    @classmethod
    def decode(cls, raw: bytes) -> Marker:
        """Inverse of `encode`; raises CorruptError."""
        try:
            return cls(*msgpack.unpackb(raw))
        except (ValueError, TypeError) as error:
            raise CorruptError(f"a region's step marker does not parse: {error!r}") from error


def encode_fence(fence: Fence) -> bytes:
    return bytes(msgpack.packb(tuple(fence)))


def decode_fence(raw: bytes) -> Fence:
    """Inverse of `encode_fence`; raises CorruptError."""
    try:
        return Fence(*msgpack.unpackb(raw))
    except (ValueError, TypeError) as error:
        raise CorruptError(f"a shard's fence does not parse: {error!r}") from error
