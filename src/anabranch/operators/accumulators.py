"""What a group remembers of a column, and how rows, partials and stored records become the next record.

An accumulator is a commutative sum: `partial` adds rows up where they are made, `combine` adds up partials there,
`update` adds partials to what is stored.  All are exact, so a record depends on the rows alone and never on their
order or place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from anabranch.errors import RecordError
from anabranch.operators.exactsum import sum_doubles, sum_integers, sum_wide, to_doubles, to_words
from anabranch.operators.grouping import I64, Groups, Segments, scatter
from anabranch.operators.kernel import KeyedState
from anabranch.operators.limbs import Packed, merge
from anabranch.operators.partials import Partials

_INT64_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch before the exchange."""

    frame: pl.DataFrame
    groups: Groups
    weights: I64 | None
    """None when every weight is 1, which saves the multiplications."""
    totals: I64
    """Σ weight of each group."""

    def bound(self) -> int:
        """No sum of |weight| in this batch is larger."""
        if self.weights is None:
            return len(self.groups.index)
        return len(self.weights) * max(int(self.weights.max(initial=0)), -int(self.weights.min(initial=0)))

    def scatter(self, index: I64, values: I64) -> I64:
        """Add `values` up by group."""
        return scatter(index, self.groups.count, values)


@dataclass(frozen=True, slots=True)
class Touched:
    """The groups of a step in one worker, after the exchange."""

    segments: Segments
    keys: Sequence[bytes]
    state: KeyedState
    operator: str


class Stored(NamedTuple):
    """An accumulator's share of the records: a fixed part each, and a tail of any length."""

    fixed: npt.NDArray[Any]
    tails: list[bytes]


class Accumulator(ABC):
    """One column's share of a group's record.

    All bytes zero and an empty tail is the record of a group without rows: absent and empty are the same.
    """

    dtype: np.dtype[Any]
    tailed: bool = False
    tables: tuple[str, ...] = ()
    """Tables that it keeps beside its share of the record."""

    @abstractmethod
    def partial(self, rows: Rows) -> dict[str, pl.Series]:
        """Columns of the partials, one row a group; their names begin with `__p_`."""

    @abstractmethod
    def combine(self, partials: Partials) -> dict[str, pl.Series]:
        """The columns of `partial`, of several partials added up: one row a group."""

    @abstractmethod
    def update(self, touched: Touched, old: Stored) -> Stored:
        """Add the partials to the stored records."""

    @abstractmethod
    def result(self, kind: str, stored: Stored) -> pl.Series:
        """The value that a user sees."""


def add_checked(old: I64, more: I64, operator: str, what: str) -> I64:
    """Add int64 columns; a sum that does not fit is the user's to mend, not to be wrapped around."""
    new = old + more
    if (((old ^ new) & (more ^ new)) < 0).any():
        raise RecordError(f"operator {operator}", f"{what} overflows int64; cast the column to a decimal")
    return new


class _Sum(Accumulator):
    """What sums of all types share: the weight of the values that are not null."""

    def __init__(self, column: str, place: int) -> None:
        self.column = column
        self._weight, self._sum, self._wide = (f"__p_{place}{suffix}" for suffix in "nsx")

    def _present(self, rows: Rows) -> tuple[pl.Series, I64, I64 | None, I64]:
        """The values that are not null, their groups and weights, and the weight of each group."""
        column = rows.frame.get_column(self.column)
        if not column.null_count():
            return column, rows.groups.index, rows.weights, rows.totals
        valid = column.is_not_null().to_numpy()
        index = rows.groups.index[valid]
        weights = None if rows.weights is None else rows.weights[valid]
        ones = np.ones(len(index), dtype=np.int64) if weights is None else weights
        return column.drop_nulls(), index, weights, rows.scatter(index, ones)

    def _count(self, touched: Touched, old: Stored) -> I64:
        more = touched.segments.total(self._weight)
        return add_checked(old.fixed["n"], more, touched.operator, f"count of column {self.column!r}")


