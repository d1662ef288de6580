"""State on its way from one store to another: the keys of a range of hashes in the tables of one region.

On the wire a column of byte strings is all of them in one piece and their lengths beside it: one number where all are
equally long, else as many bytes for each as the longest needs.  So a key of 17 bytes with a value of 9 takes 26 and an
eighth, and strings take two bytes more.

Must not know: LMDB, fences, workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, compress, pairwise
from typing import Any, NamedTuple

import msgpack
import numpy as np

from anabranch.errors import CorruptError
from anabranch.model.ids import RegionId, ShardId, Step
from anabranch.model.ranges import HashRange
from anabranch.state.address import HEAD
from anabranch.state.identity import Marker
from anabranch.state.undo import Touched

_FORMAT = 1
_WIDTHS = ("<u1", "<u2", "<u4", "<u8")


class CargoTable(NamedTuple):
    """The keys of one table, ascending by address; a value of None: the key was deleted."""

    name: str
    """The full name: operator and table."""
    addresses: Sequence[bytes]
    values: Sequence[bytes | None]
    flags: bytes
    """One byte for each key: 1 if it changed since the checkpoint before, else 0."""
    gone: Sequence[bytes]
    """Keys that changed since the checkpoint before and are not among `addresses`: where all keys travel, they are no
    more."""

    @property
    def marked(self) -> Touched:
        """The keys that the next checkpoint must know of."""
        return Touched(self.name, sorted(chain(compress(self.addresses, self.flags), self.gone)))


@dataclass(frozen=True, slots=True)
class Cargo:
    """What one region of a shard has in a range of hashes."""

    shard: ShardId
    region: RegionId
    low: int
    end: int
    before: Marker | None
    """Where the region stood at the source."""
    since: Step | None
    """None: all keys; else those that changed from this step on."""
    known: Step
    """The step from which on flags and `gone` name all that changed; that of the move if they name nothing."""
    tables: tuple[CargoTable, ...]
    """All tables of the region, also those without a key."""

    @property
    def hashes(self) -> HashRange:
        return self.low, self.end

    @property
    def keys(self) -> int:
        return sum(len(table.addresses) for table in self.tables)

    @property
    def size(self) -> int:
        """Bytes of addresses and values."""
        return sum(
            sum(map(len, table.addresses)) + sum(len(value) for value in table.values if value is not None)
            for table in self.tables
        )

    def encode(self) -> bytes:
        before = None if self.before is None else self.before.encode()
        tables = [
            (
                table.name,
                _packed(table.addresses),
                _packed(table.values),
                np.packbits(np.frombuffer(table.flags, dtype=np.uint8)).tobytes()
                if any(table.flags)
                else b"",
                _packed(table.gone),
            )
            for table in self.tables
        ]
        # The hash behind the last one may not fit into 64 bits.
        head = (_FORMAT, self.shard, self.region, self.low, self.end - 1, before, self.since, self.known)
        return bytes(msgpack.packb((*head, tables)))

    @classmethod
    def decode(cls, raw: bytes) -> Cargo:
        """Inverse of `encode`; raises CorruptError."""
        try:
            form, shard, region, low, high, before, since, known, tables = msgpack.unpackb(raw)
            if form != _FORMAT:
                raise ValueError(f"format {form}, expected {_FORMAT}")
            marker = None if before is None else Marker.decode(before)
            found = tuple(_table(*table) for table in tables)
            return cls(shard, region, low, high + 1, marker, since, known, found)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise CorruptError(f"state that was sent does not parse: {error!r}") from error


def packed(
    name: str, addresses: Sequence[bytes], values: Sequence[bytes | None], marked: set[bytes]
) -> CargoTable:
    """A table of cargo; `marked` are the keys that changed, whether they are still there or not."""
    if not marked:
        return CargoTable(name, addresses, values, bytes(len(addresses)), ())
    flags = bytes(map(marked.__contains__, addresses))
    return CargoTable(name, addresses, values, flags, sorted(marked.difference(addresses)))


def _table(name: str, addresses: Any, values: Any, flags: bytes, gone: Any) -> CargoTable:
    keys = _whole(addresses)
    bits = np.unpackbits(np.frombuffer(flags, dtype=np.uint8), count=len(keys)) if flags else b""
    table = CargoTable(
        name, keys, _unpacked(values), bytes(bits) if flags else bytes(len(keys)), _whole(gone)
    )
    if len(table.values) != len(keys) or len(table.flags) != len(keys):
        raise ValueError(f"table {name!r} has {len(keys)} keys and {len(table.values)} values")
    return table


def _packed(column: Sequence[bytes | None]) -> tuple[int, int | bytes, bytes]:
    """Count, lengths and bytes; a length is one more than it is, and 0 for None."""
    lengths = [0 if item is None else len(item) + 1 for item in column]
    data = b"".join([item for item in column if item is not None])
    longest = max(lengths, default=0)
    if min(lengths, default=0) == longest:
        return len(column), longest, data
    width = next(width for width in _WIDTHS if longest <= np.iinfo(width).max)
    return len(column), np.array(lengths, dtype=width).tobytes(), data


def _unpacked(packed: Any) -> list[bytes | None]:
    """Inverse of `_packed`; raises ValueError."""
    count, lengths, data = packed
    if isinstance(lengths, int):
        if len(data) != count * max(0, lengths - 1):
            raise ValueError(f"{count} items of {lengths - 1} bytes in {len(data)}")
        if lengths <= 1:
            return [b"" if lengths else None] * count
        return [data[at : at + lengths - 1] for at in range(0, len(data), lengths - 1)]
    width = len(lengths) // max(1, count)
    sizes: list[int] = np.frombuffer(lengths, dtype=f"<u{width}").tolist()
    ends = list(accumulate((max(0, size - 1) for size in sizes), initial=0))
    if len(sizes) != count or ends[-1] != len(data):
        raise ValueError(f"{count} items of {ends[-1]} bytes in {len(data)}")
    items: list[bytes | None] = [data[low:end] for low, end in pairwise(ends)]
    if 0 in sizes:
        items = [item if size else None for item, size in zip(items, sizes, strict=True)]
    return items


def _whole(packed: Any) -> list[bytes]:
    """A column of addresses."""
    items = [item for item in _unpacked(packed) if item is not None]
    if len(items) != packed[0] or any(len(item) < HEAD for item in items):
        raise ValueError("an address is missing or too short")
    return items
