"""Sums as integers on a fixed grid of 32-bit limbs, exact and in one canonical form.

Limb *j* weighs 2^(32·j) units.  Limbs are held in int64 while they are added, which is why addition here is
exact, associative and commutative: the result cannot depend on how rows were cut into batches or spread over
workers.

`Packed` is the canonical form, used in partials and in state alike.  Each sum is a run of uint32: a header,
then its limbs in two's complement from the lowest that is not zero to the highest that is needed; zero is an
empty run.  Bits 0 to 15 of the header are the index of the lowest limb; bit 16 says that six more words
follow: the weights of NaN, +∞ and −∞ as int64, which no finite input pays for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]

LIMB = 32
MASK = (1 << LIMB) - 1
_SPECIAL = 1 << 16
CELLS = 1 << 23
"""Limbs held at once: with exponents from end to end a group takes 70."""


class Packed(NamedTuple):
    """Sums in canonical form: sum *i* is the next `lengths[i]` words of `words`."""

    lengths: I64
    words: U32

    def to_series(self) -> pl.Series:
        offsets = np.zeros(len(self.lengths) + 1, dtype=np.int64)
        np.cumsum(self.lengths, out=offsets[1:])
        return pl.Series(
            pl.from_arrow(pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(self.words)))
        )

    @staticmethod
    def from_series(series: pl.Series) -> Packed:
        lengths = series.list.len().to_numpy().astype(np.int64)
        words = series.explode(empty_as_null=False).to_numpy() if lengths.any() else np.empty(0, np.uint32)
        return Packed(lengths, words)

    def to_bytes(self) -> list[bytes]:
        data = self.words.tobytes()
        ends = (np.cumsum(self.lengths) * 4).tolist()
        return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    @staticmethod
    def from_bytes(rows: Sequence[bytes]) -> Packed:
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)) // 4
        return Packed(lengths, np.frombuffer(b"".join(rows), dtype=np.uint32))

    @staticmethod
    def zeros(count: int) -> Packed:
        return Packed(np.zeros(count, dtype=np.int64), np.empty(0, dtype=np.uint32))


def merge(count: int, parts: Sequence[tuple[Packed, I64]]) -> Packed:
    """Add packed sums up into `count` groups; each part says the group of each of its sums, ascending."""
    low, high, specials = window([packed for packed, _ in parts])
    width = high - low + 2
    step = max(1, CELLS // width)
    blocks = [
        _merge(
            min(step, count - begin),
            [part_of(part, begin, begin + step) for part in parts],
            low,
            width,
            specials,
        )
        for begin in range(0, count, step)
    ]
    return join(blocks)


def _merge(count: int, parts: Sequence[tuple[Packed, I64]], low: int, width: int, specials: bool) -> Packed:
    limbs, special = spread(count, parts, low, width, specials)
    carry(limbs)
    return pack(limbs, low, special)


def carry(limbs: I64) -> None:
    """Bring every limb but the last into [0, 2³²); the last keeps the sign."""
    for place in range(len(limbs) - 1):
        limbs[place + 1] += limbs[place] >> LIMB
        limbs[place] &= MASK


def pack(limbs: I64, low: int, special: I64 | None) -> Packed:
    """The canonical form of carried limbs whose last one is 0 or −1."""
    width, count = limbs.shape
    places = np.arange(width)[:, None]
    fill = limbs[-1] & MASK
    words = limbs & MASK
    nonzero = words != 0
    some = nonzero.any(axis=0)
    first = nonzero.argmax(axis=0)
    above = words != fill
    last = np.where(above.any(axis=0), width - above[::-1].argmax(axis=0), 0)
    last = np.maximum(last, first + 1)
    top = np.take_along_axis(words, last[None, :] - 1, axis=0)[0]
    last += np.not_equal(top >> (LIMB - 1), fill & 1)
    columns = width + 1 if special is None else width + 7
    table = np.zeros((count, columns), dtype=np.uint32)
    table[:, 0] = np.where(some, first + low, 0)
    table[:, 1 : width + 1] = words.T
    used = np.zeros((count, columns), dtype=np.bool_)
    used[:, 0] = some
    used[:, 1 : width + 1] = ((places >= first) & (places < last) & some).T
    if special is not None:
        odd = np.logical_or.reduce(special != 0, axis=0)
        table[:, 0] |= np.where(odd, np.uint32(_SPECIAL), np.uint32(0))
        table[:, width + 1 :] = np.ascontiguousarray(special.T).view(np.uint32)
        used[:, 0] |= odd
        used[:, width + 1 :] = odd[:, None]
    return Packed(used.sum(axis=1), table[used])


def window(parts: Sequence[Packed]) -> tuple[int, int, bool]:
    """The range of limbs that any sum has, and whether any has specials."""
    low, high, specials = 1 << 30, 0, False
    for packed in parts:
        _, lows, limbs, special = _headers(packed)
        specials = specials or bool(special.any())
        some = limbs > 0
        if some.any():
            low = min(low, int(lows[some].min()))
            high = max(high, int((lows + limbs)[some].max()))
    return min(low, high), high, specials


def spread(
    count: int, parts: Sequence[tuple[Packed, I64]], low: int, width: int, specials: bool
) -> tuple[I64, I64 | None]:
    """Add packed sums to a fresh matrix of limbs."""
    matrix = np.zeros((width, count), dtype=np.int64)
    special = np.zeros((3, count), dtype=np.int64) if specials else None
    for packed, target in parts:
        starts, lows, limbs, odd = _headers(packed)
        owner = target[packed.lengths > 0]
        within = np.arange(int(limbs.sum())) - np.repeat(np.cumsum(limbs) - limbs, limbs)
        values = packed.words[np.repeat(starts + 1, limbs) + within].astype(np.int64)
        some = limbs > 0
        tops = (np.cumsum(limbs) - 1)[some]
        values[tops] -= (values[tops] >> (LIMB - 1)) << LIMB
        np.add.at(
            matrix.reshape(-1),
            (np.repeat(lows - low, limbs) + within) * count + np.repeat(owner, limbs),
            values,
        )
        if special is not None and odd.any():
            place = (starts + 1 + limbs)[odd][:, None] + np.arange(6)
            counts = np.ascontiguousarray(packed.words[place]).view(np.int64)
            for row in range(3):
                np.add.at(special[row], owner[odd], counts[:, row])
    return matrix, special


def part_of(part: tuple[Packed, I64], begin: int, end: int) -> tuple[Packed, I64]:
    """The sums of a part whose groups are in [begin, end), renumbered from 0."""
    packed, target = part
    first, last = np.searchsorted(target, [begin, end])
    if first == 0 and last == len(target):
        return packed, target - begin
    offset = int(packed.lengths[:first].sum())
    lengths = packed.lengths[first:last]
    return Packed(lengths, packed.words[offset : offset + int(lengths.sum())]), target[first:last] - begin


def join(blocks: Sequence[Packed]) -> Packed:
    if len(blocks) == 1:
        return blocks[0]
    if not blocks:
        return Packed.zeros(0)
    return Packed(np.concatenate([b.lengths for b in blocks]), np.concatenate([b.words for b in blocks]))


def _headers(packed: Packed) -> tuple[I64, I64, I64, npt.NDArray[np.bool_]]:
    """Of the sums that are not empty: first word, lowest limb, number of limbs, whether specials follow."""
    starts = (np.cumsum(packed.lengths) - packed.lengths)[packed.lengths > 0]
    header = packed.words[starts].astype(np.int64)
    special = (header & _SPECIAL) != 0
    limbs = packed.lengths[packed.lengths > 0] - 1 - 6 * special
    return starts, header & 0xFFFF, limbs, special
