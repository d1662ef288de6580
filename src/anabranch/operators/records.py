"""The record of a group in state: fixed parts side by side, then the tails of those that have one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.operators.accumulators import Accumulator, Stored
from anabranch.operators.grouping import I64


class Records:
    """Encodes and decodes the records of groups, all of a batch at once.

    A record is the group's weight (int64), the fixed part of each accumulator, a uint32 length of each tail,
    and the tails.  Absent and all-zero are the same, so that a group whose rows have all gone leaves nothing.
    """

    def __init__(self, accumulators: Sequence[Accumulator]) -> None:
        self._tailed = [place for place, one in enumerate(accumulators) if one.tailed]
        fields: list[tuple[str, Any]] = [("total", "<i8")]
        fields += [(f"a{place}", one.dtype) for place, one in enumerate(accumulators)]
        fields += [(f"t{place}", "<u4") for place in self._tailed]
        self._dtype = np.dtype(fields)
        self._accumulators = len(accumulators)

    def decode(self, values: Sequence[bytes | None]) -> tuple[I64, list[Stored]]:
        """The weights of the groups, and each accumulator's share."""
        width = self._dtype.itemsize
        zero = bytes(width)
        present = [value or zero for value in values]
        heads = present if not self._tailed else [value[:width] for value in present]
        fixed = np.frombuffer(b"".join(heads), dtype=self._dtype)
        tails: dict[int, list[bytes]] = {}
        starts = [width] * len(present)
        for place in self._tailed:
            ends = (np.array(starts, dtype=np.int64) + fixed[f"t{place}"]).tolist()
            tails[place] = [value[a:b] for value, a, b in zip(present, starts, ends, strict=True)]
            starts = ends
        stored = [Stored(fixed[f"a{place}"], tails.get(place, [])) for place in range(self._accumulators)]
        return np.ascontiguousarray(fixed["total"]), stored

    def encode(self, totals: I64, parts: Sequence[Stored]) -> list[bytes | None]:
        """One record for each group; None where everything is zero."""
        fixed = np.zeros(len(totals), dtype=self._dtype)
        fixed["total"] = totals
        for place, part in enumerate(parts):
            fixed[f"a{place}"] = part.fixed
        for place in self._tailed:
            fixed[f"t{place}"] = np.fromiter(map(len, parts[place].tails), dtype=np.uint32, count=len(totals))
        records: list[Any] = fixed.view(f"V{self._dtype.itemsize}").tolist()
        for place in self._tailed:
            records = [head + tail for head, tail in zip(records, parts[place].tails, strict=True)]
        for empty in self._empty(fixed).tolist():
            records[empty] = None
        return records

    def _empty(self, fixed: npt.NDArray[Any]) -> I64:
        # A group with a weight is never empty, so that few rows are looked at byte by byte.
        candidates = np.flatnonzero(fixed["total"] == 0)
        octets = fixed[candidates].view(np.uint8).reshape(len(candidates), self._dtype.itemsize)
        return candidates[~octets.any(axis=1)]
