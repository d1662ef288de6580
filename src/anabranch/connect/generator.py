"""A seeded generator of rows, for tests, benchmarks and first tries.

Every value is a function of (seed, column, partition, index): nothing is stored, any slice can be made again
anywhere, and two slices never depend on each other.

Must not know: steps, workers, flows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import polars as pl

from anabranch.connect.columns import Maker, index, uniform_int
from anabranch.connect.source import Available, OnBad, Slice, Source, even_bounds, with_weight
from anabranch.errors import ConfigError
from anabranch.model.ids import PartitionId
from anabranch.model.types import check_name

_BLOCK = 1 << 18
_HORIZON = 100_000_000
"""Rows that an endless partition claims to have: more than any step takes."""


def generator(
    rows: int | None = None,
    rate: float | None = None,
    partitions: int = 4,
    seed: int = 0,
    keys: int = 1000,
    columns: Mapping[str, Maker] | None = None,
) -> Generator:
    """An input of made-up rows, the same ones for the same arguments.

    Row *i* of partition *p* is row `i · partitions + p` of the whole.  By default a row has `id` (that
    number), `key` in [0, keys) and `value` in [0, 1000), all Int64.

    Args:
        rows: how many in all; None: without end.
        rate: rows per second over all partitions, from the start of the run; None: as fast as they are taken.
        partitions: how many.
        seed: other rows for another seed.
        keys: how many different keys.
        columns: other columns instead, by name: `uniform_int(lo, hi)`, `uniform_float(lo, hi)`, `words(n)`,
            `choice(values)`, `timestamps(start, every)`, `index()`.

    Raises:
        ConfigError: an argument is out of range.
    """
    if columns is None:
        if keys < 1:
            raise ConfigError(f"generator: keys is at least 1; found {keys}")
        columns = {"id": index(), "key": uniform_int(0, keys), "value": uniform_int(0, 1000)}
    return Generator(rows, rate, partitions, seed, columns)


class Generator(Source):
    """See `generator`."""

    abreast = True

    def __init__(
        self,
        rows: int | None,
        rate: float | None,
        partitions: int,
        seed: int,
        columns: Mapping[str, Maker],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if partitions < 1 or (rows is not None and rows < 0) or (rate is not None and rate <= 0):
            raise ConfigError(
                f"generator: partitions ≥ 1, rows ≥ 0 and rate > 0 are needed; found "
                f"partitions={partitions}, rows={rows}, rate={rate}"
            )
        if not columns:
            raise ConfigError("generator: at least one column is needed")
        for name, maker in columns.items():
            check_name(name)
            if not isinstance(maker, Maker):
                raise ConfigError(f"generator: column {name!r}: use uniform_int, words, …; found {maker!r}")
        self.schema = {name: maker.dtype for name, maker in columns.items()}
        self._columns = dict(columns)
        self._rows = rows
        self._rate = rate
        self._partitions = partitions
        self._seed = seed
        self._clock: Callable[[], float] | None = clock
        self._begun: tuple[float, int] | None = None
        """When the rate began to count, and how many rows there were then."""
        self._taken = 0

    def fingerprint(self) -> dict[str, Any]:
        return {
            "kind": "generator",
            "rows": self._rows,
            "partitions": self._partitions,
            "seed": self._seed,
            "columns": {name: maker.describe() for name, maker in self._columns.items()},
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clock": None, "_begun": None}

    def close(self) -> None:
        self._begun = None

    def discover(self, positions: Mapping[PartitionId, int]) -> list[Available]:
        names = [PartitionId(str(number)) for number in range(self._partitions)]
        self._taken = sum(positions.get(name, 0) for name in names)
        total = self._total()
        width = self._row_size()
        found = []
        for number, name in enumerate(names):
            start = positions.get(name, 0)
            end = start + _HORIZON if total is None else self._share(total, number)
            if start < end:
                found.append(Available(name, start, end, end - start, (end - start) * width))
        return found

    def pending(self) -> bool:
        return self._rows is None or self._taken < self._rows

    def _total(self) -> int | None:
        """How many rows there are now, over all partitions."""
        if self._rate is None:
            return self._rows
        assert self._clock is not None
        if self._begun is None:
            self._begun = (self._clock(), self._taken)
        since, base = self._begun
        total = base + int((self._clock() - since) * self._rate)
        return total if self._rows is None else min(total, self._rows)

    def _share(self, total: int, number: int) -> int:
        return (total - number + self._partitions - 1) // self._partitions

    def _row_size(self) -> int:
        return sum(maker.size for maker in self._columns.values())

    def cut(self, available: Available, rows: int, size: int) -> Slice:
        width = self._row_size()
        count = min(available.end - available.start, max(1, min(rows, size // width)))
        return Slice(available.partition, available.start, available.start + count, count, count * width)

    def split(self, piece: Slice, parts: int) -> list[Slice]:
        width = self._row_size()
        return [
            Slice(piece.partition, low, high, high - low, (high - low) * width)
            for low, high in even_bounds(piece.start, piece.end, parts)
        ]

    def read(self, piece: Slice, on_bad: OnBad) -> Iterator[pl.DataFrame]:
        number = int(piece.partition)
        for low in range(piece.start, piece.end, _BLOCK):
            rows = np.arange(low, min(low + _BLOCK, piece.end), dtype=np.uint64)
            rows = rows * np.uint64(self._partitions) + np.uint64(number)
            frame = pl.DataFrame(
                [maker.make(name, self._seed, rows) for name, maker in self._columns.items()],
                schema=self.schema,
            )
            yield with_weight(frame)
