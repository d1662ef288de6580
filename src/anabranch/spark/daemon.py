"""The process from which Spark forks its Python workers, with the engine loaded.

Spark's own has nothing loaded, so that every new Python process spends half a second on Arrow, Polars and NumPy before its
first task; a worker that joins a running flow, or takes the place of a dead one, would hold up a step for that long.
Loaded here, they are shared by all.  Nothing is used before the fork: libraries with threads must start them afterwards.
There is one such process for each pool (`spark/pools.py`).
"""

from __future__ import annotations

import gc

from anabranch.spark.pools import settle

settle()

from pyspark.daemon import manager  # noqa: E402

import anabranch.spark.copying  # noqa: E402
import anabranch.spark.job  # noqa: E402, F401

if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    manager()
