"""The process from which Spark forks its Python workers, with the engine loaded.

Spark's own has nothing loaded, so that every new Python process spends half a second on Arrow, Polars and NumPy before its
first task; a worker that joins a running flow, or takes the place of a dead one, would hold up a step for that long.
Loaded here, they are shared by all.  Nothing is used before the fork: libraries with threads must start them afterwards.
"""

from __future__ import annotations

import gc

from pyspark.daemon import manager

import anabranch.spark.copying
import anabranch.spark.job  # noqa: F401

if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    manager()
