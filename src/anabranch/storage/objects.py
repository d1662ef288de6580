"""A storage in an object store (S3, and what else obstore speaks): one object for each file.

An object appears whole or not at all, and survives once the store has answered; creating is a conditional put.

A put whose answer is lost is sent again, by obstore or by us, and may then find its own object.  So every object that
is created carries a token, made for that one call, in its metadata: whoever finds the name taken looks whose token is
there.  Comparing contents would not do, because two writers may write the same.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

import obstore
from obstore import exceptions
from obstore.store import from_url

from anabranch.errors import AnabranchError, ConfigError, EngineError
from anabranch.storage.base import Storage, checked, entries, passing

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ObjectStore, RetryConfig

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss")

_RETRY: RetryConfig = {"retry_timeout": timedelta(seconds=60)}
_CREATE_TRIES = 3
_WRITER = "writer"
_REFUSED = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)

_S3_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
    "AWS_SKIP_SIGNATURE",
    "AWS_REQUEST_PAYER",
    "AWS_CHECKSUM_ALGORITHM",
    "AWS_SERVER_SIDE_ENCRYPTION",
    "AWS_SSE_KMS_KEY_ID",
)


class ObjectStorage(Storage):
    """Objects below a URL.  Endpoint and credentials are those of the process that made it, wherever it travels."""

    local = None

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if not parts.netloc or parts.query or parts.fragment:
            raise ConfigError(f"{url}: a storage is written as {parts.scheme}://BUCKET/PREFIX")
        path = quote(unquote(parts.path.strip("/")))
        self.url = f"{parts.scheme}://{parts.netloc}" + (f"/{path}" if path else "")
        self._root = self.url
        self._prefix = ""
        self._options = _options(parts.scheme, os.environ)
        self._store()

    def child(self, *names: str) -> ObjectStorage:
        made = object.__new__(ObjectStorage)
        made.__dict__.update(self.__dict__)
        for name in map(checked, names):
            made.url = f"{made.url}/{quote(name)}"
            made._prefix = f"{made._prefix}{name}/"
        return made

    def where(self, name: str) -> str:
        return f"{self.url}/{quote(name)}" if name else self.url

    def read(self, name: str, limit: int | None = None) -> bytes:
        options: GetOptions | None = None if limit is None else {"range": (0, limit)}
        with self._errors(name):
            return bytes(obstore.get(self._store(), self._path(name), options=options).bytes())

    def create(self, name: str, data: bytes | memoryview, point: str = "", named: bool = True) -> None:
        path = self._path(name)
        token = secrets.token_hex(16)
        _before(point)
        for again in range(_CREATE_TRIES - 1, -1, -1):
            try:
                with self._errors(name, writing=True):
                    obstore.put(self._store(), path, _flat(data), mode="create", attributes={_WRITER: token})
                break
            except FileExistsError:
                if self._writer(name) != token:
                    raise
                break
            except EngineError:
                # It may have been written all the same; the next try will find out.
                if not again:
                    raise
        passing(point, "after")

    def replace(self, name: str, data: bytes | memoryview, durable: bool = True, point: str = "") -> None:
        path = self._path(name)
        _before(point)
        with self._errors(name, writing=True):
            obstore.put(self._store(), path, _flat(data))
        passing(point, "after")

    def delete(self, *names: str) -> None:
        if names:
            with self._errors(names[0]), suppress(FileNotFoundError):
                obstore.delete(self._store(), list(map(self._path, names)))

    def exists(self, name: str) -> bool:
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    def size(self, name: str) -> int:
        with self._errors(name):
            return obstore.head(self._store(), self._path(name))["size"]

    def list(self, folder: str = "", after: str = "") -> list[str]:
        prefix = f"{self._prefix}{checked(folder)}/" if folder else self._prefix
        cut = len(prefix)
        with self._errors(folder):
            if not after:
                found = obstore.list_with_delimiter(self._store(), prefix)
                files = [meta["path"][cut:] for meta in found["objects"]]
                return entries(files, [path[cut:] for path in found["common_prefixes"]], after)
            chunks = obstore.list(self._store(), prefix, offset=prefix + after)
            names = [meta["path"][cut:].partition("/") for chunk in chunks for meta in chunk]
        return entries(
            [name for name, slash, _ in names if not slash],
            {name for name, slash, _ in names if slash},
            after,
        )

    def _writer(self, name: str) -> str | None:
        """The token of the call that created an object; None when it is gone or was not created by us."""
        try:
            with self._errors(name):
                attributes: Mapping[str, Any] = obstore.get(self._store(), self._path(name)).attributes
        except FileNotFoundError:
            return None
        return attributes.get(_WRITER)

    def _path(self, name: str) -> str:
        return self._prefix + checked(name)

    def _store(self) -> ObjectStore:
        with self._errors(""):
            return _store(self._root, self._options)

    @contextmanager
    def _errors(self, name: str, *, writing: bool = False) -> Iterator[None]:
        """Turn obstore's errors into ours, which name the object."""
        where = self.where(name)
        try:
            yield
        except FileNotFoundError as error:
            # A bucket that is not there must not pass for an empty one.
            if writing or "NoSuchBucket" in str(error):
                raise _no_bucket(where) from error
            raise FileNotFoundError(f"{where} is not there") from error
        except exceptions.AlreadyExistsError as error:
            raise FileExistsError(f"{where} is there already") from error
        except _REFUSED as error:
            raise ConfigError(
                f"{where}: access was refused; check the credentials. {_brief(error)}"
            ) from error
        except exceptions.BaseError as error:
            raise _failed(where, _brief(error)) from error


