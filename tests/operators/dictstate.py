"""A `KeyedState` over dictionaries that also checks how kernels use it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from anabranch.model.batch import U64
from anabranch.operators.kernel import Scan

Place = tuple[int, bytes]


class DictState:
    """Tables in memory, with every rule of the contract asserted.

    `_order` holds exactly the places of `_tables`, sorted, so that scans need no sort.
    """

    def __init__(self) -> None:
        self._tables: dict[str, dict[Place, bytes]] = {}
        self._order: dict[str, list[Place]] = {}

    def get(self, table: str, hashes: U64, keys: Sequence[bytes]) -> list[bytes | None]:
        rows = self._tables.get(table, {})
        return [rows.get(place) for place in self._places(hashes, keys)]

    def put(
        self,
        table: str,
        hashes: U64,
        keys: Sequence[bytes],
        values: Sequence[bytes | None],
        olds: Sequence[bytes | None],
    ) -> None:
        places = self._places(hashes, keys)
        assert len(values) == len(places), "one value for each key"
        assert len(olds) == len(places), "one old value for each key"
        rows = self._tables.setdefault(table, {})
        order = self._order.setdefault(table, [])
        for place, value, old in zip(places, values, olds, strict=True):
            assert rows.get(place) == old, f"old value of {place} is {rows.get(place)!r}, not {old!r}"
            assert value is None or type(value) is bytes, f"a value must be bytes, not {type(value)}"
            if value is None:
                if place in rows:
                    del rows[place]
                    del order[bisect_left(order, place)]
            else:
                if place not in rows:
                    insort(order, place)
                rows[place] = value

    def scan(self, table: str, hashes: U64, prefixes: Sequence[bytes]) -> Scan:
        rows = self._tables.get(table, {})
        index: list[int] = []
        suffixes: list[bytes] = []
        values: list[bytes] = []
        for i, (hash_, prefix) in enumerate(self._places(hashes, prefixes)):
            for place in self._under(table, hash_, prefix):
                index.append(i)
                suffixes.append(place[1][len(prefix) :])
                values.append(rows[place])
        return Scan(np.array(index, dtype=np.int64), suffixes, values)

    def edge(
        self, table: str, hashes: U64, prefixes: Sequence[bytes], last: bool
    ) -> list[tuple[bytes, bytes] | None]:
        rows = self._tables.get(table, {})
        found: list[tuple[bytes, bytes] | None] = []
        for hash_, prefix in self._places(hashes, prefixes):
            places = self._under(table, hash_, prefix)
            if places:
                place = places[-1 if last else 0]
                found.append((place[1][len(prefix) :], rows[place]))
            else:
                found.append(None)
        return found

    def dump(self) -> dict[str, dict[Place, bytes]]:
        """Every table that is not empty: (hash, key) → value, in key order."""
        return {
            table: {place: self._tables[table][place] for place in order}
            for table, order in sorted(self._order.items())
            if order
        }

    def _under(self, table: str, hash_: int, prefix: bytes) -> list[Place]:
        order = self._order.get(table, [])
        start = stop = bisect_left(order, (hash_, prefix))
        while stop < len(order) and order[stop][0] == hash_ and order[stop][1].startswith(prefix):
            stop += 1
        return order[start:stop]

    @staticmethod
    def _places(hashes: U64, keys: Sequence[bytes]) -> list[Place]:
        assert isinstance(hashes, np.ndarray), "hashes must be an array"
        assert hashes.dtype == np.uint64, "hashes must be uint64"
        assert len(hashes) == len(keys), "one key for each hash"
        assert bool((hashes[1:] >= hashes[:-1]).all()), "hashes must be sorted"
        assert all(type(key) is bytes for key in keys), "keys must be bytes"
        places = list(zip(hashes.tolist(), keys, strict=True))
        assert len(set(places)) == len(places), "equal (hash, key) pairs must appear once"
        return places
