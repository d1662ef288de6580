"""What is particular to an object store: lost answers, refusals, and where endpoint and credentials come from."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from anabranch.errors import ConfigError, EngineError
from anabranch.storage import objects, open_storage


class Forgetful(BaseHTTPRequestHandler):
    """Hands requests on, and forgets to answer the first so many puts."""

    upstream: str
    forget: int
    puts: int

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = urllib.request.Request(
            self.upstream + self.path, data=body or None, method=self.command, headers=dict(self.headers)
        )
        # Without it urllib would say that the body is a form.
        request.add_header("Content-Type", "application/octet-stream")
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                status, headers, content = answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as answer:
            status, headers, content = answer.code, answer.headers, answer.read()
            answer.close()
        if self.command == "PUT":
            type(self).puts += 1
            if self.puts <= self.forget:
                self.close_connection = True
                return
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding", "server", "date"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_HEAD = do_DELETE = handle_any

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
        pass


@pytest.fixture
def forgetful(object_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Forgetful]]:
    class Handler(Forgetful):
        upstream = os.environ["AWS_ENDPOINT_URL"]
        forget = 0
        puts = 0

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
    yield Handler
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("forget", [1, 3])
def test_a_create_whose_answer_was_lost_finds_its_own_object(
    forgetful: type[Forgetful], object_url: str, forget: int
) -> None:
    storage = open_storage(object_url)
    forgetful.forget = forget
    storage.create("a", b"1")
    assert forgetful.puts > forget
    assert storage.read("a") == b"1"
    with pytest.raises(FileExistsError, match=f"{object_url}/a is there already"):
        storage.create("a", b"1")


def test_a_create_that_never_hears_an_answer_says_so(
    forgetful: type[Forgetful], object_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_RETRY", {"max_retries": 0})
    storage = open_storage(f"{object_url}/silent")
    forgetful.forget = 1 << 30
    with pytest.raises(EngineError, match=f"{object_url}/silent/a: the object store failed"):
        storage.create("a", b"1")


def test_a_missing_bucket_is_named(bucket: str) -> None:
    storage = open_storage("s3://nobody-made-this/x")
    with pytest.raises(ConfigError, match=r"s3://nobody-made-this/x/a: there is no such bucket"):
        storage.create("a", b"")
    with pytest.raises(ConfigError, match=r"there is no such bucket"):
        storage.read("a")
    with pytest.raises(ConfigError, match=r"there is no such bucket"):
        storage.list()


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "s3://b/x?y", "s3://b#x"])
def test_what_is_not_a_place_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"s3://BUCKET/PREFIX"):
        open_storage(url)


def test_urls_are_written_in_one_way(bucket: str) -> None:
    assert open_storage("s3://b/a b/é/").url == open_storage("s3://b/a%20b/%C3%A9").url
    assert open_storage("s3://b").child("a b", "é") == open_storage("s3://b/a b/é")


OTHER_PROCESS = """
import pickle, sys
storage = pickle.loads(sys.stdin.buffer.read())
storage.create("b", storage.read("a"))
"""


def test_a_storage_takes_its_endpoint_and_credentials_along(object_url: str) -> None:
    storage = open_storage(object_url)
    storage.create("a", b"1")
    bare = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    subprocess.run([sys.executable, "-c", OTHER_PROCESS], input=pickle.dumps(storage), env=bare, check=True)
    assert storage.read("b") == b"1"


def test_plain_http_only_on_this_machine_or_when_asked_for() -> None:
    def options(**variables: str) -> dict[str, str]:
        return dict(objects._options("s3", variables))

    assert options(AWS_ENDPOINT_URL="http://127.0.0.1:80")["allow_http"] == "true"
    assert options(AWS_ENDPOINT_URL_S3="http://localhost")["allow_http"] == "true"
    assert "allow_http" not in options(AWS_ENDPOINT_URL="http://minio:9000")
    assert options(AWS_ENDPOINT_URL="http://minio:9000", AWS_ALLOW_HTTP="TRUE")["allow_http"] == "true"
