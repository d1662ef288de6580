"""Which files an input consists of, watched cheaply.

A directory is listed again only when its modification time moved.  Times have a granularity (a clock tick
locally, a second or two elsewhere), so a directory that changed a moment ago is listed again until the
moment is safely past: a file that was created in the same tick as the last listing is not missed.

Must not know: what is in the files.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from anabranch.errors import ConfigError

_TICK = 2.0
"""Seconds within which two changes of a directory may carry the same time."""

_SLOW = 0.002
"""Seconds; a listing that takes longer is repeated only now and then while no modification time moves."""

_GLOB = re.compile(r"[*?\[]")


class Listing:
    """The files under `base` whose path relative to it matches a pattern; hidden and temporary ones never do.

    `*` and `?` do not cross a `/`; `**/` does.  Subdirectories are entered only when the pattern has a `/`.
    """

    def __init__(self, base: Path, pattern: str) -> None:
        self.base = base
        self.pattern = pattern
        self.names: list[str] = []
        """Sorted; as of the last `refresh`."""
        self._match = re.compile(_translate(pattern)).fullmatch
        self._deep = "/" in pattern
        self._seen: dict[str, int] = {}
        """Modification time of every directory as of just before it was last listed."""
        self._settled = False
        """Whether every later change must show in a modification time."""
        self._rest_until = 0.0

    @classmethod
    def of(cls, path: str | os.PathLike[str], pattern: str) -> Listing:
        """From what a user gives: a directory, one file, or a path with wildcards.

        Raises:
            ConfigError: the directory does not exist.
        """
        text = os.path.abspath(os.fspath(path))
        if _GLOB.search(text) and not os.path.exists(text):
            parts = text.split("/")
            first = next(i for i, part in enumerate(parts) if _GLOB.search(part))
            base, pattern = "/".join(parts[:first]) or "/", "/".join(parts[first:])
        elif os.path.isfile(text):
            base, pattern = os.path.dirname(text), re.sub(r"([*?\[])", r"[\1]", os.path.basename(text))
        else:
            base = text
        if not os.path.isdir(base):
            raise ConfigError(
                f"input path {base} does not exist; create the directory (it may be empty if a schema is "
                "given) or correct the path"
            )
        return cls(Path(base), pattern)

    def refresh(self) -> bool:
        """Look again if something may have changed; whether `names` was made anew.

        Raises:
            ConfigError: the directory is gone.
        """
        begun = time.monotonic()
        if (self._settled or begun < self._rest_until) and not self._moved():
            return False
        before = time.time()
        self._seen = {}
        self.names = sorted(self._walk(""))
        newest = max(self._seen.values(), default=0)
        self._settled = newest / 1e9 < before - _TICK
        ended = time.monotonic()
        if ended - begun > _SLOW:
            self._rest_until = ended + 20 * (ended - begun)
        return True

    def _moved(self) -> bool:
        try:
            return any(os.stat(path).st_mtime_ns != mtime for path, mtime in self._seen.items())
        except FileNotFoundError:
            return True

    def _walk(self, prefix: str) -> Iterator[str]:
        path = os.path.join(self.base, prefix)
        try:
            self._seen[path] = os.stat(path).st_mtime_ns
            with os.scandir(path) as found:
                entries = list(found)
        except FileNotFoundError:
            if prefix:
                return
            raise ConfigError(f"input directory {self.base} is gone; put it back") from None
        for entry in entries:
            if entry.name.startswith((".", "_")) or entry.name.endswith(".tmp"):
                continue
            name = prefix + entry.name
            if entry.is_dir():
                if self._deep:
                    yield from self._walk(name + "/")
            elif self._match(name):
                yield name


def _translate(pattern: str) -> str:
    out, i = "", 0
    while i < len(pattern):
        if pattern.startswith("**/", i):
            out, i = out + "(?:[^/]+/)*", i + 3
        elif pattern[i] == "*":
            out, i = out + "[^/]*", i + 1
        elif pattern[i] == "?":
            out, i = out + "[^/]", i + 1
        elif pattern[i] == "[" and (end := pattern.find("]", i + 2)) > 0:
            inner = pattern[i + 1 : end].replace("\\", r"\\")
            negated = inner[0] == "!"
            out, i = out + ("[^/" + inner[1:] if negated else "[" + inner) + "]", end + 1
        else:
            out, i = out + re.escape(pattern[i]), i + 1
    return out
