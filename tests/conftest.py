"""What tests share: one Spark context for all that need Spark, and small flows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark import SparkContext

from anabranch.spark.session import spark_context


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkContext]:
    """An embedded Spark, started once."""
    root: Path = tmp_path_factory.mktemp("spark")
    conf = {"spark.local.dir": str(root / "local")}
    with spark_context("tests", "local[2]", conf, root / "spark.log") as context:
        yield context
