"""Spark Structured Streaming's micro-batch of a thousand rows, on the keyed sum with its whole state loaded.

The data set's first file holds every key, and every later file is one micro-batch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery
from spark_common import batches, median_ms, report, session, stream


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--batches", type=int, default=150, help="batches to measure")
    parser.add_argument(
        "--warm-up", type=int, default=60, help="batches to run first, the load of the state included"
    )
    args = parser.parse_args()

    spark = session("spark_step")

    def start(scratch: Path) -> StreamingQuery:
        sums = stream(spark, args.data, 1).groupBy("key").agg(F.sum("value").alias("sum"))
        writer = sums.writeStream.outputMode("update").trigger(availableNow=True).format("noop")
        return writer.option("checkpointLocation", str(scratch / "checkpoint")).start()

    done = batches(start, limit=args.warm_up + args.batches, timeout=240)
    measured = done[args.warm_up :]
    report(
        median_ms=median_ms(done, args.warm_up),
        batches=len(measured),
        rows_per_batch=measured[0][0],
        fastest_ms=min(ms for _, ms in measured),
    )
    spark.stop()


if __name__ == "__main__":
    main()
