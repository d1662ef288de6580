"""The control endpoint: how another process of the same user commands a coordinator at work.

Theory of operation.  A coordinator listens on a port of the loopback interface that the kernel chooses, and says in a
small file which one, with a token that it has drawn for this run.  Whoever can read the file may command it: the file
is the permission, so rights are those of the file system and there is nothing to set up.  Requests and answers are
JSON objects over HTTP; `ROUTES` has them all.

CTL-1  Nothing is answered without the token, and comparing it takes as long whatever was sent.
CTL-2  Only this machine can connect, and a request that names another host is refused: a web page whose name was made to
       lead to loopback gets nowhere.
CTL-3  The file is readable by its user alone from the moment it exists, and is whole or absent.
CTL-4  A server removes the file only if it is its own: the next run may have written another.

Must not know what a command does: `answer` does.
"""

from __future__ import annotations

import errno
import hmac
import http.client
import json
import logging
import os
import secrets
import socket
import socketserver
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from anabranch.errors import AnabranchError, EngineError, JobDirError, StorageFullError, UserError
from anabranch.runtime import lease
from anabranch.runtime.jobdir import JobDir

log = logging.getLogger(__name__)

Json = dict[str, Any]
Answer = Callable[[str, str, Json], Json]
"""(method, path, body) to the answer.  Called from a thread for each request, so several at a time."""

ROUTES = {
    "/status": "GET",
    "/hosts": "GET",
    "/rescale": "POST",
    "/rescale/cancel": "POST",
    "/weigh": "POST",
}
"""Each path with its method."""

MOST_BYTES = 64 << 10
"""Of a request's body."""
_DISCARDED = 1 << 20
"""Most bytes of a refused body that are read: a connection closed with unread bytes loses the answer too."""
_NAMES = ("127.0.0.1", "localhost")
_PATIENCE = 30.0
"""Seconds that a client waits for an answer, and a server for a request."""
_LOOK_EVERY = 0.1
"""Seconds until a server notices that it is being closed."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a coordinator listens, and what to say to it."""

    port: int
    token: str = field(repr=False)
    process: int


def endpoint_path(jobdir: JobDir) -> Path:
    """The endpoint's file: always on a disk of the coordinator's machine, beside the state of an object store's job."""
    if jobdir.storage.local is not None:
        return jobdir.storage.local / "control" / "endpoint"
    return jobdir.state.with_name(f"{jobdir.state.name}.endpoint")


class ControlServer:
    """Listens from its construction until `close`, on threads of its own.

    To be made by whoever holds the job's lock, after `JobDir.clear_wishes`, which empties the file's folder.  An error of
    the user that `answer` raises becomes 409 with its text, any other one 500.  What `answer` returns is encoded on the
    thread that called it, so it must be an object that nobody changes any more.

    Raises:
        StorageFullError: there is no room for the file.
        JobDirError: the file cannot be written.
    """

    def __init__(self, jobdir: JobDir, answer: Answer) -> None:
        self.path = endpoint_path(jobdir)
        self._server = _Server(answer)
        self.endpoint = Endpoint(self._server.server_port, self._server.token, os.getpid())
        try:
            _write_private(self.path, json.dumps(asdict(self.endpoint)).encode())
        except OSError as error:
            self._server.server_close()
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFullError(f"{self.path}: the disk is full; make room and start again") from error
            raise JobDirError(f"{self.path}: the endpoint cannot be written: {error.strerror}") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_LOOK_EVERY,), name="anabranch-control", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Take no more requests.  One that is being answered goes on, on a thread that holds up nobody."""
        with suppress(OSError, ValueError, TypeError):
            if _parsed(self.path.read_bytes()) == self.endpoint:
                self.path.unlink()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ControlClient:
    """Commands the coordinator of a job.

    Raises:
        JobDirError: none is at work, or it cannot be reached from here: it is another user's, on another machine, just
            starting or just ending.
    """

    def __init__(self, jobdir: JobDir, patience: float = _PATIENCE) -> None:
        self.jobdir = jobdir
        self.patience = patience
        self.endpoint = find_endpoint(jobdir)

    def get(self, path: str) -> Json:
        """Ask for something.  Raises as `post` does."""
        return self._request("GET", path, {})

    def post(self, path: str, body: Json | None = None) -> Json:
        """Ask for something to be done.

        Raises:
            UserError: it was refused; the text says why.
            EngineError: the coordinator failed at it.
            JobDirError: the coordinator is gone, or does not answer.
        """
        return self._request("POST", path, body or {})

    def _request(self, method: str, path: str, body: Json) -> Json:
        try:
            status, answer = self._exchange(method, path, body)
        except ConnectionRefusedError:
            # The run that was found has ended; another may be at work.
            self.endpoint = find_endpoint(self.jobdir)
            try:
                status, answer = self._exchange(method, path, body)
            except ConnectionRefusedError:
                raise self._silent("does not listen any more; it is ending") from None
        if status == HTTPStatus.OK:
            return answer
        said = str(answer.get("error", f"status {status}"))
        if status == HTTPStatus.CONFLICT:
            raise UserError(said)
        if status == HTTPStatus.UNAUTHORIZED:
            raise self._silent("did not take the token; another run may have begun")
        raise EngineError(f"{self.jobdir.path}: process {self.endpoint.process} says: {said}")

    def _exchange(self, method: str, path: str, body: Json) -> tuple[int, Json]:
        # Not `urllib`: it would send the request, with the token, to a proxy that the environment names.
        connection = http.client.HTTPConnection("127.0.0.1", self.endpoint.port, timeout=self.patience)
        headers = {"Authorization": f"Bearer {self.endpoint.token}", "Content-Type": "application/json"}
        try:
            connection.request(method, path, json.dumps(body).encode(), headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
        except ConnectionRefusedError:
            raise
        except TimeoutError:
            raise self._silent(f"has not answered within {self.patience:g} s") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._silent(f"ended before it answered ({type(error).__name__})") from error
        finally:
            connection.close()
        if not isinstance(answer, dict):
            raise self._silent("gave no object for an answer")
        return response.status, answer

    def _silent(self, what: str) -> JobDirError:
        where = self.jobdir.path
        return JobDirError(
            f"{where}: process {self.endpoint.process} {what}; `anabranch status {where}` says how it is"
        )


def find_endpoint(jobdir: JobDir) -> Endpoint:
    """Where the coordinator at work listens.  Raises JobDirError, saying why it cannot be reached."""
    where = jobdir.path
    holder = lease.holder(jobdir.storage)
    if holder is None:
        raise JobDirError(
            f"{where} is not running; start it with `anabranch run FLOW.py --dir {where}`"
            if not jobdir.running()
            else f"{where} is just being started; try again in a moment"
        )
    process, host = holder
    if host != socket.gethostname():
        raise JobDirError(
            f"{where} is being run by process {process} on {host}, and is commanded on that machine only; say it there"
        )
    path = endpoint_path(jobdir)
    try:
        found = _parsed(path.read_bytes())
    except PermissionError:
        raise JobDirError(
            f"{where} is being run by process {process} of another user, and only that user may command it"
        ) from None
    except FileNotFoundError:
        told = "" if jobdir.storage.local is not None else " (with the same ANABRANCH_STATE_DIR as the run)"
        raise JobDirError(
            f"{where} is being run by process {process}, which takes no commands yet or no more; try again in a "
            f"moment{told}"
        ) from None
    except (ValueError, TypeError) as error:
        raise JobDirError(
            f"{path} is not an endpoint's file ({error}); stop the job and run it again"
        ) from None
    if found.process != process:
        raise JobDirError(
            f"{where} is being run by process {process}, which takes no commands yet; {path} was left by process "
            f"{found.process}. Try again in a moment"
        )
    return found


def _parsed(data: bytes) -> Endpoint:
    value = json.loads(data)
    found = Endpoint(**value)
    if not (isinstance(found.port, int) and isinstance(found.token, str) and isinstance(found.process, int)):
        raise ValueError("it has values of unexpected types")
    return found


def _write_private(path: Path, data: bytes) -> None:
    """Put a file in its place that was never readable by another (CTL-3)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name that a storage takes for a half-written file, so that nobody takes it for a wish.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.token = secrets.token_urlsafe(32)
        super().__init__(("127.0.0.1", 0), _Handler)

    def server_bind(self) -> None:
        # The base class asks the resolver for our name, which takes seconds where there is none, and is not needed.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        gone = isinstance(sys.exception(), OSError)
        log.log(logging.DEBUG if gone else logging.ERROR, "a request was not answered", exc_info=True)