@lru_cache(maxsize=64)
def _store(root: str, options: tuple[tuple[str, str], ...]) -> ObjectStore:
    """One for each place in a process: it holds the connections."""
    config = dict(options)
    client: dict[str, Any] = {"allow_http": True} if config.pop("allow_http", "") == "true" else {}
    make: Callable[..., ObjectStore] = from_url
    return make(root, config=config or None, client_options=client or None, retry_config=_RETRY)


def _options(scheme: str, variables: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """What the environment says of an S3 store; obstore finds out the rest, and all for other stores, by itself."""
    if scheme not in ("s3", "s3a"):
        return ()
    options = {name.lower(): variables[name] for name in _S3_VARIABLES if variables.get(name)}
    endpoint = next(
        (variables[name] for name in reversed(_S3_VARIABLES) if "ENDPOINT" in name and variables.get(name)),
        "",
    )
    # What stays on this machine needs no encryption; for the rest the user has to say so.
    host = urlsplit(endpoint).hostname or ""
    if host in ("localhost", "::1") or host.startswith("127."):
        options["allow_http"] = "true"
    elif variables.get("AWS_ALLOW_HTTP"):
        options["allow_http"] = variables["AWS_ALLOW_HTTP"].lower()
    return tuple(options.items())


def _before(point: str) -> None:
    # A put is whole or nothing: killed in its middle, it was not there.
    passing(point, "before")
    passing(point, "torn")


def _flat(data: bytes | memoryview) -> memoryview:
    return memoryview(data).cast("B")


def _failed(where: str, brief: str) -> AnabranchError:
    if "NoSuchBucket" in brief:
        return _no_bucket(where)
    if "Unable to recognise URL" in brief or "must be specified" in brief:
        return ConfigError(f"{where}: {brief}")
    return EngineError(f"{where}: the object store failed: {brief}")


def _no_bucket(where: str) -> ConfigError:
    return ConfigError(f"{where}: there is no such bucket; make it, or give another URL")


def _brief(error: Exception) -> str:
    """obstore's message without the structures that follow it."""
    return " ".join(str(error).split("\n\nDebug source", 1)[0].split())
