"""The inputs of a round: what they will have been given in all, and how they grow while the flow runs.

A *gift* is one change of an input's files: a new file, or lines appended to one.  All of them are drawn beforehand
from the seed; only when each is given depends on the clock.

An iterable is a file of JSON lines that the flow follows until the line `END`.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = tuple[Any, ...]
"""(a, s, n, x, d, weight)"""

END = "END"
PARQUET = pa.schema(
    [
        ("a", pa.int64()),
        ("s", pa.string()),
        ("n", pa.int64()),
        ("x", pa.float64()),
        ("d", pa.decimal128(38, 2)),
        ("w", pa.int64()),
    ]
)
_NAMES = tuple(PARQUET.names)
_FILES = 3


@dataclass(frozen=True)
class Gift:
    """One change of one input's files."""

    input: str
    kind: str
    file: str
    rows: tuple[Row, ...]
    last: bool = False


class Feed:
    """Gifts that are still to be given, below the directory of a round."""

    def __init__(self, root: Path, inputs: Mapping[str, Mapping[str, Any]], rows: int, rng: Random) -> None:
        self.root = root
        self._waiting: deque[Gift] = deque()
        lists = []
        for name, one in inputs.items():
            if one["kind"] != "generator":
                (root / name).mkdir(parents=True)
                lists.append(_gifts(name, one, rows, rng))
        # Inputs take turns at random, each in its own order.
        while any(lists):
            self._waiting.append(rng.choice([one for one in lists if one]).popleft())
        for name, one in inputs.items():
            if one["kind"] == "iterable":
                (root / name / "items").touch()

    def __len__(self) -> int:
        return len(self._waiting)

    def give(self) -> Gift | None:
        """Give the next one; None when all has been given."""
        if not self._waiting:
            return None
        gift = self._waiting.popleft()
        path = self.root / gift.input / gift.file
        if gift.kind == "parquet":
            _write_parquet(path, gift.rows)
        elif gift.kind == "text":
            _append(path, [_as_text(row) for row in gift.rows])
        else:
            lines = [json.dumps(_as_object(row)) for row in gift.rows]
            _append(path, [*lines, END] if gift.kind == "iterable" and gift.last else lines)
        return gift

    def give_all(self) -> None:
        while self.give() is not None:
            pass


def _gifts(name: str, one: Mapping[str, Any], rows: int, rng: Random) -> deque[Gift]:
    made = random_rows(rng, rng.randint(rows // 2, rows), one["weights"], one.get("bad", False))
    gifts: list[Gift] = []
    while made:
        count = min(len(made), rng.choice((1, 5, 20, 40)))
        part, made = tuple(made[:count]), made[count:]
        kind = one["kind"]
        if kind == "iterable":
            file = "items"
        elif kind == "parquet":
            file = f"{len(gifts):04d}.parquet"
        else:
            # Old files grow, and there are new ones by and by.
            file = f"{rng.randrange(1 + len(gifts) // 8 + _FILES)}.{kind}"
        gifts.append(Gift(name, kind, file, part, last=not made))
    return deque(gifts)


def random_rows(rng: Random, count: int, weights: bool, bad: bool = False) -> list[Row]:
    """Rows of which many are equal, or equal in their keys; with weights, many delete what came before."""
    made: list[Row] = []
    live: list[Row] = []
    for _ in range(count):
        if weights and live and rng.random() < 0.3:
            gone = live.pop(rng.randrange(len(live)))
            made.append((*gone[:5], -gone[5]))
            continue
        row = (
            rng.choice((None, *range(24))) if rng.random() < 0.9 else rng.randrange(-(2**40), 2**40),
            rng.choice(("pen", "ink", "", "ünïcode", "x" * 600, None)),
            rng.choice((None, *range(-5, 30))),
            rng.choice((None, 0.1, 0.2, 0.3, 1e16, -1e16, 1e-8, rng.random())),
            rng.choice((None, Decimal("0.10"), Decimal("-3.33"), Decimal(rng.randrange(10**6)) / 100)),
            # A deletion of what was never there is as good as any weight.
            rng.choice((1, 1, 1, 2, 3, -1)) if weights else 1,
        )
        if bad and rng.random() < 0.03:
            row = ("bad", *row[1:])
        made.append(row)
        live.append(row)
    return made


def _as_object(row: Row) -> dict[str, Any]:
    value = dict(zip(_NAMES, row, strict=True))
    value["d"] = None if value["d"] is None else str(value["d"])
    return value


def _as_text(row: Row) -> str:
    """Fields divided by tabs; nothing at all is null, and text has a quote before it."""
    a, s, n, x, d, _ = row
    fields = (a, None if s is None else "'" + s, n, None if x is None else x.hex(), d)
    return "\t".join("" if field is None else str(field) for field in fields)


def _append(path: Path, lines: list[str]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(line + "\n" for line in lines))


def _write_parquet(path: Path, rows: tuple[Row, ...]) -> None:
    """A Parquet file must be whole when it gets its name."""
    table = pa.Table.from_pylist([dict(zip(_NAMES, row, strict=True)) for row in rows], schema=PARQUET)
    hidden = path.with_name("_" + path.name)
    pq.write_table(table, hidden)
    os.rename(hidden, path)
