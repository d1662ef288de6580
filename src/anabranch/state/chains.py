"""Chains of pieces put together: of two entries for a key the later one holds.

Must not know: shards, manifests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from anabranch.model.ranges import HashRange
from anabranch.state.asof import Rows
from anabranch.state.manifest import Piece
from anabranch.state.pieces import Part, as_part, hashes_of, read_piece
from anabranch.storage.base import Storage


def merge_deltas(storage: Storage, pieces: Sequence[Piece], version: int) -> list[Part]:
    """Deltas that follow each other as one; deletions stay, since what is deleted may be in the base."""
    read = [read_piece(storage, piece, version) for piece in pieces]
    return [as_part(rows) for rows in overlay(read)]


def overlay(chain: Sequence[Sequence[Part]]) -> Iterator[Rows]:
    """The parts of a chain's pieces, oldest first, as one run of rows for each table, ascending."""
    tables: dict[bytes, list[Part]] = {}
    for parts in chain:
        for part in parts:
            tables.setdefault(part.table, []).append(part)
    for table in sorted(tables):
        yield _one_run(table, tables[table])


def live(rows: Rows) -> Rows:
    """Without the keys that were deleted."""
    if None not in rows.values:
        return rows
    kept = [(a, v) for a, v in zip(rows.addresses, rows.values, strict=True) if v is not None]
    return Rows(rows.table, [a for a, _ in kept], [v for _, v in kept])


def within(part: Part, hashes: HashRange) -> Part | None:
    """The rows of a part in a range of hashes; None when there are none."""
    found = hashes_of(part.addresses)
    low = int(np.searchsorted(found, np.uint64(hashes[0]), side="left"))
    high = int(np.searchsorted(found, np.uint64(hashes[1] - 1), side="right"))
    if low == high:
        return None
    return Part(part.table, part.addresses[low:high], part.values[low:high])


def _one_run(table: bytes, parts: Sequence[Part]) -> Rows:
    runs = [(part.addresses.to_pylist(), part.values.to_pylist()) for part in parts]
    if all(one[0][-1] < next_[0][0] for one, next_ in pairwise(runs)):
        return Rows(table, [a for run in runs for a in run[0]], [v for run in runs for v in run[1]])
    merged: dict[bytes, bytes | None] = {}
    for addresses, values in runs:
        merged.update(zip(addresses, values, strict=True))
    ordered = sorted(merged)
    return Rows(table, ordered, list(map(merged.__getitem__, ordered)))
