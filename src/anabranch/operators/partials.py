"""What came of several batches of one sender, to be added up before the exchange.

Batches of known keys have them in the same order, new ones behind the others (`known.py`), and so have batches of
dense integers that are all there (`grouping.py`).  Row *i* of each is then of group *i*: nothing is numbered, and
columns are added to each other.  Measured on one core with 8 batches of 100,000 integer keys, a count and a sum:
6 ms of CPU time instead of 18.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import polars as pl

from anabranch.operators.grouping import I64, INTEGERS, group_rows, scatter
from anabranch.operators.known import Known
from anabranch.operators.limbs import Packed


class Partials:
    """Partials of batches, and to which group each belongs.

    Args:
        pieces: Those of each batch, with one row for each of its keys; at least one piece.
        keys: The columns of the key.
        known: As for `group_rows`.
    """

    def __init__(
        self, pieces: Sequence[pl.DataFrame], keys: Sequence[str], known: Known | None = None
    ) -> None:
        self.pieces = pieces
        shared = _shared_keys(pieces, keys)
        self._aligned = shared is not None
        if shared is not None:
            self.keys = shared
        else:
            groups = group_rows(pl.concat([piece.select(keys) for piece in pieces]), keys, known)
            # In the place of the cached property, which is for keys that were not numbered.
            self.index, self.keys = groups.index, groups.keys

    @property
    def count(self) -> int:
        """The number of groups."""
        return self.keys.height

    @cached_property
    def index(self) -> I64:
        """The group of each partial, of one piece after the other."""
        return np.concatenate([np.arange(piece.height) for piece in self.pieces])

    @cached_property
    def sizes(self) -> I64:
        """How many partials each group has; none where its key is known and did not come."""
        if not self._aligned:
            return np.bincount(self.index, minlength=self.count)
        sizes = np.zeros(self.count, dtype=np.int64)
        for piece in self.pieces:
            sizes[: piece.height] += 1
        return sizes

    def column(self, name: str) -> pl.Series:
        """A column of all pieces."""
        return pl.concat([piece.get_column(name) for piece in self.pieces])

    def total(self, name: str) -> I64:
        """The sum of an Int64 column by group; wraps around at 2⁶³, as its parts do."""
        if not self._aligned:
            return scatter(self.index, self.count, self.column(name).to_numpy())
        sums = np.zeros(self.count, dtype=np.int64)
        for piece in self.pieces:
            sums[: piece.height] += piece.get_column(name).to_numpy()
        return sums

    def packed(self, name: str) -> tuple[Packed, I64]:
        """A column of packed sums, in the order of groups, and the group of each."""
        order = np.argsort(self.index, kind="stable")
        return Packed.from_series(self.column(name)[order]), self.index[order]


def _shared_keys(pieces: Sequence[pl.DataFrame], keys: Sequence[str]) -> pl.DataFrame | None:
    """The keys of the longest piece, if those of every other are the first of them.

    Of integers only, which are equal when their bits are.
    """
    longest = max(pieces, key=lambda piece: piece.height).select(keys)
    if any(dtype not in INTEGERS for dtype in longest.dtypes):
        return None
    same = all(longest.head(piece.height).equals(piece.select(keys)) for piece in pieces)
    return longest if same else None
