"""Elastic, exactly-once, stateful stream processing for PySpark.

>>> import anabranch as ab
>>> flow = ab.Flow("wordcount")
>>> lines = flow.input("lines", ab.iterable(["to be or not to be"], schema={"value": str}))
>>> words = lines.flat_map(lambda line: line.split())
>>> words.key_by("value").count().output("counts", ab.parquet())
"""

from anabranch.connect import (
    console,
    files,
    generator,
    iterable,
    jsonl,
    memory,
    parquet,
)
from anabranch.connect.columns import choice, index, timestamps, uniform_float, uniform_int, words
from anabranch.errors import AnabranchError, EngineError, FlowError, RecordError, UserError
from anabranch.flow.stream import Flow, KeyedStream, Stream
from anabranch.operators.aggregates import count, max, mean, min, sum  # noqa: A004
from anabranch.version import __version__ as __version__

__all__ = [
    "AnabranchError",
    "EngineError",
    "Flow",
    "FlowError",
    "Job",
    "KeyedStream",
    "RecordError",
    "Stream",
    "UserError",
    "choice",
    "console",
    "count",
    "files",
    "generator",
    "index",
    "iterable",
    "jsonl",
    "max",
    "mean",
    "memory",
    "min",
    "parquet",
    "run",
    "sum",
    "timestamps",
    "uniform_float",
    "uniform_int",
    "words",
]


def __getattr__(name: str) -> object:
    # Spark is a second's import; a flow can be built, and its plan shown, without it.
    if name == "run":
        from anabranch.runtime.run import run

        return run
    # Nor does it take the job directory, with the codecs and storages behind it.
    if name == "Job":
        from anabranch.runtime.jobhandle import Job

        return Job
    raise AttributeError(f"module 'anabranch' has no attribute {name!r}")
