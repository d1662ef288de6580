"""Which rows belong to the same key: before the exchange and after it.

Groups are numbered, and everything else is a scatter by that number.  Measured on one core with 2 M
rows over 100,000 keys: numbering by Arrow's dictionary encoding runs at 40 to 80 M rows/s (integers) and 5 to 9 M
(strings; short ones are numbered as integers), `np.add.at` at 400 M; one Polars `group_by` of a count and a sum is
12 M and 6 M.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from anabranch.model.batch import HASH, U64
from anabranch.operators.known import Known

I64 = npt.NDArray[np.int64]

_LENGTH = np.uint64(0xFFFFFFFF)
_INLINE = 12
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
INTEGERS = (pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32)


@dataclass(frozen=True, slots=True)
class Groups:
    """Row *i* belongs to group `index[i]`, 0 ≤ index < `count`.

    Every group has a row, unless its key was known from an earlier batch.
    """

    index: I64
    count: int
    keys: pl.DataFrame
    """The key of each group."""


def group_rows(frame: pl.DataFrame, keys: Sequence[str], known: Known | None = None) -> Groups:
    """Number the distinct keys of a batch; null is a key.

    Args:
        known: Keys of earlier batches, which are found faster.  Given, some groups may have no row.
    """
    numbered = _number(frame.get_column(keys[0]), known if len(keys) == 1 else None)
    if len(keys) == 1:
        return Groups(numbered.index, numbered.count, numbered.values.alias(keys[0]).to_frame())
    for name in keys[1:]:
        more = _number(frame.get_column(name))
        # Both counts are at most the number of rows, so the product is far below 2⁶³.
        numbered = _number(pl.Series(numbered.index * more.count + more.index))
    return Groups(numbered.index, numbered.count, frame.select(keys)[_first_rows(numbered)])


def scatter(index: I64, count: int, values: I64) -> I64:
    """Add `values` up by group."""
    sums = np.zeros(count, dtype=np.int64)
    np.add.at(sums, index, values)
    return sums


@dataclass(frozen=True, slots=True)
class _Numbered:
    """A column's rows, numbered by value: `values[index[i]]` is row *i*."""

    index: I64
    count: int
    values: pl.Series


def _number(column: pl.Series, known: Known | None = None) -> _Numbered:
    found = None
    plain = len(column) > 0 and not column.null_count()
    integers = plain and column.dtype in INTEGERS
    if integers:
        found = (None if known is None else _recalled(column, known)) or _dense(column)
    elif plain and column.dtype in (pl.String, pl.Binary):
        found = _short(column)
    if found is not None:
        return found
    encoded = column.to_arrow().dictionary_encode("encode")
    values = pl.Series(encoded.dictionary, dtype=column.dtype)
    if integers and known is not None:
        known.learn(_words(values), len(column))
    return _Numbered(encoded.indices.to_numpy().astype(np.int64), len(values), values)


def _recalled(column: pl.Series, known: Known) -> _Numbered | None:
    """Number integers of any range that mostly have come before."""
    found = known.number(_words(column))
    if found is None:
        return None
    index, words = found
    return _Numbered(index, len(words), pl.Series(words.view(np.int64)).cast(column.dtype))


def _words(column: pl.Series) -> U64:
    return column.to_numpy().astype(np.int64, copy=False).view(np.uint64)


def _short(column: pl.Series) -> _Numbered | None:
    """Number strings of at most 12 bytes, several times as fast as by hashing them one by one.

    Polars keeps such a string inside its 16-byte view, length and all, so that two words are the string.  They are
    mixed to one and numbered as an integer; that no two strings were mixed to the same is checked.
    """
    view = column.to_arrow(compat_level=pl.CompatLevel.newest())
    words = np.frombuffer(view.buffers()[1], dtype=np.uint64)
    words = words[2 * view.offset : 2 * (view.offset + len(view))].reshape(-1, 2)
    head, tail = words[:, 0].copy(), words[:, 1].copy()
    if (head & _LENGTH).max() > _INLINE:
        return None
    mixed = head * _SPREAD
    mixed ^= mixed >> np.uint64(29)
    mixed += tail
    numbered = _number(pl.Series(mixed.view(np.int64)))
    first = _first_rows(numbered)
    if (head[first][numbered.index] != head).any() or (tail[first][numbered.index] != tail).any():
        return None
    return _Numbered(numbered.index, numbered.count, column[first])


def _first_rows(numbered: _Numbered) -> I64:
    """A row of each group."""
    rows = np.empty(numbered.count, dtype=np.int64)
    rows[numbered.index] = np.arange(len(numbered.index))
    return rows


def _dense(column: pl.Series) -> _Numbered | None:
    """Number integers of a narrow range without hashing, three times as fast; where no integer of the range is missing,
    they are their own numbers.

    Every copy counts: of millions of rows, each costs as much in page faults as in arithmetic.
    """
    values = column.to_numpy()
    low, high = int(values.min()), int(values.max())
    if high - low >= 2 * len(values):
        return None
    values = values.astype(np.int64, copy=False)
    offsets = values - low if low else values
    seen = np.zeros(high - low + 1, dtype=np.bool_)
    seen[offsets] = True
    found = pl.Series(np.flatnonzero(seen) + low).cast(column.dtype)
    index = offsets if len(found) == len(seen) else (np.cumsum(seen) - 1)[offsets]
    return _Numbered(index, len(found), found)


@dataclass(frozen=True, slots=True)
class Segments:
    """Partials of one or many senders, seen as runs of rows of the same key, sorted by (hash, key)."""

    frame: pl.DataFrame
    index: I64
    """The segment of each row, ascending without gaps."""
    starts: I64
    """The first row of each segment."""
    keys: pl.DataFrame
    hashes: U64

    @property
    def count(self) -> int:
        return len(self.starts)

    def total(self, column: str) -> I64:
        """The sum of an Int64 column over each segment; wraps around at 2⁶³."""
        values = self.frame.get_column(column).to_numpy()
        if len(self.starts) == len(values):
            return values.copy()
        return np.add.reduceat(values, self.starts)


def segment(frame: pl.DataFrame, keys: Sequence[str]) -> Segments:
    """Find the runs of equal keys in a frame that is sorted by `__hash`."""
    hashes = frame.get_column(HASH).to_numpy()
    begins = np.ones(len(hashes), dtype=np.bool_)
    np.not_equal(hashes[1:], hashes[:-1], out=begins[1:])
    if not begins.all():
        differs = _differs(frame, keys)
        if (differs & ~begins).any():
            # Two keys share a hash: bring equal keys together, in an order that no sender decides.
            frame = frame.sort(HASH, *keys, maintain_order=True)
            begins = begins | _differs(frame, keys)
    starts = np.flatnonzero(begins)
    chosen = frame if len(starts) == len(frame) else frame[starts]
    return Segments(frame, np.cumsum(begins) - 1, starts, chosen.select(keys), hashes[starts])


def _differs(frame: pl.DataFrame, keys: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Whether a row's key differs from the row's before it."""
    differs = np.zeros(len(frame), dtype=np.bool_)
    for name in keys:
        column = frame.get_column(name)
        differs[1:] |= column[1:].ne_missing(column[:-1]).to_numpy()
    return differs
