"""The flow that is rescaled under load: a sum over many keys, all of which are in state before the load begins.

`every` has each key once and is read at full speed. `drawn` has random keys without end, and begins when a file says so:
row i is there from `start + i / rate` on, by the clock on the wall, so that a flow that stops and starts again finds what
came meanwhile. That is what the engine's own generator, whose rate counts from the start of a run, does not do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from time import time
from typing import Any

import anabranch as ab
from anabranch.connect.columns import Maker
from anabranch.connect.generator import Generator
from anabranch.connect.source import Available
from anabranch.model.ids import PartitionId

PARTITIONS = 4
KEYS_VARIABLE = "BENCH_KEYS"
BEGIN_VARIABLE = "BENCH_BEGIN"
"""The file that says when the load begins: {"start": Unix time, "rate": rows a second, or null for full speed}."""


class Scheduled(Generator):
    """Rows that arrive on a schedule of its own, which outlives the process."""

    def __init__(self, begin: str, columns: Mapping[str, Maker]) -> None:
        super().__init__(None, 1.0, PARTITIONS, seed=7, columns=columns)
        self._file = begin
        self._schedule: tuple[float, float | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_file": "", "_schedule": None}

    def discover(self, positions: Mapping[PartitionId, int]) -> list[Available]:
        if self._schedule is None:
            try:
                told = json.loads(Path(self._file).read_text())
            except FileNotFoundError:
                return []
            self._schedule = told["start"], told["rate"]
        return super().discover(positions)

    def _total(self) -> int | None:
        assert self._schedule is not None
        start, rate = self._schedule
        return None if rate is None else max(0, int((time() - start) * rate))


def build(keys: int, begin: str) -> ab.Flow:
    value = ab.uniform_int(-1000, 1000)
    flow = ab.Flow("rescaled")
    every = flow.input("every", ab.generator(rows=keys, columns={"key": ab.index(), "value": value}))
    drawn = flow.input("drawn", Scheduled(begin, {"key": ab.uniform_int(0, keys), "value": value}))
    every.union(drawn).key_by("key").sum("value").output("sums")
    return flow


flow = build(int(os.environ.get(KEYS_VARIABLE, "1000")), os.environ.get(BEGIN_VARIABLE, ""))
