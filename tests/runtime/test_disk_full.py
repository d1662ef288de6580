"""A disk that fills up under a running flow: a clear error, nothing half done, and on it goes when there is room."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark import SparkContext

import anabranch as ab
from anabranch.errors import StorageFullError
from anabranch.log.steplog import StepLog
from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.outputs import table
from anabranch.runtime.run import run

ROWS = 60_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small disk needs root")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk(spark: SparkContext, small_disk: Path) -> None:
    def flow() -> ab.Flow:
        made = ab.Flow("full")
        rows = made.input("rows", ab.generator(rows=ROWS, keys=ROWS, seed=2))
        rows.key_by("id").sum("value").output("sums")
        return made

    job = small_disk / "job"
    with pytest.raises(StorageFullError, match="full"):
        run(flow(), job, workers=2, shards=4, until_idle=True, max_step_rows=5_000, context=spark)
    done = JobDir(job).status()["steps"]
    assert table(JobDir(job), "sums").height == sum(
        commit["input_rows"] for commit in StepLog(JobDir(job).log).commits()
    )
    subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
    progress = run(flow(), job, workers=2, until_idle=True, max_step_rows=5_000, context=spark)
    assert progress.next_step > done
    assert progress.input_rows == ROWS
    found = Counter(row["id"] for row in table(JobDir(job), "sums").to_dicts())
    assert found == Counter(range(ROWS))
