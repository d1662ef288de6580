"""The versions of a job's state in storage: committed, listed, checked, trimmed.

    VERSION/manifest                                    a checksummed record, created exclusively and last
    VERSION/pPARTITION-WRITER-NONCE.parquet             pieces

VER-1  A version exists when, and only when, its manifest does; all its pieces were durable before.
VER-2  Pieces that no manifest names are left from a snapshot that was given up, or belong to one under way, whose
       number is above the newest version; so only pieces up to that one are removed.
VER-3  Trimming removes manifests before the pieces that only they name.  Cut short anywhere, it leaves versions that are
       whole, and files that the next trimming removes.

Version 0, the empty state before step 0, is nowhere stored.

Must not know: what is in pieces.
"""

from __future__ import annotations

import builtins
import logging
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from anabranch import crash
from anabranch.errors import CorruptError, Fenced
from anabranch.state.manifest import Manifest, Piece
from anabranch.state.pieces import version_folder
from anabranch.storage import record
from anabranch.storage.base import Storage

log = logging.getLogger(__name__)

COMMIT = crash.declare_write("manifest", "the manifest of a checkpoint is written")
TRIM_MANIFEST = crash.declare("trim.manifest", "after an old checkpoint's manifest was removed")
TRIM_PIECE = crash.declare("trim.piece", "after a piece that no checkpoint needs was removed")
_NAME = "manifest"
_AT_ONCE = 16
"""Questions to the storage at a time: an object store takes tens of milliseconds for each."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The storage of one version."""

    version: int
    own: int
    """Bytes that it wrote and still names."""
    total: int
    """Bytes of all pieces that it names, shared ones included."""


class Versions:
    """The checkpoints of one job.  Only its coordinator commits and trims."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def list(self) -> list[int]:
        """The versions that exist, ascending."""
        return [version for version in self._folders() if self.storage.exists(_path(version))]

    def next_version(self) -> int:
        """Above every number that was ever begun, so that no file is written twice."""
        return max(self._folders(), default=0) + 1

    def manifest(self, version: int) -> Manifest:
        """Raises CorruptError when it is missing or damaged."""
        where = self.storage.where(_path(version))
        try:
            found = Manifest.from_json(record.read(self.storage, _path(version)))
        except FileNotFoundError:
            raise CorruptError(f"checkpoint {version} is missing: there is no {where}") from None
        if found.version != version:
            raise CorruptError(
                f"{where} is the manifest of checkpoint {found.version}; it was moved or copied"
            )
        return found

    def commit(self, manifest: Manifest) -> None:
        """Make a version exist, once.  Raises Fenced when somebody else has."""
        try:
            record.create(self.storage, _path(manifest.version), manifest.to_json(), COMMIT)
        except FileExistsError:
            raise Fenced(
                f"checkpoint {manifest.version} exists already: another coordinator has made it, and this one must stop"
            ) from None

    def drop(self, version: int) -> None:
        """Let a version be none any more; the next trimming removes its pieces."""
        self.storage.delete(_path(version))

    def newest_usable(self, below: int | None = None) -> tuple[Manifest | None, builtins.list[str]]:
        """The newest version (below that one) that is whole as far as names and sizes tell, and what is wrong with
        those above it.  The content of a piece is verified when it is read."""
        problems: builtins.list[str] = []
        for version in reversed(self.list()):
            if below is not None and version >= below:
                continue
            try:
                manifest = self.manifest(version)
            except CorruptError as error:
                problems.append(str(error))
                continue
            wrong = self.check(manifest)
            if not wrong:
                return manifest, problems
            problems += wrong
        return None, problems

    def check(self, manifest: Manifest) -> builtins.list[str]:
        """What is wrong with a version's pieces, as far as names and sizes tell."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = [*pool.map(self._size, manifest.pieces)]
        return [
            f"checkpoint {manifest.version}: {self.storage.where(piece.path)} "
            + ("is missing" if size is None else f"has {size} bytes instead of {piece.size}")
            for piece, size in zip(manifest.pieces, found, strict=True)
            if size != piece.size
        ]

    def usage(self) -> builtins.list[Usage]:
        """The storage of each version, ascending; a damaged manifest is left out."""
        result = []
        for version in self.list():
            try:
                pieces = self.manifest(version).pieces
            except CorruptError as error:
                log.warning("no account of checkpoint=%d error=%s", version, error)
                continue
            own = sum(piece.size for piece in pieces if piece.version == version)
            result.append(Usage(version, own, sum(piece.size for piece in pieces)))
        return result

    def trim(self, keep: int = 2, unusable: Collection[int] = ()) -> int:
        """Remove all but the newest `keep` versions, those known to be unusable, and pieces that nobody names.

        A version whose manifest cannot be read does not count among the kept and is removed, unless it is
        all there is: then nothing is touched.

        Returns the bytes of pieces that were freed.
        """
        kept: dict[int, Manifest] = {}
        there = self.list()
        for version in reversed(there):
            if len(kept) < keep and version not in unusable:
                try:
                    kept[version] = self.manifest(version)
                except CorruptError as error:
                    log.warning("checkpoint=%d cannot be kept error=%s", version, error)
        if not kept:
            return 0
        for version in there:
            if version not in kept:
                self.storage.delete(_path(version))
                crash.point(TRIM_MANIFEST)
        needed = {piece.path for manifest in kept.values() for piece in manifest.pieces}
        return sum(
            self._remove_pieces(version, needed) for version in self._folders() if version <= max(there)
        )

    def _remove_pieces(self, version: int, needed: Collection[str]) -> int:
        folder = version_folder(version)
        self.storage.sweep(folder)
        freed = 0
        for name in self.storage.list(folder):
            path = f"{folder}/{name}"
            if name != _NAME and not name.endswith("/") and path not in needed:
                try:
                    size = self.storage.size(path)
                except FileNotFoundError:
                    continue
                self.storage.delete(path)
                freed += size
                crash.point(TRIM_PIECE)
        if self.storage.local is not None:
            # Only a disk keeps empty folders, and listing versions looks into each.
            with suppress(OSError):
                (self.storage.local / folder).rmdir()
        return freed

    def _size(self, piece: Piece) -> int | None:
        try:
            return self.storage.size(piece.path)
        except FileNotFoundError:
            return None

    def _folders(self) -> builtins.list[int]:
        return sorted(int(name[:-1]) for name in self.storage.list() if name[:-1].isdigit())


def _path(version: int) -> str:
    return f"{version_folder(version)}/{_NAME}"
