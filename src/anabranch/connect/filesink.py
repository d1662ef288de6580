"""A sink that keeps each staged frame in a file of its own, on a disk or in an object store.

On a disk a file is staged in `_staging` below the output's directory (the underscore hides it from readers of the
directory, `files` included) and renamed into the directory when it is published.

An object store cannot rename, and copying would write every output twice.  So an object is staged under its final
name, and the commit record that names it makes it output: publishing does nothing.  The name has a digest of the job
directory's URL in it, because two jobs that are pointed at one place must not replace or discard each other's.

Must not know: steps' records, flows, Spark.
"""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import polars as pl
import pyarrow as pa

from anabranch import crash
from anabranch.connect.sink import Sink, Staged
from anabranch.errors import ConfigError, CorruptError
from anabranch.storage import Storage, is_url, open_storage
from anabranch.storage.ahead import read_ahead
from anabranch.storage.local import LocalStorage

STAGING = "_staging"

_STAGE = crash.declare_write("stage", "a worker stages an output file")
_BEFORE = crash.declare("publish.before", "before the files of a committed step get their names")
_BETWEEN = crash.declare("publish.between", "when one of the files of a committed step has got its name")
_AFTER = crash.declare("publish.after", "after the files of a committed step have got their names")


class FileSink(Sink):
    """One file for every staged frame; subclasses say how a frame is written."""

    kind: str
    suffix: str

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        if path is not None:
            path = open_storage(path).url if is_url(path) else os.path.abspath(path)
        self._path = path

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": self.kind, "path": self._path}

    @abstractmethod
    def encode(self, frame: pl.DataFrame) -> bytes | memoryview:
        """A frame as the bytes of a file."""

    @abstractmethod
    def decode(self, data: bytes) -> pl.DataFrame:
        """The frame in the bytes of a file."""

    def place(self, root: Storage) -> Storage:
        """Where published files are."""
        return root if self._path is None else open_storage(self._path)

    def moves(self, place: Storage) -> bool:
        """Whether a file is staged elsewhere than it is published."""
        return place.local is not None

    def stage(self, frame: pl.DataFrame, root: Storage, name: str) -> Staged:
        place = self.place(root)
        data = self.encode(frame)
        if self.moves(place):
            final = name + self.suffix
            path = f"{STAGING}/{final}"
        else:
            path = final = name + _mark(root) + self.suffix
        place.replace(path, data, point=_STAGE)
        return Staged(self._recorded(place, path), self._recorded(place, final), frame.height, len(data))

    def publish(self, root: Storage, staged: Sequence[Staged]) -> None:
        place = self.place(root)
        crash.point(_BEFORE)
        if self.moves(place):
            moved = [self._move(place, item) for item in staged]
            if any(moved) and isinstance(place, LocalStorage):
                place.sync()
                place.sync(STAGING)
        crash.point(_AFTER)

    def _move(self, place: Storage, item: Staged) -> bool:
        """Publish one file; whether that was still to be done."""
        path, final = self._name(place, item.path), self._name(place, item.final)
        if not place.exists(path):
            if place.exists(final):
                return False
            raise CorruptError(
                f"output file {place.where(final)} was committed, but it is neither there nor staged at "
                f"{place.where(path)}; restore it from a backup of the output's directory"
            )
        # Only this job's driver publishes, so looking before renaming is no race; a plain rename would
        # silently replace the output of another job that was pointed at the same directory.
        if place.exists(final) and place.size(final) != item.size:
            raise ConfigError(
                f"output file {place.where(final)} already exists and is not this job's; give each job a directory of "
                "its own for this output, or remove the files of the earlier job"
            )
        if isinstance(place, LocalStorage):
            place.rename(path, final)
        else:
            place.replace(final, place.read(path))
            place.delete(path)
        crash.point(_BETWEEN)
        return True

    def discard(self, root: Storage, keep: AbstractSet[str], since: str = "") -> None:
        place = self.place(root)
        if self.moves(place):
            place.sweep(STAGING)
            names = [f"{STAGING}/{name}" for name in place.list(STAGING)]
        else:
            mine = _mark(root) + self.suffix
            names = [name for name in place.list(after=since) if name.endswith(mine)]
        place.delete(*(name for name in names if self._recorded(place, name) not in keep))

    def expire(self, root: Storage, files: Sequence[Staged]) -> None:
        place = self.place(root)
        place.delete(*{self._name(place, name) for item in files for name in (item.path, item.final)})

    def read(self, root: Storage, files: Sequence[Staged]) -> pl.DataFrame:
        frames = self.read_each(root, files)
        return pl.concat(frames) if frames else pl.DataFrame()

    def read_each(self, root: Storage, files: Sequence[Staged]) -> list[pl.DataFrame]:
        """The frames in committed files."""
        place = self.place(root)
        return list(read_ahead(place, lambda item: self._read_one(place, item), files))

    def _read_one(self, place: Storage, item: Staged) -> pl.DataFrame:
        path, final = self._name(place, item.path), self._name(place, item.final)
        data = None
        # It may still be staged, and be renamed while we look: in this order it is not missed.
        for name in (path, final):
            try:
                data = place.read(name)
                break
            except FileNotFoundError:
                continue
        where = place.where(final)
        if data is None:
            raise CorruptError(f"output file {where} is missing; restore it from a backup")
        try:
            frame = self.decode(data)
        except (pl.exceptions.PolarsError, pa.ArrowException, OSError) as error:
            raise CorruptError(f"output file {where} is damaged: {error}") from error
        if frame.height != item.rows:
            raise CorruptError(f"output file {where} has {frame.height} rows, and {item.rows} were committed")
        return frame

    def _recorded(self, place: Storage, name: str) -> str:
        """A file's name as records have it."""
        return name if self._path is None else place.where(name)

    def _name(self, place: Storage, recorded: str) -> str:
        """The inverse of `_recorded`."""
        return recorded if self._path is None else recorded.removeprefix(place.url.rstrip("/") + "/")


def _mark(root: Storage) -> str:
    return "-" + hashlib.blake2b(root.url.encode(), digest_size=4).hexdigest()
