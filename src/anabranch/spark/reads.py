"""What a step read of each input, and whether a replay read the same.

A committed step records, for each partition that it read, the rows and the content hash of what the source gave,
added up over all pieces: so the sums do not depend on who read what.  A source that answers differently the second time
would silently give other outputs; here the flow stops and says which one it was.

A piece that could not be read and became a dead letter (its file had vanished, its decoder died on it) is **lost**:
it counts no rows, and a replay sets the same range aside again without trying it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from anabranch.connect.source import Slice
from anabranch.errors import InputChangedError
from anabranch.model.ids import Step
from anabranch.spark.spec import Lost, Report

_MODULUS = 1 << 64

Sums = dict[str, dict[str, dict[str, int]]]
"""By input and partition: `rows` and `hash`."""


def sum_reads(reports: Iterable[Report]) -> Sums:
    """Rows and hash of each partition that a step read; for the commit record."""
    sums: Sums = {}
    for report in reports:
        for read in report.reads:
            found = sums.setdefault(read["input"], {}).setdefault(read["partition"], {"rows": 0, "hash": 0})
            found["rows"] += read["rows"]
            found["hash"] = (found["hash"] + read["hash"]) % _MODULUS
    return {name: dict(sorted(sums[name].items())) for name in sorted(sums)}


def sum_lost(reports: Iterable[Report]) -> list[dict[str, Any]]:
    """The ranges that became dead letters, in order; for the commit record, and then for `StepSpec.lost`."""
    lost = [one for report in reports for one in report.lost]
    return sorted(lost, key=lambda one: (one["input"], one["partition"], one["start"]))


def check_reads(
    recorded: Mapping[str, Mapping[str, Mapping[str, int]]],
    found: Mapping[str, Mapping[str, Mapping[str, int]]],
    step: Step,
) -> None:
    """Compare what a replay read with what was recorded.

    Raises:
        InputChangedError: a partition gave other rows.
    """
    nothing = {"rows": 0, "hash": 0}
    for name in sorted({*recorded, *found}):
        before, now = recorded.get(name, {}), found.get(name, {})
        for partition in sorted({*before, *now}):
            was, is_ = before.get(partition, nothing), now.get(partition, nothing)
            if (was["rows"], was["hash"]) != (is_["rows"], is_["hash"]):
                raise InputChangedError(
                    f"input {name!r}, partition {partition}: step {step} read {_shown(was)} of it when it was first "
                    f"run, and {_shown(is_)} now that it is replayed; restore {partition} as it was and run again, or "
                    "start a new job in another directory"
                )


def without_lost(piece: Slice, lost: Iterable[Lost]) -> tuple[list[Slice], list[Lost]]:
    """What a replay reads of a piece: the rest of it, and the losses that begin in it.

    A loss may reach over several pieces, when the replay has more workers; the first of them tells of it.
    """
    here = sorted(
        (
            one
            for one in lost
            if one.partition == piece.partition and one.start < piece.end and one.end > piece.start
        ),
        key=lambda one: one.start,
    )
    rest: list[Slice] = []
    at = piece.start
    for one in here:
        if at < one.start:
            rest.append(_part(piece, at, one.start))
        at = max(at, one.end)
    if at < piece.end:
        rest.append(_part(piece, at, piece.end))
    return rest, [one for one in here if piece.start <= one.start]


def _part(piece: Slice, start: int, end: int) -> Slice:
    if (start, end) == (piece.start, piece.end):
        return piece
    share = (end - start) / (piece.end - piece.start)
    return replace(piece, start=start, end=end, rows=int(piece.rows * share), size=int(piece.size * share))


def _shown(sums: Mapping[str, int]) -> str:
    return f"{sums['rows']} rows with hash {sums['hash']:016x}"
