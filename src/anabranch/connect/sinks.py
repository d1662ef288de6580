"""Sinks that keep their changes in files: Parquet and JSON lines, and console and list on top of such files.

Must not know: steps' records, flows, Spark.
"""

from __future__ import annotations

import io
import os
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.connect.filesink import FileSink
from anabranch.connect.sink import Staged
from anabranch.errors import ConfigError
from anabranch.model.batch import STEP, WEIGHT
from anabranch.storage import Storage


class ParquetSink(FileSink):
    """Parquet files, Snappy, without statistics.

    200,000 rows of four integers and a string take 20 ms on one core, encoded through Arrow; Polars' own
    writer takes 30 ms for the same, and leaving compression out saves 10 ms for twice the bytes to sync.
    """

    kind = "parquet"
    suffix = ".parquet"

    def encode(self, frame: pl.DataFrame) -> bytes | memoryview:
        sink = pa.BufferOutputStream()
        table = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
        constant = [name for name in (WEIGHT, STEP) if name in frame.columns]
        pq.write_table(table, sink, compression="snappy", write_statistics=False, use_dictionary=constant)
        return memoryview(sink.getvalue())

    def decode(self, data: bytes) -> pl.DataFrame:
        frame = pl.from_arrow(pq.read_table(pa.BufferReader(data), use_threads=False))
        assert isinstance(frame, pl.DataFrame)
        return frame


class JsonSink(FileSink):
    """JSON lines; dates and times as text, binary as base64.

    Reading the changes back gives what JSON can tell: the types of dates, decimals and binary are lost.
    """

    kind = "jsonl"
    suffix = ".jsonl"

    def encode(self, frame: pl.DataFrame) -> bytes | memoryview:
        buffer = io.BytesIO()
        frame.with_columns(_json_ready(frame)).write_ndjson(buffer)
        return buffer.getbuffer()

    def decode(self, data: bytes) -> pl.DataFrame:
        if not data:
            return pl.DataFrame(schema={WEIGHT: pl.Int64(), STEP: pl.Int64()})
        return pl.read_ndjson(data, infer_schema_length=None)

    def read(self, root: Storage, files: Sequence[Staged]) -> pl.DataFrame:
        frames = self.read_each(root, files)
        frames = [frame for frame in frames if frame.height] or frames[:1]
        return pl.concat(frames, how="diagonal_relaxed") if frames else pl.DataFrame()


class _Shown(FileSink):
    """Keeps changes as Arrow files inside the job directory and also shows them when they are published."""

    suffix = ".arrow"

    def encode(self, frame: pl.DataFrame) -> bytes | memoryview:
        buffer = io.BytesIO()
        frame.write_ipc(buffer)
        return buffer.getbuffer()

    def decode(self, data: bytes) -> pl.DataFrame:
        return pl.read_ipc(data)

    def moves(self, place: Storage) -> bool:
        # What is still staged was not shown yet; there is little of it, so in an object store it is copied.
        return True

    @abstractmethod
    def show(self, frame: pl.DataFrame) -> None:
        """Show the changes of one step or of several."""

    def publish(self, root: Storage, staged: Sequence[Staged]) -> None:
        place = self.place(root)
        fresh = [item for item in staged if place.exists(item.path)]
        frames = self.read_each(root, fresh)
        super().publish(root, staged)
        if frames:
            self.show(pl.concat(frames))


class ConsoleSink(_Shown):
    """Prints at most `limit` changes for each step."""

    kind = "console"

    def __init__(self, limit: int = 20) -> None:
        super().__init__()
        if limit < 0:
            raise ConfigError(f"console: limit is 0 or more; found {limit}")
        self._limit = limit

    def show(self, frame: pl.DataFrame) -> None:
        for (step,), changes in frame.group_by(STEP, maintain_order=True):
            shown = changes.drop(STEP).head(self._limit)
            for row in shown.iter_rows(named=True):
                weight = row.pop(WEIGHT)
                text = ", ".join(f"{name}={value!r}" for name, value in row.items())
                sys.stdout.write(f"step {step}  {weight:+d}  {text}\n")
            if changes.height > shown.height:
                sys.stdout.write(f"step {step}  … and {changes.height - shown.height} more\n")
        sys.stdout.flush()


class MemorySink(_Shown):
    """Appends a dict for each change, `__weight` and `__step` included, to a list of the driver's process.

    The list has what was published by this process; earlier changes of a job that goes on are in `read`.
    """

    kind = "memory"

    def __init__(self, target: list[dict[str, Any]]) -> None:
        super().__init__()
        if not isinstance(target, list):
            raise ConfigError(f"memory: a list is needed to append to; found {type(target).__name__}")
        self.target: list[dict[str, Any]] = target

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "target": []}

    def show(self, frame: pl.DataFrame) -> None:
        self.target.extend(frame.to_dicts())


def _json_ready(frame: pl.DataFrame) -> list[pl.Expr]:
    return [
        pl.col(name).bin.encode("base64") if isinstance(dtype, pl.Binary) else pl.col(name).cast(pl.String)
        for name, dtype in frame.schema.items()
        if isinstance(dtype, pl.Binary | pl.Decimal)
    ]


def parquet(path: str | os.PathLike[str] | None = None) -> ParquetSink:
    """An output kept as Parquet files of changes, in `path` (or a URL such as s3://…) or inside the job directory."""
    return ParquetSink(path)


def jsonl(path: str | os.PathLike[str] | None = None) -> JsonSink:
    """An output kept as JSON lines of changes, in `path` (or a URL such as s3://…) or inside the job directory."""
    return JsonSink(path)


def console(limit: int = 20) -> ConsoleSink:
    """An output that is printed, at most `limit` changes for each step."""
    return ConsoleSink(limit)


def memory(target: list[dict[str, Any]]) -> MemorySink:
    """An output that is appended to a list in this process; for tests and notebooks."""
    return MemorySink(target)


def sink_like(fingerprint: Mapping[str, Any]) -> FileSink:
    """A sink that can read what one with this fingerprint has published.

    Raises:
        ConfigError: the kind is unknown.
    """
    kind, path = fingerprint.get("kind"), fingerprint.get("path")
    if kind == ParquetSink.kind:
        return ParquetSink(path)
    if kind == JsonSink.kind:
        return JsonSink(path)
    if kind == ConsoleSink.kind:
        return ConsoleSink()
    if kind == MemorySink.kind:
        return MemorySink([])
    raise ConfigError(f"an output's sink of kind {kind!r} is not one of ours; read it where that sink writes")
