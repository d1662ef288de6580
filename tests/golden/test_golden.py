"""Job directories that earlier versions made must open, go on, and be exact, with their shards or without."""

from __future__ import annotations

import shutil
import tarfile
from collections import Counter
from pathlib import Path

import polars as pl
import pytest
from golden_flow import MORE, ROWS, STEPS, golden_flow
from pyspark import SparkContext

from anabranch.model.ids import PartitionId
from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.outputs import changes, table
from anabranch.runtime.run import run

HERE = Path(__file__).parent
GOLDEN = sorted(HERE.glob("*.tar.xz"))


def input_rows(positions: dict[PartitionId, int]) -> list[tuple[int, int]]:
    """(key, value) of everything that was read: row *i* of partition *p* is line 4·i + p of the file beside this."""
    lines = (HERE / "rows.txt").read_text().splitlines()
    numbers = [4 * i + int(partition) for partition, end in positions.items() for i in range(end)]
    return [(int(key), int(value)) for key, value in (lines[number].split() for number in numbers)]


@pytest.mark.parametrize("archive", GOLDEN, ids=lambda path: path.name)
@pytest.mark.parametrize("lost", [False, True], ids=["with shards", "without shards"])
def test_an_old_job_goes_on(spark: SparkContext, tmp_path: Path, archive: Path, lost: bool) -> None:
    with tarfile.open(archive) as packed:
        # The archive is ours; Python before 3.11.4 has no filters, and later ones warn without one.
        packed.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    job = tmp_path / "job"
    before = changes(JobDir(job), "totals")
    assert before.get_column("__step").max() == STEPS - 1
    if lost:
        shutil.rmtree(job / "state")
    progress = run(
        golden_flow(), job, workers=3, first_step_rows=ROWS, max_step_rows=ROWS, steps=MORE, context=spark
    )
    rows = input_rows(progress.positions["rows"])
    assert (progress.next_step, progress.input_rows) == (STEPS + MORE, len(rows))
    count = Counter(key for key, _ in rows)
    total = Counter[int]()
    low: dict[int, int] = {}
    high: dict[int, int] = {}
    for key, value in rows:
        total[key] += value
        low[key], high[key] = min(value, low.get(key, value)), max(value, high.get(key, value))
    found = table(JobDir(job), "totals").drop("__weight")
    assert sorted(found.rows()) == sorted((k, count[k], total[k], low[k], high[k]) for k in count)
    sizes = table(JobDir(job), "sizes").drop("__weight")
    assert sorted(sizes.rows()) == sorted(Counter(count.values()).items())
    running = changes(JobDir(job), "running")
    assert running.group_by("key").agg(pl.col("so_far").max()).sort("key").rows() == sorted(total.items())