class _Refused(Exception):
    """A request that does not get as far as `answer`."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "anabranch"
    sys_version = ""
    timeout = _PATIENCE

    def do_GET(self) -> None:
        self._handle()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_HEAD = do_GET

    def _handle(self) -> None:
        try:
            body = self._body()
            self._admit()
            status, answer = self._answered(_object(body))
        except _Refused as refused:
            status, answer = refused.status, _error(str(refused))
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    def _answered(self, body: Json) -> tuple[HTTPStatus, bytes]:
        try:
            return HTTPStatus.OK, json.dumps(self.server.answer(self.command, self.path, body)).encode()
        except UserError as error:
            return HTTPStatus.CONFLICT, _error(str(error))
        except AnabranchError as error:
            return HTTPStatus.INTERNAL_SERVER_ERROR, _error(f"{type(error).__name__}: {error}")
        except Exception as error:
            log.exception("a command failed method=%s path=%s", self.command, self.path)
            return HTTPStatus.INTERNAL_SERVER_ERROR, _error(repr(error))

    def _admit(self) -> None:
        """Refuse what must not or cannot be answered."""
        name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if name not in _NAMES:
            raise _Refused(HTTPStatus.FORBIDDEN, f"this is not the host {name!r}")
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, f"Bearer {self.server.token}".encode()):
            raise _Refused(HTTPStatus.UNAUTHORIZED, "the token is missing or wrong")
        method = ROUTES.get(self.path)
        if method is None:
            raise _Refused(HTTPStatus.NOT_FOUND, f"there is no {self.path}; there are {', '.join(ROUTES)}")
        if method != self.command:
            raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"{self.path} takes {method}, not {self.command}")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding"):
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "a body must come with its Content-Length")
        said = self.headers.get("Content-Length", "0")
        if not (said.isascii() and said.isdigit()):
            raise _Refused(HTTPStatus.BAD_REQUEST, f"Content-Length {said!r} is no number")
        length = int(said)
        if length > MOST_BYTES:
            self.rfile.read(min(length, _DISCARDED))
            raise _Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{length:,} bytes are more than {MOST_BYTES:,}"
            )
        return self.rfile.read(length)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class calls it so
        log.debug("request " + format, *args)


def _object(body: bytes) -> Json:
    try:
        value = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        raise _Refused(HTTPStatus.BAD_REQUEST, "the body is not JSON") from None
    if not isinstance(value, dict):
        raise _Refused(HTTPStatus.BAD_REQUEST, "the body is not a JSON object")
    return value


def _error(text: str) -> bytes:
    return json.dumps({"error": text}).encode()
