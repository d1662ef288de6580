"""Exact sums: weighted integers, decimals and doubles, added up without rounding.

A sum is an integer on a fixed grid of 32-bit limbs; limb *j* weighs 2^(32·j) units.  The unit is 1 for
integers, the last digit for decimals, and 2^−1074 (the smallest double) for doubles.  Limbs are held in int64
while they are added, which is why addition here is exact, associative and commutative: the result cannot
depend on how rows were cut into batches or spread over workers.

`Packed` is the canonical form, used in partials and in state alike.  Each sum is a run of uint32: a header,
then its limbs in two's complement from the lowest that is not zero to the highest that is needed; zero is an
empty run.  Bits 0 to 15 of the header are the index of the lowest limb; bit 16 says that six more words
follow: the weights of NaN, +∞ and −∞ as int64, which no finite input pays for.

Measured on one core, 2 M doubles of similar size over 100,000 groups: 25 M rows/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
F64 = npt.NDArray[np.float64]

_LIMB = 32
_MASK = (1 << _LIMB) - 1
_SPECIAL = 1 << 16
_CHUNK = 1 << 15
"""Rows decomposed at once: the temporaries stay in the second-level cache."""
_CELLS = 1 << 23
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


def sum_integers(index: I64, count: int, values: npt.NDArray[Any], weights: I64 | None) -> Packed:
    """Σ weight·value of each group, of int64 or uint64 values."""
    if values.dtype == np.uint64:
        return _sum(index, count, [(values, None)], np.ones(1, np.int64), weights)
    magnitude = np.abs(values).view(np.uint64)  # |−2⁶³| wraps to −2⁶³, whose bits are 2⁶³
    return _sum(index, count, [(magnitude, None)], np.where(values < 0, np.int64(-1), np.int64(1)), weights)


def sum_wide(index: I64, count: int, low: U64, high: I64, weights: I64 | None) -> Packed:
    """Σ weight·value of each group, of 128-bit values in two's complement halves."""
    negative = high < 0
    sign = np.where(negative, np.int64(-1), np.int64(1))
    flipped_low = np.where(negative, ~low + np.uint64(1), low)
    carry = (negative & (low == 0)).astype(np.int64)
    flipped_high = np.where(negative, ~high + carry, high).view(np.uint64)
    places = [(flipped_low, None), (flipped_high, np.full(1, 64, np.int64))]
    return _sum(index, count, places, sign, weights)


def sum_doubles(index: I64, count: int, values: F64, weights: I64 | None) -> Packed:
    """Σ weight·value of each group, of doubles; NaN and ±∞ are counted apart."""
    finite = np.isfinite(values)
    special: I64 | None = None
    if not finite.all():
        special = np.zeros((3, count), dtype=np.int64)
        ones = np.ones(len(values), dtype=np.int64) if weights is None else weights
        for row, mask in enumerate((np.isnan(values), values == np.inf, values == -np.inf)):
            np.add.at(special[row], index[mask], ones[mask])
        index, values = index[finite], values[finite]
        weights = None if weights is None else weights[finite]
    bits = np.ascontiguousarray(values).view(np.int64)
    exponent = (bits >> 52) & 0x7FF
    fraction = bits & ((1 << 52) - 1)
    magnitude = np.where(exponent > 0, fraction | (1 << 52), fraction).view(np.uint64)
    place = np.maximum(exponent, 1) - 1
    sign = np.where(bits < 0, np.int64(-1), np.int64(1))
    return _sum(index, count, [(magnitude, place)], sign, weights, special)


