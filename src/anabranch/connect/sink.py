"""The contract of a sink: stage in a worker, publish in the driver, exactly once.

A step's output is written by many workers and must appear as a whole or not at all:

1. `stage` (worker): the frame becomes a file, durably, where no reader takes it for output yet.
2. The driver creates the step's commit record, which names the `Staged` files.
3. `publish` (driver): the named files get their final names.  Done again after a crash, it changes nothing.
4. `discard` (driver): whatever is still staged and was never named is removed.
5. `expire` (driver): published files of steps that nobody may read any more are removed.

A staged file that no commit record names is rubbish of a failed attempt; a named one will be published,
however often the driver dies in between.  A staged name is never used for two different contents: it has
to contain the step, the attempt and the worker.

Readers that go by the commit records see whole steps at any time, published or not.  Who only lists a directory
sees what is published.  An object store has no rename, so there a file may be staged under its final name, and only
the commit records tell it from rubbish.

Must not know: steps' records, flows, Spark.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import polars as pl

from anabranch.storage import Storage


@dataclass(frozen=True, slots=True)
class Staged:
    """One staged file: where it is, where it will be, and what is in it.

    Both are names below the output's root inside the job directory, which may be moved; or absolute, when the sink
    has a path of its own.  In an object store they may be the same.
    """

    path: str
    final: str
    rows: int
    size: int

    def to_json(self) -> dict[str, Any]:
        """A JSON-able form; the inverse of `from_json`."""
        return {"path": self.path, "final": self.final, "rows": self.rows, "size": self.size}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Staged:
        """Read back what `to_json` gave."""
        return cls(str(data["path"]), str(data["final"]), int(data["rows"]), int(data["size"]))


class Sink(ABC):
    """Where an output's changes go.

    A change is a row of the output's columns with `__weight` and `__step` (Int64 both).  `root` is the
    output's own storage inside the job directory; a sink that was given a path of its own uses that
    instead.  Sinks are pickled to the workers; what only the driver has stays out of `__getstate__`.
    """

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """The JSON-able parameters that say where and in which form the output is kept."""

    @abstractmethod
    def stage(self, frame: pl.DataFrame, root: Storage, name: str) -> Staged:
        """Write the changes to a staging file, durably (worker).

        `name` has no suffix and no separator, and is unique to (step, attempt, worker).  Written again
        under the same name, the file is replaced.

        Raises:
            StorageFullError: the disk is full.
        """

    @abstractmethod
    def publish(self, root: Storage, staged: Sequence[Staged]) -> None:
        """Make staged files visible, durably (driver, after the commit record).  Idempotent.

        Raises:
            CorruptError: a file is neither staged nor published; not every storage can tell.
        """

    @abstractmethod
    def discard(self, root: Storage, keep: AbstractSet[str], since: str = "") -> None:
        """Remove what is staged, except the paths in `keep` (driver, when no worker is writing).

        Names sort by step.  No file whose name sorts before `since` is removed where staged files cannot be told from
        published ones, and every file from there on that a commit record names is in `keep`.
        """

    @abstractmethod
    def expire(self, root: Storage, files: Sequence[Staged]) -> None:
        """Remove published files (driver).  Idempotent."""

    @abstractmethod
    def read(self, root: Storage, files: Sequence[Staged]) -> pl.DataFrame:
        """The changes in committed files, in the order of `files`.

        No files, no columns: the caller knows the schema.

        Raises:
            CorruptError: a committed file is missing or damaged.
        """
