"""Sources and sinks.

Knows `anabranch.model` and `anabranch.errors` only.  `source.py` and `sink.py` are the contracts.
"""

from anabranch.connect.columns import choice, index, timestamps, uniform_float, uniform_int, words
from anabranch.connect.files import files
from anabranch.connect.generator import generator
from anabranch.connect.iterable import iterable
from anabranch.connect.sink import Sink, Staged
from anabranch.connect.sinks import console, jsonl, memory, parquet
from anabranch.connect.source import Available, OnBad, Slice, Source

__all__ = [
    "Available",
    "OnBad",
    "Sink",
    "Slice",
    "Source",
    "Staged",
    "choice",
    "console",
    "files",
    "generator",
    "index",
    "iterable",
    "jsonl",
    "memory",
    "parquet",
    "timestamps",
    "uniform_float",
    "uniform_int",
    "words",
]
