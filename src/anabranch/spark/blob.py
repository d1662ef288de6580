"""What travels through Spark's shuffle: one terminated blob from each sender to each receiver.

Spark's Python side takes a shuffle whose file was lost for one that ended (the iterator just
stops), so completeness is our own affair:

BLOB-1  In every exchange every sender sends every receiver exactly one blob, empty or not.
BLOB-2  `check_complete` accepts a stage's input only if exactly one blob of each sender is there, each
        of this epoch, step, attempt and stage, with the rows that its header promises.

Layout: magic, header length, MessagePack header, then the frames' bytes back to back (Arrow IPC streams).
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import polars as pl

from anabranch.errors import IncompleteInput
from anabranch.spark.spec import StepSpec

_MAGIC = b"ABB1"
_HEAD = struct.Struct("<4sI")


@dataclass(frozen=True, slots=True)
class Packed:
    """One frame in a channel, as bytes; forwarded to a deeper stage without being unpacked."""

    channel: int
    rows: int
    data: bytes

    def frame(self) -> pl.DataFrame:
        return pl.read_ipc_stream(self.data)


@dataclass(frozen=True, slots=True)
class Blob:
    """A blob, taken apart."""

    stamp: tuple[int, int, int, int]
    """(epoch, step, attempt, stage that receives it)"""
    sender: int
    frames: tuple[Packed, ...]
    reports: tuple[list[Any], ...]


def pack_frame(channel: int, frame: pl.DataFrame) -> Packed:
    buffer = io.BytesIO()
    frame.write_ipc_stream(buffer)
    return Packed(channel, frame.height, buffer.getvalue())


def encode(
    spec: StepSpec, stage: int, sender: int, frames: Sequence[Packed], reports: Sequence[list[Any]]
) -> bytes:
    """The blob that `sender` sends to one receiver of `stage`."""
    header = msgpack.packb(
        {
            "stamp": (spec.epoch, spec.step, spec.attempt, stage),
            "sender": sender,
            "frames": [(f.channel, f.rows, len(f.data)) for f in frames],
            "reports": list(reports),
        }
    )
    return b"".join((_HEAD.pack(_MAGIC, len(header)), header, *(f.data for f in frames)))


def decode(data: bytes) -> Blob:
    """Take a blob apart.  Raises IncompleteInput when it is shorter than it says."""
    magic, length = _HEAD.unpack_from(data)
    header = msgpack.unpackb(data[_HEAD.size : _HEAD.size + length], use_list=True, strict_map_key=False)
    position = _HEAD.size + length
    frames = []
    for channel, rows, size in header["frames"]:
        frames.append(Packed(channel, rows, data[position : position + size]))
        position += size
    if magic != _MAGIC or position != len(data):
        raise IncompleteInput(f"a blob of {len(data)} bytes should have {position}")
    return Blob(tuple(header["stamp"]), header["sender"], tuple(frames), tuple(header["reports"]))


def check_complete(spec: StepSpec, stage: int, receiver: int, arrived: Iterable[bytes]) -> list[Blob]:
    """The blobs of all senders, in their order (BLOB-2)."""
    blobs = sorted((decode(data) for data in arrived), key=lambda blob: blob.sender)
    expected = (spec.epoch, spec.step, spec.attempt, stage)
    for blob in blobs:
        if blob.stamp != expected:
            raise IncompleteInput(
                f"step {spec.step}, stage {stage}, worker {receiver}: a blob stamped {blob.stamp} came "
                f"where {expected} was expected"
            )
    senders = [blob.sender for blob in blobs]
    if senders != list(range(spec.workers)):
        missing = sorted(set(range(spec.workers)) - set(senders))
        raise IncompleteInput(
            f"step {spec.step}, stage {stage}, worker {receiver}: blobs of workers {senders} arrived, "
            f"those of {missing} are missing; a shuffle file was lost"
        )
    return blobs
