"""The contract of a storage: whole files by name below one root, created once or replaced.

STO-1  What `create` or a durable `replace` returned from survives a power failure, name and content.
STO-2  A name is created at most once: of any number of creators one returns, the others get FileExistsError.
STO-3  A reader sees a whole file or none, also while it is written and after the writer was killed.
STO-4  What one process has written, any process that looks later sees: listings included.

A name is relative to the root and may have folders in it, separated by "/"; folders come and go with what is in
them.  Only a local disk knows empty folders.
"""

from __future__ import annotations

import builtins
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

from anabranch import crash
from anabranch.errors import ConfigError


class Storage(ABC):
    """Files below one root.  Picklable, and cheap to make: it holds a place, not a connection.

    `point` names a write that was declared with `crash.declare_write`.
    """

    url: str
    """The root as users write it: an absolute path, or a URL."""

    local: Path | None
    """The root as a directory, when it is one."""

    @abstractmethod
    def child(self, *names: str) -> Storage:
        """The storage rooted in a folder of this one."""

    @abstractmethod
    def read(self, name: str, limit: int | None = None) -> bytes:
        """The file, or at most its first `limit` bytes.  Raises FileNotFoundError."""

    @abstractmethod
    def create(self, name: str, data: bytes | memoryview, point: str = "", named: bool = True) -> None:
        """Write a new file, durably; without `named`, its name is durable only after `sync` of its folder.

        Raises:
            FileExistsError: it is there already, whoever made it and whatever is in it.
            StorageFullError: the disk is full; there is no such file.
            EngineError: the store cannot be reached, and nobody knows whether the file is there.
        """

    @abstractmethod
    def replace(self, name: str, data: bytes | memoryview, durable: bool = True, point: str = "") -> None:
        """Write a file in the place of an older one, or of none, atomically.

        Without `durable`, a power failure may bring the older one back, or leave nothing.

        Raises:
            StorageFullError: the disk is full; the older file is still there.
        """

    @abstractmethod
    def delete(self, *names: str) -> None:
        """Remove files; one that is not there is removed already.

        Not durable, and in any order: after a power failure any of them may be back.
        """

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether there is such a file."""

    @abstractmethod
    def size(self, name: str) -> int:
        """The file's length in bytes.  Raises FileNotFoundError."""

    @abstractmethod
    def list(self, folder: str = "", after: str = "") -> list[str]:
        """Names directly below a folder that sort after `after`, sorted; those of folders end with "/".

        No such folder, no names.  In an object store it costs a request for each 1,000 names.
        """

    def sync(self, folder: str = "") -> None:  # noqa: B027  in an object store nothing is left to do
        """Make the names directly below a folder durable, and the lack of names that were removed."""

    def prune(self, folder: str) -> None:  # noqa: B027  only a disk keeps empty folders
        """Remove a folder if it is empty."""

    def sweep(self, folder: str = "") -> None:  # noqa: B027  only a disk keeps halves of files
        """Remove what killed writers have left directly below a folder; nobody may be writing there."""

    def where(self, name: str) -> str:
        """A file's full path or URL, for messages."""
        return f"{self.url.rstrip('/')}/{name}" if name else self.url

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Storage) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)


def passing(point: str, when: str) -> None:
    """Come by a crash point of a write that has a name."""
    if point:
        crash.point(f"{point}.{when}")


def checked(name: str) -> str:
    """A name that stays below its root.  Raises ConfigError for any other."""
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise ConfigError(
            f"{name!r} is not a name in a storage: parts are separated by one '/', and none is '..'"
        )
    return name


def entries(files: Iterable[str], folders: Iterable[str], after: str) -> builtins.list[str]:
    """What `list` gives."""
    return sorted(name for name in (*files, *(f"{folder}/" for folder in folders)) if name > after)
