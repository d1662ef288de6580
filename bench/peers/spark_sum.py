"""Spark Structured Streaming's own keyed sum: `groupBy(key).agg(sum(value))` over Parquet, update mode.

Every batch size given is run on the same files in one warm JVM; the best is reported as `rows_per_second`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery
from spark_common import batches, rate, report, session, stream


def run(spark: SparkSession, data: Path, files: int, sink: str, limit: int) -> list[tuple[int, float]]:
    def start(scratch: Path) -> StreamingQuery:
        sums = stream(spark, data, files).groupBy("key").agg(F.sum("value").alias("sum"))
        writer = sums.writeStream.outputMode("update").trigger(availableNow=True)
        writer = writer.option("checkpointLocation", str(scratch / "checkpoint"))
        if sink == "noop":
            return writer.format("noop").start()
        out = scratch / "out"

        def write(frame: DataFrame, batch: int) -> None:
            frame.write.mode("overwrite").parquet(str(out / f"batch={batch}"))

        return writer.foreachBatch(write).start()

    return batches(start, limit=limit, timeout=120)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--sink", choices=["noop", "parquet"], default="noop")
    parser.add_argument("--files-per-batch", default="1,4,8,16", help="batch sizes to try, in files")
    parser.add_argument("--batches", type=int, default=6, help="batches to run per size")
    parser.add_argument("--warm-up", type=int, default=12, help="batches to run before anything is measured")
    args = parser.parse_args()

    spark = session("spark_sum")
    sizes = [int(size) for size in args.files_per_batch.split(",")]
    # The JIT compilers need a few million rows; what they have seen helps every size that follows.
    run(spark, args.data, 1, args.sink, args.warm_up)
    tried = {size: rate(run(spark, args.data, size, args.sink, args.batches), warm_up=1) for size in sizes}
    best = max(tried, key=lambda size: tried[size])
    report(
        rows_per_second=tried[best],
        files_per_batch=best,
        tried={str(size): round(found) for size, found in tried.items()},
    )
    spark.stop()


if __name__ == "__main__":
    main()
