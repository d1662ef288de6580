"""Spark Structured Streaming's keyed sum over a directory of Parquet files that are there or will come, until killed.

One file is one batch, written as Parquet. Prints how many rows were taken in all whenever that grows.
Snapshots of the state are uploaded every five seconds beside the changelog of every batch.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructField, StructType
from spark_common import report, session

# Given, because finding it out takes Spark a job.
SCHEMA = StructType([StructField("key", LongType()), StructField("value", LongType())])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    args = parser.parse_args()
    spark = session(
        "spark_restart",
        **{
            "spark.sql.streaming.stateStore.maintenanceInterval": "5s",
            # Counting the keys of the state costs a lookup for each one that is written.
            "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
        },
    )
    rows = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(args.data))
    sums = rows.groupBy("key").agg(F.sum("value").alias("sum"))

    def write(frame: DataFrame, batch: int) -> None:
        frame.write.mode("overwrite").parquet(str(args.work / "out" / f"batch={batch}"))

    writer = sums.writeStream.outputMode("update").foreachBatch(write)
    query = writer.option("checkpointLocation", str(args.work / "checkpoint")).start()
    said = 0
    while query.isActive:
        taken = sum(int(one["numInputRows"]) for one in query.recentProgress)
        if taken > said:
            report(rows=taken)
            said = taken
        time.sleep(0.2)
    query.awaitTermination()


if __name__ == "__main__":
    main()
