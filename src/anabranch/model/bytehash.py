"""The primitives of Anabranch hash v1: the mixer, and the hash of byte strings.

The values are part of the format on disk and never change.  All arithmetic is modulo 2⁶⁴.

    mix(x)        the splitmix64 finaliser: a bijection in which every input bit flips every
                  output bit with probability ½, so that the leading bits (shards) are as good as any
    words(b)      the 8-byte little-endian words of b, the last one padded with zero bytes
    short(b)      h = mix(len(b) + BYTES); for each w in words(b): h = mix(h ^ w)
    H(b)          short(b) if len(b) ≤ 1024, else
                  mix(H(short(block₀) ‖ short(block₁) ‖ …) ^ mix(len(b) + LONG))
                  over the blocks of 1024 bytes, each hash written as 8 little-endian bytes

The tree over blocks bounds the loop over words at 128 rounds: without it one key of a megabyte
would cost 131,072 rounds of array calls for a single row.

Must not know: columns, types, frames.
"""

from __future__ import annotations

import numpy as np

from anabranch.model.batch import U64
from anabranch.model.buffers import I64, Bytes

GOLDEN = 0x9E3779B97F4A7C15
BYTES = 0xD6E8FEB86659FD93
LONG = 0xA0761D6478BD642F
BLOCK = 1024

_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)

_TAIL_MASKS: U64 = np.array([(1 << (8 * k)) - 1 for k in range(9)], dtype=np.uint64)
"""Entry k keeps the first k bytes of a little-endian word."""

_RUN = 1 << 14
"""Rows mixed at a time: 128 KB of words and as much of scratch stay in the L2 cache."""


def mix(words: U64) -> U64:
    """Apply the mixer to a contiguous array, in place, and return it."""
    scratch = np.empty(min(_RUN, len(words)), dtype=np.uint64)
    for start in range(0, len(words), _RUN):
        run = words[start : start + _RUN]
        shifted = scratch[: len(run)]
        np.right_shift(run, _S30, out=shifted)
        np.bitwise_xor(run, shifted, out=run)
        np.multiply(run, _M1, out=run)
        np.right_shift(run, _S27, out=shifted)
        np.bitwise_xor(run, shifted, out=run)
        np.multiply(run, _M2, out=run)
        np.right_shift(run, _S31, out=shifted)
        np.bitwise_xor(run, shifted, out=run)
    return words


def hash_spans(data: Bytes, starts: I64, lengths: I64) -> U64:
    """H of each `data[starts[i] : starts[i] + lengths[i]]`.

    Every span must lie inside `data`.  Copies `data` once, so that the last word can be read whole.
    """
    padded = np.zeros(len(data) + 8, dtype=np.uint8)
    padded[: len(data)] = data
    long_rows = np.flatnonzero(lengths > BLOCK)
    if not len(long_rows):
        return _hash_short(padded, starts, lengths)
    hashes = _hash_short(padded, starts, np.where(lengths > BLOCK, 0, lengths))
    hashes[long_rows] = _hash_long(padded, starts[long_rows], lengths[long_rows])
    return hashes


def _hash_short(padded: Bytes, starts: I64, lengths: I64) -> U64:
    # An 8-byte window at every byte: an unaligned gather costs 6 ns a row, two aligned ones and shifts 16 ns.
    windows: U64 = np.ndarray(shape=(len(padded) - 7,), dtype="<u8", buffer=padded, strides=(1,))
    hashes = lengths.astype(np.uint64)
    hashes += np.uint64(BYTES)
    mix(hashes)
    longest = int(lengths.max(initial=0))
    everywhere = longest > 0 and int(lengths.min(initial=longest)) > 0
    rows = None if everywhere else np.flatnonzero(lengths > 0)
    for at in range(0, longest, 8):
        if at and (rows is None or len(rows)):
            rows = np.flatnonzero(lengths > at) if rows is None else rows[lengths[rows] > at]
        if rows is None or len(rows) == len(lengths):
            words = windows[starts + at]
            words &= _TAIL_MASKS.take(lengths - at, mode="clip")
            hashes ^= words
            mix(hashes)
        else:
            words = windows[starts[rows] + at]
            words &= _TAIL_MASKS.take(lengths[rows] - at, mode="clip")
            words ^= hashes[rows]
            hashes[rows] = mix(words)
    return hashes


def _hash_long(padded: Bytes, starts: I64, lengths: I64) -> U64:
    counts = -(-lengths // BLOCK)
    firsts = np.cumsum(counts) - counts
    at = (np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(firsts, counts)) * BLOCK
    sizes = np.minimum(np.repeat(lengths, counts) - at, BLOCK)
    digests = _hash_short(padded, np.repeat(starts, counts) + at, sizes)
    hashes = hash_spans(digests.astype("<u8", copy=False).view(np.uint8), firsts * 8, counts * 8)
    hashes ^= mix(lengths.astype(np.uint64) + np.uint64(LONG))
    return mix(hashes)
