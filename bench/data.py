"""Input files that both sides of a benchmark read: the same bytes, made once, seeded.

Files live under `build/bench`, one directory per shape of data; a directory that exists is complete, because
it is written under another name and renamed. Row groups are small, so that a reader with two cores can split
one file.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "build" / "bench" / "data"

KeyKind = Literal["int", "string"]

ROW_GROUP = 131_072


@dataclass(frozen=True, slots=True)
class Shape:
    """One data set: `rows` uniform draws of `keys` keys with int64 values, in files of `per_file` rows.

    With `preload`, one more file comes first (by name and by modification time) that holds every key once, in
    shuffled order: a reader that takes one file at a time has the whole state after its first batch.
    """

    rows: int
    keys: int = 100_000
    kind: KeyKind = "int"
    per_file: int = 1_000_000
    preload: bool = False
    seed: int = 7

    @property
    def name(self) -> str:
        preload = "-preload" if self.preload else ""
        return f"{self.kind}-{self.keys}keys-{self.rows}rows-{self.per_file}each{preload}-seed{self.seed}"


def make(shape: Shape, root: Path = DATA) -> Path:
    """The directory with the shape's Parquet files (columns `key`, `value`); written on the first call."""
    target = root / shape.name
    if target.exists():
        return target
    partial = root / f"{shape.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    rng = np.random.default_rng(shape.seed)
    names = _key_names(shape)
    # Modification times are set apart and in order of names: Spark's file source takes the oldest file first.
    mtime = 1_700_000_000
    if shape.preload:
        _write(partial / "part-000000.parquet", rng.permutation(shape.keys), names, rng, mtime)
    for number, start in enumerate(range(0, shape.rows, shape.per_file), start=1):
        count = min(shape.per_file, shape.rows - start)
        drawn = rng.integers(0, shape.keys, count)
        _write(partial / f"part-{number:06d}.parquet", drawn, names, rng, mtime + number)
    partial.rename(target)
    return target


def _key_names(shape: Shape) -> pa.Array:
    if shape.kind == "int":
        # Spread over the 64-bit range, so that no side gains from small dense keys.
        spread = np.arange(shape.keys, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return pa.array(spread.view(np.int64))
    return pa.array([f"user-{number:06d}" for number in range(shape.keys)])


def _write(path: Path, drawn: np.ndarray, names: pa.Array, rng: np.random.Generator, mtime: int) -> None:
    values = rng.integers(-1_000, 1_000, len(drawn))
    table = pa.table({"key": names.take(pa.array(drawn)), "value": pa.array(values, pa.int64())})
    pq.write_table(table, path, row_group_size=ROW_GROUP)
    os.utime(path, (mtime, mtime))


def keyed_sums(directory: Path) -> tuple[int, int]:
    """(number of distinct keys, sum of all values): what a side's result must agree with."""
    table = pq.read_table(directory)
    total = pc.sum(table["value"]).as_py()
    return len(table["key"].unique()), int(total)
