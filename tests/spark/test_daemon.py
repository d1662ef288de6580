"""What the process that Spark forks Python workers from has on its path."""

from __future__ import annotations

import sys
from pathlib import Path

import pyspark

from anabranch.spark.daemon import without_archives

ARCHIVES = sorted(str(path) for path in (Path(pyspark.__file__).parent / "python" / "lib").glob("*.zip"))


def test_archives_are_left_out_where_pyspark_is_installed() -> None:
    assert len(ARCHIVES) == 2
    mine = ["mine.zip", "jobs/pyspark/mine.zip", "my-pyspark.zip"]
    assert without_archives([*ARCHIVES, *mine, *sys.path]) == [*mine, *sys.path]


def test_archives_stay_where_nothing_else_has_pyspark(tmp_path: Path) -> None:
    path = [*ARCHIVES, str(tmp_path)]
    assert without_archives(path) == path
