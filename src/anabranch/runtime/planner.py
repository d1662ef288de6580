"""Decide what the next step reads: which slices of which inputs, and which worker reads each.

The slices are recorded and fix the step's result; who reads them does not, and is
only a matter of balance.

PLN-1  A step takes at most about `rows` rows and `size` bytes, however much is waiting.
PLN-2  No input that has data waits for ever: inputs share a step evenly, and partitions take turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from anabranch.connect.source import Available, Slice, Source
from anabranch.model.ids import PartitionId
from anabranch.model.layout import Layout
from anabranch.spark.spec import Assigned

_SPLIT_ABOVE = 2_000
"""Rows below which it is not worth a second worker's while to read part of a slice."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits to be read, by input."""

    available: Mapping[str, list[Available]]

    @property
    def rows(self) -> int:
        return sum(one.rows for many in self.available.values() for one in many)

    @property
    def size(self) -> int:
        return sum(one.size for many in self.available.values() for one in many)

    def __bool__(self) -> bool:
        return any(self.available.values())


class Planner:
    """Cuts steps out of the sources' backlog."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self.sources = sources
        # Of each input, the partition that was served last: the next step begins behind it.
        self._served: dict[str, PartitionId] = {}

    def backlog(self, positions: Mapping[str, Mapping[PartitionId, int]]) -> Backlog:
        return Backlog(
            {name: source.discover(positions.get(name, {})) for name, source in self.sources.items()}
        )

    def pending(self) -> bool:
        return any(source.pending() for source in self.sources.values())

    def cut(self, backlog: Backlog, rows: int, size: int, workers: int) -> dict[str, list[Slice]]:
        """Slices for one step, at least one where there is a backlog."""
        waiting = sorted(
            (name for name, many in backlog.available.items() if many),
            key=lambda name: sum(one.rows for one in backlog.available[name]),
        )
        slices: dict[str, list[Slice]] = {}
        for place, name in enumerate(waiting):
            share = len(waiting) - place
            taken = self._cut_input(name, backlog.available[name], rows // share, size // share, workers)
            rows -= sum(piece.rows for piece in taken)
            size -= sum(piece.size for piece in taken)
            slices[name] = taken
        return slices

    def _cut_input(
        self, name: str, available: list[Available], rows: int, size: int, workers: int
    ) -> list[Slice]:
        turns = self._in_turn(name, available)
        abreast = self.sources[name].abreast
        waiting = sum(one.rows for one in turns)
        taken: list[Slice] = []
        for place, one in enumerate(turns):
            if taken and (rows <= 0 or size <= 0):
                break
            if abreast:
                # All of them at one pace, so that no row waits longer than those that came with it.
                share = max(1.0, waiting / max(1, one.rows))
                waiting -= one.rows
            else:
                # As many partitions side by side as there are workers, and more where those are short.
                share = max(1, min(workers, len(turns)) - place)
            piece = self.sources[name].cut(one, max(1, int(rows / share)), max(1, int(size / share)))
            taken.append(piece)
            rows -= piece.rows
            size -= piece.size
        self._served[name] = taken[-1].partition
        return sorted(taken, key=lambda piece: (piece.partition, piece.start))

    def _in_turn(self, name: str, available: list[Available]) -> list[Available]:
        """The partitions in the order of their names, beginning behind the one that was served last.

        One order for all of them, whatever the source's is: where "10" stood behind "9" in one and before it in
        the other, it would never come up.
        """
        last = self._served.get(name, PartitionId(""))
        return sorted(available, key=lambda one: (one.partition <= last, one.partition))

    def assign(self, slices: Mapping[str, list[Slice]], layout: Layout) -> tuple[tuple[Assigned, ...], ...]:
        """Give each slice to a worker: its partition's own; parts of large ones to those with less to do."""
        workers = len(layout.workers)
        pieces: list[tuple[str, Slice]] = []
        total = sum(piece.rows for many in slices.values() for piece in many)
        fair = max(1, total // workers)
        for name in sorted(slices):
            for piece in slices[name]:
                parts = min(workers, round(piece.rows / fair)) if total > _SPLIT_ABOVE else 1
                split = self.sources[name].split(piece, parts) if parts > 1 else [piece]
                pieces.extend((name, part) for part in split)
        work: list[list[Assigned]] = [[] for _ in range(workers)]
        load = [0] * workers
        numbered = list(enumerate(pieces))
        # The largest first, so that the small ones can level what those left uneven.
        for ordinal, (name, piece) in sorted(numbered, key=lambda item: -item[1][1].rows):
            home = layout.inputs.get((name, piece.partition))
            lightest = min(range(workers), key=load.__getitem__)
            chosen = home if home is not None and load[home] + piece.rows <= 1.1 * fair else lightest
            work[chosen].append(Assigned(name, ordinal, piece))
            load[chosen] += piece.rows
        return tuple(tuple(sorted(mine, key=lambda one: one.ordinal)) for mine in work)
