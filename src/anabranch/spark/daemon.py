"""The process from which Spark forks its Python workers, with the engine and PySpark's own worker loaded.

Spark's own has nothing loaded, so that every new Python process spends a second of CPU before its first task on Arrow,
Polars and NumPy, and on PySpark itself, which Spark puts at the head of the path as an archive without compiled
modules; a worker that joins a running flow, or takes the place of a dead one, would hold up a step for that long.  Loaded
here, from where it is installed, all of it is shared.  Nothing is used before the fork: libraries with threads must start
them afterwards.  There is one such process for each pool (`spark/pools.py`).
"""

from __future__ import annotations

import gc
import importlib.machinery
import re
import sys
from pathlib import PurePath

_ARCHIVES = re.compile(r"pyspark\.zip|py4j-.*-src\.zip")
"""As Spark names them; a user's own may be called anything else."""


def without_archives(path: list[str]) -> list[str]:
    """The module path without the archives of PySpark and Py4J, if both are installed besides.

    A process also reads an archive's list of contents (0.1 s) when a task adds a directory to the path.
    """
    others = [entry for entry in path if not _ARCHIVES.fullmatch(PurePath(entry).name)]
    finder = importlib.machinery.PathFinder()
    installed = all(finder.find_spec(name, others) is not None for name in ("pyspark", "py4j"))
    return others if installed else path


if __name__ == "__main__":
    sys.path[:] = without_archives(sys.path)

from pyspark.daemon import manager  # noqa: E402

import anabranch.spark.copying  # noqa: E402
import anabranch.spark.job  # noqa: E402, F401
from anabranch.spark.pools import settle  # noqa: E402

if __name__ == "__main__":
    importlib.import_module("pyspark.worker")
    settle()
    gc.collect()
    gc.freeze()
    manager()
