"""Pieces of a checkpoint as Parquet files: the columns table, address and value, sorted by the first two.

Zstandard at its lowest level: 13 bytes for a key of 8 with a small value, against 19 with Snappy, and no slower; a piece of
156 keys takes 2.2 kB.  Neither dictionaries nor delta encodings pay, since half of each address is a hash.

A file is read as a whole, because its digest is over all of it; 10⁶ keys take 0.2 s to write and 0.15 s to read.

Must not know: shards, threads, which pieces there are.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from anabranch import crash
from anabranch.errors import CorruptError
from anabranch.model.batch import U64
from anabranch.model.hashing import shard_of
from anabranch.state.asof import Rows
from anabranch.state.manifest import Kind, Piece
from anabranch.storage.base import Storage

WRITE = crash.declare_write("piece", "a piece of a checkpoint is written")
_GROUP_BYTES = 64 << 20
_GROUP_ROWS = 1 << 20


class Part(NamedTuple):
    """Some rows of one table as Arrow columns, ascending by address."""

    table: bytes
    addresses: Any
    values: Any


def version_folder(version: int) -> str:
    return f"{version:09d}"


def cut(rows: Rows, partitions: int) -> Iterator[tuple[int, Part]]:
    """The rows by recovery partition."""
    _, addresses, values = as_part(rows)
    owners = shard_of(hashes_of(addresses), partitions)
    for start, end in _runs(owners):
        yield int(owners[start]), Part(rows.table, addresses[start:end], values[start:end])


def as_part(rows: Rows) -> Part:
    """The rows as Arrow columns; about 0.15 µs each."""
    return Part(
        rows.table, pa.array(rows.addresses, pa.large_binary()), pa.array(rows.values, pa.large_binary())
    )


def _runs(numbers: npt.NDArray[np.integer[Any]]) -> Iterator[tuple[int, int]]:
    """Start and end of each run of equal numbers."""
    bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    return ((start, end) for start, end in pairwise(bounds) if end > start)


def hashes_of(addresses: Any) -> U64:
    """The hash in front of each address of a large_binary array."""
    _, offsets, data = addresses.buffers()
    starts = np.frombuffer(offsets, dtype=np.int64)[addresses.offset : addresses.offset + len(addresses)]
    raw = np.frombuffer(data, dtype=np.uint8)
    width = int(starts[1] - starts[0]) if len(starts) > 1 else 0
    if width and (np.diff(starts) == width).all():
        # All of one length, which is usual: no index for every byte.
        heads = np.lib.stride_tricks.as_strided(raw[starts[0] :], (len(starts), 8), (width, 1))
    else:
        heads = raw[starts[:, None] + np.arange(8)]
    hashes: U64 = np.ascontiguousarray(heads).view(">u8").ravel().astype(np.uint64)
    return hashes


WriteFiles = Callable[[Callable[[], None]], None]
"""Does something that changes files."""


def call(action: Callable[[], None]) -> None:
    """Here and now."""
    action()


def write_piece(
    storage: Storage,
    version: int,
    partition: int,
    kind: Kind,
    writer: str,
    parts: Sequence[Part],
    write_files: WriteFiles = call,
) -> Piece:
    """Write one piece, durably, under a name that no other attempt uses, and that is durable after `sync` of its folder.

    Args:
        storage: The folder of checkpoints.
        version: The one being made.
        partition: Whose keys these are.
        kind: What they stand for.
        writer: Names the host, for people who look.
        parts: Not empty; those of one table ascend and do not overlap.
        write_files: Called with what changes files.

    Raises:
        StorageFullError: no room.
    """
    ordered = sorted(parts, key=lambda part: part.table)
    data = _encoded(ordered)
    hashes = [hashes_of(part.addresses.take([0, len(part.addresses) - 1])) for part in ordered]
    plain = "".join(c if c.isalnum() or c in "-." else "_" for c in writer)[:64]
    path = f"{version_folder(version)}/p{partition:04d}-{plain}-{secrets.token_hex(6)}.parquet"
    write_files(partial(storage.create, path, memoryview(data), WRITE, named=False))
    return Piece(
        partition=partition,
        path=path,
        rows=sum(len(part.addresses) for part in ordered),
        size=data.size,
        digest=_digest(data),
        kind=kind,
        version=version,
        low=min(int(some[0]) for some in hashes),
        high=max(int(some[-1]) for some in hashes),
    )


def read_piece(storage: Storage, piece: Piece, version: int) -> list[Part]:
    """The parts of a piece that belongs to a version, one or more for each table, ascending; verified.

    Raises:
        CorruptError: it is missing or damaged.
    """
    where = storage.where(piece.path)
    advice = f"; checkpoint {version} cannot be used: go on from another version, or restore the file from a backup"
    try:
        data = storage.read(piece.path)
    except FileNotFoundError:
        raise CorruptError(f"{where}: this piece of checkpoint {version} is missing{advice}") from None
    if len(data) != piece.size or _digest(data) != piece.digest:
        raise CorruptError(
            f"{where}: this piece of checkpoint {version} is damaged: expected {piece.size} bytes with digest "
            f"{piece.digest}, found {len(data)} with {_digest(data)}{advice}"
        )
    try:
        # Not `read_table`, which takes four times as long for a small piece.
        file = pq.ParquetFile(pa.BufferReader(data), read_dictionary=["table"], pre_buffer=False)
        table = file.read(columns=_SCHEMA.names, use_threads=False).cast(_SCHEMA)
    except (pa.ArrowInvalid, KeyError) as error:
        raise CorruptError(f"{where}: this piece does not parse: {error}{advice}") from error
    return [part for batch in table.to_batches() for part in _parts_of(batch)]


def _parts_of(batch: Any) -> Iterator[Part]:
    tables, addresses, values = batch.columns
    for start, end in _runs(tables.indices.to_numpy()):
        yield Part(tables[start].as_py(), addresses[start:end], values[start:end])


_SCHEMA = pa.schema(
    [
        ("table", pa.dictionary(pa.int32(), pa.binary())),
        ("address", pa.large_binary()),
        ("value", pa.large_binary()),
    ]
)


def _encoded(parts: Sequence[Part]) -> Any:
    names = pa.array([part.table for part in parts], pa.binary())
    numbers = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part.addresses) for part in parts])
    # Parts of one table have numbers of their own here, and one in the file.
    names = pa.DictionaryArray.from_arrays(pa.array(numbers), names).cast(pa.binary())
    addresses = pa.chunked_array([part.addresses for part in parts], pa.large_binary())
    values = pa.chunked_array([part.values for part in parts], pa.large_binary())
    table = pa.table([names, addresses, values], names=_SCHEMA.names)
    rows = max(1, table.num_rows * _GROUP_BYTES // max(1, table.nbytes))
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        row_group_size=min(_GROUP_ROWS, rows),
        compression="zstd",
        compression_level=1,
        use_dictionary=["table"],
        write_statistics=False,
        store_schema=False,
    )
    return sink.getvalue()


def _digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
