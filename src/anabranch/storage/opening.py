"""From what a user writes to a storage."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from anabranch.errors import ConfigError
from anabranch.storage.base import Storage
from anabranch.storage.local import LocalStorage

_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_")


def open_storage(where: str | os.PathLike[str]) -> Storage:
    """The storage at a path or a URL; nothing is made or asked yet.

    How an object store is reached is taken from the environment: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`,
    `AWS_REGION`, `AWS_ENDPOINT_URL` and so on; an endpoint on this machine may be plain HTTP.

    Raises:
        ConfigError: the URL is not one that we know.
    """
    text = os.fspath(where)
    if not is_url(text):
        return LocalStorage(Path(text))
    parts = urlsplit(text)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise ConfigError(f"{text}: a file URL names no other machine; write file:///path")
        return LocalStorage(Path(unquote(parts.path)))
    # obstore takes 50 ms to load, and most jobs do without.
    from anabranch.storage.objects import SCHEMES, ObjectStorage

    if parts.scheme in SCHEMES:
        return ObjectStorage(text)
    raise ConfigError(
        f"{text}: there is no storage for {parts.scheme}://; use a path, file:// or {', '.join(SCHEMES)}"
    )


def environment(places: Iterable[str | None]) -> dict[str, str]:
    """The variables of this process that say how the object stores among these places are reached.

    For processes on other machines, and those that were started before the variables were set.
    """
    if not any(place is not None and is_url(place) for place in places):
        return {}
    return {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}


def is_url(where: str | os.PathLike[str]) -> bool:
    """Whether a place is written as a URL."""
    return "://" in os.fspath(where)
