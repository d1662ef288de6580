"""What the Spark peers share: the session, the stream over Parquet, rates from the query's own progress.

The settings are those that make Spark fast on this work: RocksDB with changelog checkpointing, as many
shuffle partitions as cores, no UI, a roomy heap.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.types import LongType, StructField, StructType

CORES = 2


def session(name: str, **conf: str) -> SparkSession:
    # Spark's Python workers would otherwise be the path's `python3`, without this environment's packages.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = (
        SparkSession.builder.master(f"local[{CORES}]")
        .appName(name)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "4g")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", str(CORES))
        .config("spark.sql.adaptive.enabled", "false")
        .config(
            "spark.sql.streaming.stateStore.providerClass",
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
        )
        .config("spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled", "true")
        .config("spark.sql.streaming.numRecentProgressUpdates", "100000")
    )
    for key, value in conf.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def stream(spark: SparkSession, directory: Path, files_per_batch: int) -> DataFrame:
    schema = spark.read.parquet(str(directory)).schema
    reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", files_per_batch)
    return reader.parquet(str(directory))


def keyed_schema(rows: DataFrame) -> StructType:
    """The output of a running sum: the stream's own key type, and a 64-bit sum."""
    return StructType([rows.schema["key"], StructField("sum", LongType())])


Start = Callable[[Path], StreamingQuery]


def batches(start: Start, *, limit: int, timeout: float) -> list[tuple[int, float]]:
    """Runs a query for `limit` batches, to the end of its input, or for `timeout` seconds: what is first.

    Time never cuts it below two batches, a warm-up and a measured one: the harness has the last word on that.
    Returns (rows, milliseconds) of every batch that completed. `start` is given a scratch directory for the
    checkpoint. A batch's duration is Spark's own `triggerExecution`: from planning the batch to its commit,
    without the start of the query.
    """
    scratch = Path(tempfile.mkdtemp(prefix="bench-spark-"))
    try:
        query = start(scratch)
        deadline = time.monotonic() + timeout
        try:
            while not query.awaitTermination(0.2):
                ended = len(_completed(query))
                if ended >= limit or (ended >= 2 and time.monotonic() > deadline):
                    break
            return _completed(query)[:limit]
        finally:
            query.stop()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _completed(query: StreamingQuery) -> list[tuple[int, float]]:
    progress = [p for p in query.recentProgress if p["numInputRows"] > 0]
    return [(int(p["numInputRows"]), float(p["durationMs"]["triggerExecution"])) for p in progress]


def rate(done: list[tuple[int, float]], warm_up: int) -> float:
    """Rows per second over the batches after the first `warm_up` (fewer where there are not more)."""
    steady = done[min(warm_up, len(done) - 1) :]
    return 1000 * sum(rows for rows, _ in steady) / sum(ms for _, ms in steady)


def median_ms(done: list[tuple[int, float]], warm_up: int) -> float:
    return statistics.median(ms for _, ms in done[warm_up:])


def report_batches(done: list[tuple[int, float]]) -> None:
    """The answer of a peer that was given all of its batches."""
    report(
        rows_per_second=rate(done, warm_up=1),
        rows_per_batch=done[0][0],
        batches=len(done),
        ms=[ms for _, ms in done],
    )


def report(**result: Any) -> None:
    """The one line that the harness reads."""
    print(json.dumps(result), flush=True)
