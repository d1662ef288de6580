"""Spark's `applyInPandasWithState` as a running sum per key, one output row per input row."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from spark_common import batches, keyed_schema, report_batches, session, stream


def running_sum(key: Any, frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    (total,) = state.get if state.exists else (0,)
    for frame in frames:
        sums = frame["value"].cumsum() + total
        total = int(sums.iloc[-1])
        yield pd.DataFrame({"key": key[0], "sum": sums})
    state.update((total,))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--files-per-batch", type=int, default=1)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=60)
    args = parser.parse_args()

    spark = session("spark_apply")

    def start(scratch: Path) -> StreamingQuery:
        rows = stream(spark, args.data, args.files_per_batch)
        sums = rows.groupBy("key").applyInPandasWithState(
            running_sum,
            outputStructType=keyed_schema(rows),
            stateStructType="sum long",
            outputMode="Update",
            timeoutConf=GroupStateTimeout.NoTimeout,
        )
        writer = sums.writeStream.outputMode("update").trigger(availableNow=True).format("noop")
        return writer.option("checkpointLocation", str(scratch / "checkpoint")).start()

    done = batches(start, limit=args.batches, timeout=args.timeout)
    report_batches(done)
    spark.stop()


if __name__ == "__main__":
    main()
