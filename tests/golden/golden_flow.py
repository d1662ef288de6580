"""The flow of the golden job directories.  It must never change: the directories belong to it."""

from __future__ import annotations

from typing import Any

import anabranch as ab

STEPS = 6
"""Steps that a golden directory has."""
MORE = 4
"""Steps that the test adds."""
ROWS = 400
"""Of each step."""


def add_up(state: int | None, row: Any) -> tuple[int, list[dict[str, int]]]:
    so_far = (state or 0) + row.value
    return so_far, [{"so_far": so_far}]


def golden_flow() -> ab.Flow:
    made = ab.Flow("golden")
    rows = made.input("rows", ab.generator(keys=50, seed=7))
    by_key = rows.key_by("key")
    totals = by_key.aggregate(n=ab.count(), total=ab.sum("value"), low=ab.min("value"), high=ab.max("value"))
    totals.output("totals", ab.parquet())
    totals.key_by("n").count().output("sizes", ab.jsonl())
    by_key.stateful_map(add_up, {"so_far": int}).output("running", ab.parquet())
    return made