def merge(count: int, parts: Sequence[tuple[Packed, I64]]) -> Packed:
    """Add packed sums up into `count` groups; each part says the group of each of its sums, ascending."""
    low, high, specials = _window([packed for packed, _ in parts])
    width = high - low + 2
    step = max(1, _CELLS // width)
    blocks = [
        _merge(
            min(step, count - begin),
            [_slice(part, begin, begin + step) for part in parts],
            low,
            width,
            specials,
        )
        for begin in range(0, count, step)
    ]
    return _join(blocks)


def to_doubles(packed: Packed, unit: int = -1074) -> F64:
    """The nearest double to each sum of units 2^unit, ties to even; ±∞ beyond the range."""
    count = len(packed.lengths)
    if not len(packed.words):
        return np.zeros(count, dtype=np.float64)
    low, high, specials = _window([packed])
    step = max(1, _CELLS // (high - low + 4))
    every = np.arange(count)
    result = np.empty(count, dtype=np.float64)
    for begin in range(0, count, step):
        piece, own = _slice((packed, every), begin, begin + step)
        result[begin : begin + step] = _round(piece, own, low, high - low + 4, specials, unit)
    return result


def to_words(packed: Packed, words: int) -> tuple[U32, npt.NDArray[np.bool_]]:
    """Each sum as a row of `words` words of two's complement, and whether it fits in them."""
    count = len(packed.lengths)
    _, high, _ = _window([packed])
    width = max(high, words) + 2
    limbs, _ = _spread(count, [(packed, np.arange(count))], 0, width, False)
    _carry(limbs)
    fill = np.where(limbs[words - 1] >> (_LIMB - 1), np.int64(_MASK), np.int64(0))
    fits = (limbs[words:-1] == fill).all(axis=0) & (limbs[-1] & _MASK == fill)
    return limbs[:words].T.astype(np.uint32), fits


def _sum(
    index: I64,
    count: int,
    places: Sequence[tuple[U64, I64 | None]],
    sign: I64,
    weights: I64 | None,
    special: I64 | None = None,
) -> Packed:
    """Σ weight · sign · Σ magnitude · 2^place; `sign` and a place of one element hold for all rows."""
    live: list[tuple[U64, I64]] = []
    low, high = 1 << 30, -1
    for magnitude, place in places:
        place = np.zeros(1, dtype=np.int64) if place is None else place
        used = place if len(place) == 1 else place[magnitude != 0]
        if len(used) and magnitude.any():
            live.append((magnitude, place))
            low, high = min(low, int(used.min()) >> 5), max(high, int(used.max()) >> 5)
    if not live:
        return _pack(np.zeros((1, count), dtype=np.int64), 0, special)
    width = high - low + 7  # three limbs of a row, two of its weight, two of carries
    step = max(1, _CELLS // width)
    blocks = []
    for begin in range(0, count, step):
        size = min(step, count - begin)
        mine = np.s_[:] if size == count else np.flatnonzero((index >= begin) & (index < begin + size))
        limbs = np.zeros((width, size), dtype=np.int64)
        for magnitude, place in live:
            _add(
                limbs,
                index[mine] - begin if begin else index[mine],
                magnitude[mine],
                (place[mine] if len(place) > 1 else place) - (low << 5),
                sign[mine] if len(sign) > 1 else sign,
                None if weights is None else weights[mine],
            )
        _carry(limbs)
        blocks.append(_pack(limbs, low, None if special is None else special[:, begin : begin + size]))
    return _join(blocks)


def _add(limbs: I64, index: I64, magnitude: U64, place: I64, sign: I64, weights: I64 | None) -> None:
    """Add rows to limbs, in pieces small enough that no cell leaves int64."""
    largest = 1 if weights is None else int(max(weights.max(initial=0), -int(weights.min(initial=0))))
    if largest >= 1 << 16:
        assert weights is not None
        sign = sign * np.sign(weights)
        size = np.abs(weights).view(np.uint64)
        for shift in range(0, 64, 16):
            piece = ((size >> np.uint64(shift)) & np.uint64(0xFFFF)).view(np.int64)
            if piece.any():
                _add(limbs, index, magnitude, place + shift, sign, piece)
        return
    span = limbs.shape[1]
    cells = limbs.reshape(-1)
    carried = 0
    for begin in range(0, len(index), _CHUNK):
        part = np.s_[begin : begin + _CHUNK]
        own = place[part] if len(place) > 1 else place
        # A place below the window belongs to a row of magnitude zero.
        own = np.maximum(own, 0)
        cell = (own >> 5) * span + index[part]
        shift = (own & 31).view(np.uint64)
        value = magnitude[part]
        factor = sign[part] if len(sign) > 1 else sign
        if weights is not None:
            factor = factor * weights[part]
        rest = value >> (np.uint64(32) - shift)
        mask = np.uint64(_MASK)
        for words in ((value << shift) & mask, rest & mask, rest >> np.uint64(32)):
            np.add.at(cells, cell, words.view(np.int64) * factor)
            cell = cell + span
        carried += _CHUNK * largest
        if carried >= 1 << 29:
            _carry(limbs)
            carried = 0


def _carry(limbs: I64) -> None:
    """Bring every limb but the last into [0, 2³²); the last keeps the sign."""
    for place in range(len(limbs) - 1):
        limbs[place + 1] += limbs[place] >> _LIMB
        limbs[place] &= _MASK


def _pack(limbs: I64, low: int, special: I64 | None) -> Packed:
    """The canonical form of carried limbs whose last one is 0 or −1."""
    width, count = limbs.shape
    places = np.arange(width)[:, None]
    fill = limbs[-1] & _MASK
    words = limbs & _MASK
    nonzero = words != 0
    some = nonzero.any(axis=0)
    first = nonzero.argmax(axis=0)
    above = words != fill
    last = np.where(above.any(axis=0), width - above[::-1].argmax(axis=0), 0)
    last = np.maximum(last, first + 1)
    top = np.take_along_axis(words, last[None, :] - 1, axis=0)[0]
    last += np.not_equal(top >> (_LIMB - 1), fill & 1)
    columns = width + 1 if special is None else width + 7
    table = np.zeros((count, columns), dtype=np.uint32)
    table[:, 0] = np.where(some, first + low, 0)
    table[:, 1 : width + 1] = words.T
    used = np.zeros((count, columns), dtype=np.bool_)
    used[:, 0] = some
    used[:, 1 : width + 1] = ((places >= first) & (places < last) & some).T
    if special is not None:
        odd = special.any(axis=0)
        table[:, 0] |= np.where(odd, np.uint32(_SPECIAL), np.uint32(0))
        table[:, width + 1 :] = np.ascontiguousarray(special.T).view(np.uint32)
        used[:, 0] |= odd
        used[:, width + 1 :] = odd[:, None]
    return Packed(used.sum(axis=1), table[used])


def _headers(packed: Packed) -> tuple[I64, I64, I64, npt.NDArray[np.bool_]]:
    """Of the sums that are not empty: first word, lowest limb, number of limbs, whether specials follow."""
    starts = (np.cumsum(packed.lengths) - packed.lengths)[packed.lengths > 0]
    header = packed.words[starts].astype(np.int64)
    special = (header & _SPECIAL) != 0
    limbs = packed.lengths[packed.lengths > 0] - 1 - 6 * special
    return starts, header & 0xFFFF, limbs, special


def _window(parts: Sequence[Packed]) -> tuple[int, int, bool]:
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


def _spread(
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
        values[tops] -= (values[tops] >> (_LIMB - 1)) << _LIMB
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


def _merge(count: int, parts: Sequence[tuple[Packed, I64]], low: int, width: int, specials: bool) -> Packed:
    limbs, special = _spread(count, parts, low, width, specials)
    _carry(limbs)
    return _pack(limbs, low, special)


def _slice(part: tuple[Packed, I64], begin: int, end: int) -> tuple[Packed, I64]:
    """The sums of a part whose groups are in [begin, end), renumbered from 0."""
    packed, target = part
    first, last = np.searchsorted(target, [begin, end])
    if first == 0 and last == len(target):
        return packed, target - begin
    offset = int(packed.lengths[:first].sum())
    lengths = packed.lengths[first:last]
    return Packed(lengths, packed.words[offset : offset + int(lengths.sum())]), target[first:last] - begin


def _join(blocks: Sequence[Packed]) -> Packed:
    if len(blocks) == 1:
        return blocks[0]
    if not blocks:
        return Packed.zeros(0)
    return Packed(np.concatenate([b.lengths for b in blocks]), np.concatenate([b.words for b in blocks]))


def _round(packed: Packed, target: I64, low: int, width: int, specials: bool, unit: int) -> F64:
    """Round half to even by hand: the top 64 bits of the sum, and whether anything is below them."""
    count = len(target)
    # Two limbs of zeros below, so that the three highest always exist.
    limbs, special = _spread(count, [(packed, target)], low - 2, width, specials)
    _carry(limbs)
    negative = limbs[-1] < 0
    np.negative(limbs, where=negative, out=limbs)
    _carry(limbs)
    nonzero = limbs != 0
    top = width - 1 - nonzero[::-1].argmax(axis=0)
    top = np.maximum(top, 2)
    first = nonzero.argmax(axis=0)
    three = [np.take_along_axis(limbs, top[None, :] - back, axis=0)[0].view(np.uint64) for back in range(3)]
    bits = np.frexp(three[0].astype(np.float64))[1].astype(np.uint64)  # 1 to 32; 0 for the sum zero
    lead = (three[0] << (np.uint64(32) - bits)) << np.uint64(32)
    value = lead | (three[1] << (np.uint64(32) - bits)) | (three[2] >> bits)
    exponent = 32 * (top - 2 + low - 2) + bits.astype(np.int64) + unit
    below = (three[2] & ((np.uint64(1) << bits) - np.uint64(1)) != 0) | (
        nonzero.any(axis=0) & (first < top - 2)
    )
    # 53 bits remain, fewer where the double is subnormal.
    drop = np.clip(-1074 - exponent, 11, 63)
    cut = drop.astype(np.uint64)
    kept = value >> cut
    rest = value & ((np.uint64(1) << cut) - np.uint64(1))
    half = np.uint64(1) << (cut - np.uint64(1))
    kept += (rest > half) | ((rest == half) & (below | (kept & np.uint64(1) == 1)))
    with np.errstate(over="ignore"):
        result = np.ldexp(kept.astype(np.float64), (exponent + drop).astype(np.int32))
    result[negative] *= -1.0
    if special is not None:
        nan, plus, minus = special
        sides = [(np.sign(plus) > 0) | (np.sign(minus) < 0), (np.sign(plus) < 0) | (np.sign(minus) > 0)]
        result[sides[0]] = np.inf
        result[sides[1]] = -np.inf
        result[(nan != 0) | (sides[0] & sides[1])] = np.nan
    return result
