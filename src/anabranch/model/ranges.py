"""Ranges of the hash: shards and recovery partitions are equal parts of all hashes."""

from __future__ import annotations

HashRange = tuple[int, int]
"""Hashes from the first up to, and without, the second."""
EVERYTHING: tuple[HashRange, ...] = ((0, 1 << 64),)


def hash_range(number: int, of: int) -> HashRange:
    """The hashes of one of `of` equal parts of all: the inverse of `part = floor(hash · of / 2⁶⁴)`."""
    return -(-(number << 64) // of), -(-(number + 1 << 64) // of)
