"""One table of one shard inside a transaction: addresses in, values out.

The short path (no key of the batch above 502 bytes) is a handful of C loops: 10⁵ integer keys are read in
about 50 ms and written in about 50 ms on a core of the smallest cloud machines.  `Transaction.get` in a list
comprehension beats `Cursor.getmulti`, which leaves absent keys out and so needs a dictionary on top.

Must not know: undo, fences, steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anabranch.errors import CorruptError
from anabranch.state.address import (
    HEAD,
    after,
    disk_key,
    is_long,
    long_range,
    pack_long,
    unpack_long,
)


class ShardTable:
    """A named database within a write transaction.

    Addresses of one call ascend and are distinct.  `long` says that some of them may be too long for
    LMDB; only then is every address looked at.
    """

    def __init__(self, txn: Any, db: Any, long_keys: bool) -> None:
        self._txn = txn
        self._db = db
        self._cursor = txn.cursor(db=db)
        self.long_keys = long_keys
        """False only if no long key was ever put here: then scans skip the long keys' range."""

    def get(self, addresses: Sequence[bytes], long: bool) -> list[bytes | None]:
        get, db = self._txn.get, self._db
        if long:
            return [self._get_long(a) if is_long(a) else get(a, None, db) for a in addresses]
        return [get(a, None, db) for a in addresses]

    def put(self, addresses: Sequence[bytes], values: Sequence[bytes | None], long: bool) -> None:
        delete, db = self._txn.delete, self._db
        if long:
            stored: Sequence[bytes | None] = [
                pack_long(a, v) if v is not None and is_long(a) else v
                for a, v in zip(addresses, values, strict=True)
            ]
            addresses, values = [disk_key(a) for a in addresses], stored
        if None in values:
            self._cursor.putmulti([(a, v) for a, v in zip(addresses, values, strict=True) if v is not None])
            for address, value in zip(addresses, values, strict=True):
                if value is None:
                    delete(address, b"", db)
        else:
            self._cursor.putmulti(zip(addresses, values, strict=True))

    def load(self, addresses: Sequence[bytes], values: Sequence[bytes | None], long: bool) -> None:
        """As `put`; a little faster (0.15 µs a key) when all come behind all that is there, and none is deleted."""
        if (
            not addresses
            or None in values
            or (self._cursor.last() and self._cursor.key() >= addresses[0][:HEAD])
        ):
            self.put(addresses, values, long)
            return
        pairs: Any = zip(addresses, values, strict=True)
        if long:
            # Within a hash, long keys are stored in another order than that of their addresses.
            pairs = sorted((disk_key(a), pack_long(a, v) if is_long(a) else v) for a, v in pairs)
        _, added = self._cursor.putmulti(pairs, append=True)
        if added != len(addresses):
            raise CorruptError("keys that were to be loaded do not ascend")

    def clear(self, low: bytes, end: bytes) -> None:
        """Delete all between two disk keys, without the second."""
        cursor = self._cursor
        if cursor.set_range(low):
            while cursor.key() and cursor.key() < end:
                cursor.delete()

    def scan(self, addresses: Sequence[bytes]) -> list[list[tuple[bytes, bytes]]]:
        """For each prefix's address, (suffix, value) of every entry under it, in key order."""
        cursor, result = self._cursor, []
        for address in addresses:
            cut = len(address)
            found: list[tuple[bytes, bytes]] = []
            if not is_long(address) and cursor.set_range(address):
                for key, value in cursor.iternext():
                    if not key.startswith(address):
                        break
                    found.append((key[cut:], value))
            if self.long_keys and (longs := self._scan_long(address)):
                found = sorted(found + longs)
            result.append(found)
        return result

    def edge(self, addresses: Sequence[bytes], last: bool) -> list[tuple[bytes, bytes] | None]:
        """For each prefix's address, its first or last entry."""
        shorts = [None if is_long(a) else self._short_edge(a, last) for a in addresses]
        if not self.long_keys:
            return shorts
        choose = max if last else min
        result = []
        for short, address in zip(shorts, addresses, strict=True):
            candidates = self._scan_long(address)
            if short is not None:
                candidates.append(short)
            result.append(choose(candidates, default=None))
        return result

    def _short_edge(self, address: bytes, last: bool) -> tuple[bytes, bytes] | None:
        cursor = self._cursor
        if last:  # noqa: SIM108
            there = cursor.prev() if cursor.set_range(after(address)) else cursor.last()
        else:
            there = cursor.set_range(address)
        if not there:
            return None
        key, value = cursor.item()
        return (key[len(address) :], value) if key.startswith(address) else None

    def _scan_long(self, address: bytes) -> list[tuple[bytes, bytes]]:
        # Linear in the long keys that share the prefix's first 400 bytes: below that their order on disk
        # is that of their digests.
        start, prefix = long_range(address), address[HEAD:]
        found: list[tuple[bytes, bytes]] = []
        if self._cursor.set_range(start):
            for disk, stored in self._cursor.iternext():
                if not disk.startswith(start):
                    break
                key, value = unpack_long(stored)
                if key.startswith(prefix):
                    found.append((key[len(prefix) :], value))
        return found

    def _get_long(self, address: bytes) -> bytes | None:
        stored = self._txn.get(disk_key(address), None, self._db)
        if stored is None:
            return None
        key, value = unpack_long(stored)
        if key != address[HEAD:]:
            raise CorruptError(f"a key of {len(key)} bytes is stored where another of equal digest belongs")
        return value
