"""A storage in a directory: files are written under a temporary name, synced, and then given their own.

`link()` is exclusive where `rename()` would replace, so that is how a file is created.  A file's folder is synced with
it, and so is, once in each process, every folder above it up to the root: another process may have made one of them
and died before it was durable.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from anabranch import crash
from anabranch.errors import StorageFullError
from anabranch.storage.base import Storage, checked, entries, passing

_DURABLE: set[Path] = set()
"""Folders whose names this process knows to be durable."""

_ABSENT = (FileNotFoundError, NotADirectoryError)


class LocalStorage(Storage):
    """Files below a directory, which is made with the first of them."""

    local: Path

    def __init__(self, root: Path, top: Path | None = None) -> None:
        self.local = Path(os.path.abspath(root))
        self.url = str(self.local)
        self._top = top or self.local
        """Folders from here down are ours to make durable."""

    def child(self, *names: str) -> LocalStorage:
        return LocalStorage(self.local.joinpath(*map(checked, names)), self._top)

    def read(self, name: str, limit: int | None = None) -> bytes:
        try:
            with open(self._path(name), "rb") as file:
                return file.read(-1 if limit is None else limit)
        except NotADirectoryError as error:
            raise FileNotFoundError(*error.args) from error

    def create(self, name: str, data: bytes | memoryview, point: str = "", named: bool = True) -> None:
        path = self._path(name)
        passing(point, "before")
        with _full_disk(path):
            self._make(path.parent, durable=True)
            with _temporary(path, data, point, durable=True) as temporary:
                os.link(temporary, path)
            if named:
                sync_directory(path.parent)
        passing(point, "after")

    def replace(self, name: str, data: bytes | memoryview, durable: bool = True, point: str = "") -> None:
        path = self._path(name)
        passing(point, "before")
        with _full_disk(path):
            self._make(path.parent, durable=durable)
            with _temporary(path, data, point, durable=durable) as temporary:
                os.replace(temporary, path)
            if durable:
                sync_directory(path.parent)
        passing(point, "after")

    def rename(self, name: str, new: str) -> None:
        """Give a file another name, in the place of any that has it; durable after `sync` of both folders.

        Raises FileNotFoundError.
        """
        path = self._path(new)
        with _full_disk(path):
            self._make(path.parent, durable=True)
            os.replace(self._path(name), path)

    def sync(self, folder: str = "") -> None:
        sync_directory(self._path(folder))

    def delete(self, *names: str) -> None:
        for path in map(self._path, names):
            with suppress(*_ABSENT):
                path.unlink()

    def exists(self, name: str) -> bool:
        return self._path(name).is_file()

    def size(self, name: str) -> int:
        try:
            return self._path(name).stat().st_size
        except NotADirectoryError as error:
            raise FileNotFoundError(*error.args) from error

    def list(self, folder: str = "", after: str = "") -> list[str]:
        try:
            with os.scandir(self._path(folder)) as found:
                split: tuple[list[str], list[str]] = ([], [])
                for entry in found:
                    if not _is_temporary(entry.name):
                        split[entry.is_dir()].append(entry.name)
        except _ABSENT:
            return []
        return entries(*split, after)

    def prune(self, folder: str) -> None:
        with suppress(OSError):
            self._path(folder).rmdir()

    def sweep(self, folder: str = "") -> None:
        path = self._path(folder)
        try:
            names = os.listdir(path)
        except _ABSENT:
            return
        for name in filter(_is_temporary, names):
            (path / name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.local / checked(name) if name else self.local

    def _make(self, folder: Path, *, durable: bool) -> None:
        """Make a folder and those above it, and make sure that they are durable."""
        if folder in _DURABLE and folder.is_dir():
            return
        if not durable:
            folder.mkdir(parents=True, exist_ok=True)
            return
        if folder == self._top:
            missing = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            for path in missing:
                sync_directory(path.parent)
        else:
            self._make(folder.parent, durable=True)
            folder.mkdir(exist_ok=True)
            sync_directory(folder.parent)
        _DURABLE.add(folder)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _temporary(path: Path, data: bytes | memoryview, point: str, *, durable: bool) -> Iterator[Path]:
    """The bytes under a name of their own beside their place; the name is gone afterwards."""
    # A process number would not do: two containers on shared storage may both be number 1.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            if point:
                crash.write(file, data, point)
            else:
                file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(".tmp")


@contextmanager
def _full_disk(path: Path) -> Iterator[None]:
    """Turn the operating system's word for a full disk into ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFullError(f"{path}: the disk is full; make room and start again") from error
        raise
