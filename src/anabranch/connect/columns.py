"""Makers of the generator's columns: each value is a hash of (seed, column, row number).

The hash is SplitMix64's finaliser over a counter, which needs no state and passes the usual batteries; 100
million values a second on one core.  What it gives for a row is part of the generator's promise to replay
and is pinned by golden values in the tests.

Must not know: partitions, slices.
"""

from __future__ import annotations

import datetime as dt
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from anabranch.errors import ConfigError
from anabranch.model.batch import U64


def mix(seed: int, column: str, rows: U64) -> U64:
    """64 well-mixed bits for each row number."""
    salt = (seed * 0x9E3779B97F4A7C15 + zlib.crc32(column.encode()) * 0xD1342543DE82EF95) & 0xFFFFFFFFFFFFFFFF
    bits = (rows + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt)
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits


def below(bits: U64, bound: int) -> U64:
    """Map 64 random bits to [0, bound), bound ≤ 2³²; the bias is below 2⁻³²."""
    return ((bits >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32)


class Maker(ABC):
    """How one column is made."""

    dtype: pl.DataType
    size: int = 8
    """About how many bytes a value takes."""

    @abstractmethod
    def make(self, column: str, seed: int, rows: U64) -> pl.Series:
        """The column's values for these row numbers; a pure function."""

    @abstractmethod
    def describe(self) -> list[Any]:
        """JSON-able: the maker's name and parameters."""


class _Index(Maker):
    dtype = pl.Int64()

    def make(self, column: str, seed: int, rows: U64) -> pl.Series:
        return pl.Series(column, rows.astype(np.int64))

    def describe(self) -> list[Any]:
        return ["index"]


class _UniformInt(Maker):
    dtype = pl.Int64()

    def __init__(self, low: int, high: int) -> None:
        if not 0 < high - low <= 1 << 32:
            raise ConfigError(f"uniform_int: lo < hi and hi − lo ≤ 2³² are needed; found {low}, {high}")
        self._low, self._high = low, high

    def make(self, column: str, seed: int, rows: U64) -> pl.Series:
        values = below(mix(seed, column, rows), self._high - self._low).astype(np.int64)
        return pl.Series(column, values + self._low)

    def describe(self) -> list[Any]:
        return ["uniform_int", self._low, self._high]


class _UniformFloat(Maker):
    dtype = pl.Float64()

    def __init__(self, low: float, high: float) -> None:
        if not low < high:
            raise ConfigError(f"uniform_float: lo < hi is needed; found {low}, {high}")
        self._low, self._high = float(low), float(high)

    def make(self, column: str, seed: int, rows: U64) -> pl.Series:
        unit = (mix(seed, column, rows) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return pl.Series(column, self._low + unit * (self._high - self._low))

    def describe(self) -> list[Any]:
        return ["uniform_float", self._low, self._high]


class _Choice(Maker):
    def __init__(self, values: Sequence[Any], described: list[Any]) -> None:
        if not values:
            raise ConfigError("choice: at least one value is needed")
        self._values = pl.Series(list(values))
        self.dtype = self._values.dtype
        self.size = max(1, int(self._values.estimated_size() / len(values)))
        self._described = described

    def make(self, column: str, seed: int, rows: U64) -> pl.Series:
        return self._values.gather(below(mix(seed, column, rows), len(self._values))).alias(column)

    def describe(self) -> list[Any]:
        return self._described


class _Timestamps(Maker):
    dtype = pl.Datetime("us")

    def __init__(self, start: dt.datetime, every: dt.timedelta) -> None:
        if start.tzinfo is not None:
            raise ConfigError("timestamps: start must not have a time zone")
        self._start = (start - dt.datetime(1970, 1, 1)) // dt.timedelta(microseconds=1)
        self._every = every // dt.timedelta(microseconds=1)

    def make(self, column: str, seed: int, rows: U64) -> pl.Series:
        return pl.Series(column, rows.astype(np.int64) * self._every + self._start).cast(self.dtype)

    def describe(self) -> list[Any]:
        return ["timestamps", self._start, self._every]


def index() -> Maker:
    """The row's number over all partitions, Int64: 0, 1, 2, …"""
    return _Index()


def uniform_int(lo: int, hi: int) -> Maker:
    """Int64, each of lo … hi − 1 equally likely."""
    return _UniformInt(lo, hi)


def uniform_float(lo: float, hi: float) -> Maker:
    """Float64, uniform in [lo, hi)."""
    return _UniformFloat(lo, hi)


def words(n: int) -> Maker:
    """String, one of `n` different words, equally likely."""
    if not 0 < n <= 1 << 24:
        raise ConfigError(f"words: n is 1 to 2²⁴; found {n}")
    return _Choice([f"word{number}" for number in range(n)], ["words", n])


def choice(values: Sequence[Any]) -> Maker:
    """One of the given values, equally likely; their type is what Polars infers."""
    return _Choice(values, ["choice", [str(value) for value in values]])


def timestamps(start: dt.datetime, every: dt.timedelta) -> Maker:
    """Datetime in microseconds: `start` plus the row's number times `every`."""
    return _Timestamps(start, every)
