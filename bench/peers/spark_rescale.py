"""Spark Structured Streaming from 2 to 4 shuffle partitions with a loaded state: the seconds without output.

A keyed sum over files that come on a schedule, also while nobody reads. The number of state partitions is fixed in the
checkpoint, so there are two ways, each a run of its own:

- `repartition`: stop the query, rewrite its state offline (`StreamingCheckpointManager`, private in 4.3), start it again;
- `fresh`: stop the query, start one with a new checkpoint, which reads all input from the beginning.

Both start the new query in the same session: neither pays for a new JVM.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.types import LongType, StructField, StructType
from spark_common import report, session

SCHEMA = StructType([StructField("key", LongType()), StructField("value", LongType())])
EVERY = 0.25
"""Seconds between two files."""


class Feed(threading.Thread):
    """Writes a file with the rows of each quarter of a second, in time, until told to end."""

    def __init__(self, data: Path, keys: int, rate: float) -> None:
        super().__init__(daemon=True)
        self.data = data
        self.keys = keys
        self.rows = max(1, int(rate * EVERY))
        self.rng = np.random.default_rng(3)
        self.number = 0
        self.mtime = int(time.time()) - 100_000
        self.ended = threading.Event()
        self._changing = threading.Lock()
        self._held: list[Path] | None = None
        """What was written while none may come; None: they come."""

    def hold(self) -> None:
        """From now on files are written, and nobody sees them."""
        with self._changing:
            self._held = []

    def release(self) -> None:
        with self._changing:
            for path in self._held or ():
                path.rename(path.with_name(path.name.removeprefix(".")))
            self._held = None

    def load(self) -> None:
        self._write(self.rng.permutation(self.keys))

    def run(self) -> None:
        due = time.monotonic()
        while not self.ended.wait(max(0.0, due - time.monotonic())):
            self._write(self.rng.integers(0, self.keys, self.rows))
            due += EVERY

    def _write(self, keys: np.ndarray[Any, Any]) -> None:
        values = self.rng.integers(-1_000, 1_000, len(keys))
        path = self.data / f"part-{self.number:06d}.parquet"
        hidden = path.with_name(f".{path.name}")
        pq.write_table(pa.table({"key": keys.astype(np.int64), "value": values}), hidden)
        # Spark takes the oldest first, and tells them apart by whole seconds.
        os.utime(hidden, (self.mtime + self.number,) * 2)
        with self._changing:
            if self._held is None:
                hidden.rename(path)
            else:
                self._held.append(hidden)
        self.number += 1


class Run:
    """One query over the fed files; keeps (end, rows) of every batch's output."""

    def __init__(self, spark: SparkSession, work: Path) -> None:
        self.spark = spark
        self.work = work
        self.outputs: list[float] = []

    def start(self, checkpoint: str, partitions: int) -> StreamingQuery:
        self.spark.conf.set("spark.sql.shuffle.partitions", str(partitions))
        rows = self.spark.readStream.schema(SCHEMA).parquet(str(self.work / "in"))
        sums = rows.groupBy("key").agg(F.sum("value").alias("sum"))
        writer = sums.writeStream.outputMode("update").foreachBatch(self._write)
        return writer.option("checkpointLocation", str(self.work / checkpoint)).start()

    def _write(self, frame: DataFrame, batch: int) -> None:
        frame.write.mode("overwrite").parquet(str(self.work / "out" / f"{time.time_ns()}"))
        self.outputs.append(time.time())


def measure(spark: SparkSession, args: argparse.Namespace, way: str) -> dict[str, float]:
    work = Path(tempfile.mkdtemp(prefix="bench-spark-"))
    (work / "in").mkdir()
    feed = Feed(work / "in", args.keys, args.rate)
    try:
        feed.load()
        run = Run(spark, work)
        query = run.start("checkpoint", args.before)
        until(query, lambda: bool(run.outputs))
        feed.start()
        time.sleep(args.seconds)
        # Behind a batch, where nothing is lost by stopping: state that a batch was writing cannot be rewritten, and without
        # that check the query that followed failed.
        feed.hold()
        query.processAllAvailable()
        query.stop()
        feed.release()
        stopped = time.time()
        before = list(run.outputs)
        if way == "repartition":
            spark._streamingCheckpointManager.repartition(str(work / "checkpoint"), args.after)
        moved = time.time()
        query = run.start("checkpoint" if way == "repartition" else "fresh", args.after)
        until(query, lambda: len(run.outputs) > len(before))
        first = run.outputs[len(before)]
        query.stop()
        steady = np.diff(before[1:]).tolist()
        return {
            "seconds": first - before[-1],
            "moving": moved - stopped,
            "starting": first - moved,
            "steady_gap": max(steady, default=0.0),
        }
    finally:
        feed.ended.set()
        if feed.is_alive():
            feed.join()
        shutil.rmtree(work, ignore_errors=True)


def until(query: StreamingQuery, condition: Any, timeout: float = 600) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if (failed := query.exception()) is not None:
            raise SystemExit(f"the query failed: {failed}")
        if time.monotonic() > deadline:
            raise SystemExit("waited in vain")
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("keys", type=int)
    parser.add_argument("rate", type=float)
    parser.add_argument("--before", type=int, default=2, help="shuffle partitions before")
    parser.add_argument("--after", type=int, default=4, help="shuffle partitions after")
    parser.add_argument("--seconds", type=float, default=20.0, help="of load before the stop")
    parser.add_argument("--ways", default="repartition,fresh")
    args = parser.parse_args()
    spark = session(
        "spark_rescale",
        **{
            "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
            "spark.sql.streaming.stateStore.maintenanceInterval": "5s",
        },
    )
    report(**{way: measure(spark, args, way) for way in args.ways.split(",")})


if __name__ == "__main__":
    main()
