"""Spark's `transformWithStateInPandas` as a running sum per key, one output row per input row.

The function adds up a key's rows of a batch with pandas, so Python's cost is per key and batch; each of them
crosses a socket once to read the state and once to write it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle, StreamingQuery
from pyspark.sql.types import LongType, StructField, StructType
from spark_common import batches, keyed_schema, report_batches, session, stream

STATE = StructType([StructField("sum", LongType())])


class RunningSum(StatefulProcessor):
    def init(self, handle: StatefulProcessorHandle) -> None:
        self.sum = handle.getValueState("sum", STATE)

    def handleInputRows(
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any
    ) -> Iterator[pd.DataFrame]:
        found = self.sum.get()
        total = found[0] if found is not None else 0
        for frame in rows:
            sums = frame["value"].cumsum() + total
            total = int(sums.iloc[-1])
            yield pd.DataFrame({"key": key[0], "sum": sums})
        self.sum.update((total,))

    def close(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--files-per-batch", type=int, default=1)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=60)
    args = parser.parse_args()

    spark = session("spark_tws")

    def start(scratch: Path) -> StreamingQuery:
        rows = stream(spark, args.data, args.files_per_batch)
        sums = rows.groupBy("key").transformWithStateInPandas(
            RunningSum(), outputStructType=keyed_schema(rows), outputMode="Update", timeMode="None"
        )
        writer = sums.writeStream.outputMode("update").trigger(availableNow=True).format("noop")
        return writer.option("checkpointLocation", str(scratch / "checkpoint")).start()

    done = batches(start, limit=args.batches, timeout=args.timeout)
    report_batches(done)
    spark.stop()


if __name__ == "__main__":
    main()