class IntegerSum(_Sum):
    """Σ of integers in int64.  A batch whose own sum might not fit travels as exact limbs instead."""

    dtype = np.dtype([("n", "<i8"), ("s", "<i8")])

    def partial(self, rows: Rows) -> dict[str, pl.Series]:
        column, index, weights, counts = self._present(rows)
        low, high = int(column.min() or 0), int(column.max() or 0)  # type: ignore[arg-type]
        count = rows.groups.count
        wide = Packed.zeros(count)
        if max(-low, high) * rows.bound() <= _INT64_MAX:
            values = column.cast(pl.Int64).to_numpy()
            sums = rows.scatter(index, values if weights is None else values * weights)
        else:
            whole = column.to_numpy() if column.dtype == pl.UInt64 else column.cast(pl.Int64).to_numpy()
            sums, wide = np.zeros(count, dtype=np.int64), sum_integers(index, count, whole, weights)
        return {
            self._weight: pl.Series(counts),
            self._sum: pl.Series(sums),
            self._wide: wide.to_series(),
        }

    def combine(self, partials: Partials) -> dict[str, pl.Series]:
        count = partials.count
        longest = int(partials.sizes.max(initial=1))
        sums = [piece.get_column(self._sum).to_numpy() for piece in partials.pieces]
        largest = max(max(-int(some.min(initial=0)), int(some.max(initial=0))) for some in sums)
        plain = not any(piece.get_column(self._wide).list.len().sum() for piece in partials.pieces)
        if plain and largest * longest <= _INT64_MAX:
            total, wide = partials.total(self._sum), Packed.zeros(count)
        else:
            own = sum_integers(partials.index, count, np.concatenate(sums), None)
            total = np.zeros(count, dtype=np.int64)
            wide = merge(count, [(own, np.arange(count)), partials.packed(self._wide)])
        return {
            self._weight: pl.Series(partials.total(self._weight)),
            self._sum: pl.Series(total),
            self._wide: wide.to_series(),
        }

    def update(self, touched: Touched, old: Stored) -> Stored:
        new = np.empty_like(old.fixed)
        new["n"] = self._count(touched, old)
        segments = touched.segments
        sums = segments.frame.get_column(self._sum).to_numpy()
        stored = np.ascontiguousarray(old.fixed["s"])
        extra = Packed.from_series(segments.frame.get_column(self._wide))
        longest = int(np.diff(segments.starts, append=len(sums)).max(initial=1))
        largest = max(abs(int(side)) for part in (sums, stored) for side in (part.min(), part.max()))
        if not len(extra.words) and largest * (longest + 1) <= _INT64_MAX:
            new["s"] = stored + segments.total(self._sum)
        else:
            new["s"] = self._exact(touched, stored, sums, extra)
        return Stored(new, old.tails)

    def _exact(self, touched: Touched, stored: I64, sums: I64, extra: Packed) -> I64:
        segments = touched.segments
        every = np.arange(segments.count)
        each = np.arange(len(sums))
        parts = [
            (sum_integers(every, segments.count, stored, None), every),
            (sum_integers(each, len(sums), sums, None), segments.index),
            (extra, segments.index),
        ]
        words, fits = to_words(merge(segments.count, parts), 2)
        if not fits.all():
            key = segments.keys.row(int(np.flatnonzero(~fits)[0]), named=True)
            raise RecordError(
                f"operator {touched.operator}",
                f"sum of column {self.column!r} overflows int64; cast the column to a decimal",
                repr(key),
            )
        return np.ascontiguousarray(words).view(np.int64).ravel()

    def result(self, kind: str, stored: Stored) -> pl.Series:
        counts, sums = stored.fixed["n"], stored.fixed["s"]
        if kind == "sum":
            return _nulled(pl.Series(np.ascontiguousarray(sums)), counts)
        return _mean(sums.astype(np.float64), counts)


class _LimbSum(_Sum):
    """Σ kept as canonical limbs in the tail of the record."""

    dtype = np.dtype([("n", "<i8")])
    tailed = True

    def partial(self, rows: Rows) -> dict[str, pl.Series]:
        column, index, weights, counts = self._present(rows)
        sums = self._pack(column, index, rows.groups.count, weights)
        return {self._weight: pl.Series(counts), self._wide: sums.to_series()}

    def combine(self, partials: Partials) -> dict[str, pl.Series]:
        sums = merge(partials.count, [partials.packed(self._wide)])
        return {self._weight: pl.Series(partials.total(self._weight)), self._wide: sums.to_series()}

    @abstractmethod
    def _pack(self, column: pl.Series, index: I64, count: int, weights: I64 | None) -> Packed: ...

    def update(self, touched: Touched, old: Stored) -> Stored:
        new = np.empty_like(old.fixed)
        new["n"] = self._count(touched, old)
        segments = touched.segments
        every = np.arange(segments.count)
        partials = Packed.from_series(segments.frame.get_column(self._wide))
        sums = merge(segments.count, [(Packed.from_bytes(old.tails), every), (partials, segments.index)])
        self._check(sums, touched)
        return Stored(new, sums.to_bytes())

    def _check(self, sums: Packed, touched: Touched) -> None:
        """Refuse a sum that has no value of the result's type."""


class FloatSum(_LimbSum):
    """Σ of floats without rounding; only the result is rounded, once, to the nearest double."""

    def _pack(self, column: pl.Series, index: I64, count: int, weights: I64 | None) -> Packed:
        return sum_doubles(index, count, column.cast(pl.Float64).to_numpy(), weights)

    def result(self, kind: str, stored: Stored) -> pl.Series:
        sums, counts = to_doubles(Packed.from_bytes(stored.tails)), stored.fixed["n"]
        return _nulled(pl.Series(sums), counts) if kind == "sum" else _mean(sums, counts)


class DecimalSum(_LimbSum):
    """Σ of decimals, exact; the result has 38 digits and the column's scale."""

    def __init__(self, column: str, place: int, scale: int) -> None:
        super().__init__(column, place)
        self.scale = scale

    def _pack(self, column: pl.Series, index: I64, count: int, weights: I64 | None) -> Packed:
        if column.is_empty():
            return Packed.zeros(count)
        array = column.cast(pl.Decimal(38, self.scale)).to_arrow()
        halves = np.frombuffer(array.buffers()[1], dtype=np.uint64)
        halves = halves[2 * array.offset : 2 * (array.offset + len(array))].reshape(-1, 2)
        high = np.ascontiguousarray(halves[:, 1]).view(np.int64)
        return sum_wide(index, count, np.ascontiguousarray(halves[:, 0]), high, weights)

    def _check(self, sums: Packed, touched: Touched) -> None:
        words, fits = to_words(sums, 4)
        # 10³⁸ is 1,262,177,448.3 · 2⁹⁶: only sums near it or beyond need a look at all digits.
        near = np.abs(words[:, 3].astype(np.int32).astype(np.int64)) >= 10**38 >> 96
        for place in np.flatnonzero(near | ~fits).tolist():
            value = int.from_bytes(words[place].tobytes(), "little", signed=True)
            if not fits[place] or abs(value) >= 10**38:
                raise RecordError(
                    f"operator {touched.operator}",
                    f"sum of column {self.column!r} overflows 38 digits; cast it to a smaller scale",
                    repr(touched.segments.keys.row(place, named=True)),
                )

    def result(self, kind: str, stored: Stored) -> pl.Series:
        sums, counts = Packed.from_bytes(stored.tails), stored.fixed["n"]
        if kind == "mean":
            return _mean(to_doubles(sums, unit=0) / 10.0**self.scale, counts)
        words, _ = to_words(sums, 4)
        buffers = [None, pa.py_buffer(np.ascontiguousarray(words).tobytes())]
        array = pa.Array.from_buffers(pa.decimal128(38, self.scale), len(counts), buffers)
        return _nulled(pl.Series(pl.from_arrow(array)), counts)


def _nulled(values: pl.Series, counts: I64) -> pl.Series:
    """Null where no value is present."""
    absent = counts == 0
    return values.set(pl.Series(absent), None) if absent.any() else values


def _mean(sums: npt.NDArray[np.float64], counts: I64) -> pl.Series:
    present = np.where(counts == 0, 1, counts)
    # Adding 0.0 turns −0.0 (zero over a negative weight) into 0.0.
    return _nulled(pl.Series(sums / present + 0.0), counts)
