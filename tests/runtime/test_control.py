"""The control endpoint: who is answered, and what the others are told.  CTL numbers are those of `runtime/control.py`."""

from __future__ import annotations

import http.client
import json
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import anabranch as ab
from anabranch.errors import ConfigError, EngineError, JobDirError, StorageFullError, UserError
from anabranch.flow.plan import make_plan
from anabranch.runtime import control, lease
from anabranch.runtime.control import MOST_BYTES, ControlClient, ControlServer, endpoint_path
from anabranch.runtime.jobdir import JobDir


def new_job(where: str | Path) -> JobDir:
    flow = ab.Flow("shop")
    flow.input("rows", ab.iterable([], schema={"item": str})).output("sold")
    jobdir = JobDir(where)
    with jobdir.locked():
        jobdir.create(make_plan(flow))
    return jobdir


class Answers:
    """Keeps what it was asked, and answers with what the test has put in `answer`."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.answer: object = {"fine": True}

    def __call__(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((method, path, body))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer  # type: ignore[return-value]


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    return new_job(tmp_path / "job")


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def server(job: JobDir, answers: Answers) -> Iterator[ControlServer]:
    with job.locked(), ControlServer(job, answers) as running:
        yield running


def raw(
    server: ControlServer,
    method: str = "GET",
    path: str = "/status",
    body: bytes | None = None,
    **headers: str | None,
) -> tuple[int, dict[str, Any]]:
    """What the server says to a request that has exactly these headers besides a good token and host."""
    connection = http.client.HTTPConnection("127.0.0.1", server.endpoint.port, timeout=30)
    all_headers = {
        "Host": f"127.0.0.1:{server.endpoint.port}",
        "Authorization": f"Bearer {server.endpoint.token}",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    if body is not None:
        all_headers.setdefault("Content-Length", str(len(body)))
    for name, value in all_headers.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(body)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, json.loads(text) if text else {}


def test_a_command_and_its_answer(job: JobDir, server: ControlServer, answers: Answers) -> None:
    client = ControlClient(job)
    assert client.get("/status") == {"fine": True}
    answers.answer = {"id": 1, "text": "größer"}
    assert client.post("/rescale", {"workers": 4}) == {"id": 1, "text": "größer"}
    assert client.post("/weigh") == {"id": 1, "text": "größer"}
    assert answers.asked == [
        ("GET", "/status", {}),
        ("POST", "/rescale", {"workers": 4}),
        ("POST", "/weigh", {}),
    ]


def test_only_the_user_can_read_the_file(tmp_path: Path, job: JobDir, answers: Answers) -> None:
    old = os.umask(0)
    try:
        with job.locked(), ControlServer(job, answers) as server:
            file = tmp_path / "job/control/endpoint"
            assert server.path == file
            assert stat.S_IMODE(file.stat().st_mode) == 0o600  # CTL-3
            written = json.loads(file.read_text())
            assert written == {
                "port": server.endpoint.port,
                "token": server.endpoint.token,
                "process": os.getpid(),
            }
            assert len(written["token"]) >= 32
            assert written["token"] not in repr(server.endpoint)
            assert [one.name for one in file.parent.iterdir()] == ["endpoint"]
    finally:
        os.umask(old)
    assert not file.exists()


def test_each_run_has_a_token_of_its_own(job: JobDir, answers: Answers) -> None:
    tokens = set()
    for _ in range(3):
        with job.locked(), ControlServer(job, answers) as server:
            tokens.add(server.endpoint.token)
    assert len(tokens) == 3


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer wrong", "Basic {token}", "{token}", "Bearer {token}x"]
)
def test_nothing_without_the_token(server: ControlServer, answers: Answers, given: str | None) -> None:
    header = None if given is None else given.format(token=server.endpoint.token)
    for method, path, body in (
        ("GET", "/status", None),
        ("POST", "/rescale", b'{"workers":1}'),
        ("GET", "/no", None),
    ):
        status, answer = raw(server, method, path, body, Authorization=header)
        assert (status, answer) == (401, {"error": "the token is missing or wrong"})  # CTL-1
    assert answers.asked == []


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", ":80", None, "[::1]:9"]
)
def test_another_host_is_refused(server: ControlServer, answers: Answers, host: str | None) -> None:
    assert raw(server, Host=host)[0] == 403  # CTL-2
    assert answers.asked == []


@pytest.mark.parametrize("host", ["localhost", "localhost:1234", "127.0.0.1"])
def test_names_of_this_host(server: ControlServer, host: str) -> None:
    assert raw(server, Host=host)[0] == 200


def test_it_listens_on_loopback_only(server: ControlServer) -> None:
    assert server._server.socket.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("method", "path", "status", "error"),
    [
        ("GET", "/rescale", 405, "/rescale takes POST, not GET"),
        ("POST", "/status", 405, "/status takes GET, not POST"),
        ("DELETE", "/rescale", 405, "/rescale takes POST, not DELETE"),
        ("PUT", "/hosts", 405, "/hosts takes GET, not PUT"),
        (
            "GET",
            "/status/../etc",
            404,
            "there is no /status/../etc; there are /status, /hosts, /rescale, /rescale/cancel, /weigh",
        ),
    ],
)
def test_wrong_calls(
    server: ControlServer, answers: Answers, method: str, path: str, status: int, error: str
) -> None:
    assert raw(server, method, path) == (status, {"error": error})
    assert raw(server, "HEAD", "/status") == (405, {})
    assert answers.asked == []


@pytest.mark.parametrize(
    ("body", "headers", "status", "error"),
    [
        (b" " * (MOST_BYTES + 1), {}, 413, "65,537 bytes are more than 65,536"),
        (b"{", {}, 400, "the body is not JSON"),
        (b"\xff", {}, 400, "the body is not JSON"),
        (b"[" * 60_000, {}, 400, "the body is not JSON"),
        (b"[1]", {}, 400, "the body is not a JSON object"),
        (None, {"Content_Length": "-1"}, 400, "Content-Length '-1' is no number"),
        (None, {"Content_Length": "x"}, 400, "Content-Length 'x' is no number"),
        (None, {"Transfer_Encoding": "chunked"}, 411, "a body must come with its Content-Length"),
    ],
)
def test_wrong_bodies(
    server: ControlServer,
    answers: Answers,
    body: bytes | None,
    headers: dict[str, str],
    status: int,
    error: str,
) -> None:
    assert raw(server, "POST", "/rescale", body, **headers) == (status, {"error": error})
    assert answers.asked == []
    largest = b'{"a":"' + b"x" * (MOST_BYTES - 8) + b'"}'
    assert raw(server, "POST", "/rescale", largest)[0] == 200


def test_a_refusal_and_a_fault(
    job: JobDir, server: ControlServer, answers: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    client = ControlClient(job)
    answers.answer = ConfigError("--workers 99: at most 32")
    assert raw(server) == (409, {"error": "--workers 99: at most 32"})
    with pytest.raises(UserError, match=r"^--workers 99: at most 32$"):
        client.post("/rescale", {"workers": 99})
    answers.answer = EngineError("a host is gone")
    assert raw(server) == (500, {"error": "EngineError: a host is gone"})
    with pytest.raises(EngineError, match="says: EngineError: a host is gone"):
        client.get("/status")
    assert caplog.records == []
    answers.answer = OSError("odd")
    assert raw(server) == (500, {"error": "OSError('odd')"})
    answers.answer = {"not": {"json"}}
    assert raw(server)[0] == 500
    assert [record.message for record in caplog.records] == ["a command failed method=GET path=/status"] * 2
    answers.answer = {"again": 1}
    assert client.get("/status") == {"again": 1}


def test_a_slow_answer_holds_up_nobody(job: JobDir) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def answer(method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/rescale":
            begun.set()
            assert go_on.wait(30)
        return {"path": path}

    got: list[dict[str, Any]] = []
    with job.locked(), ControlServer(job, answer):
        client = ControlClient(job)
        slow = threading.Thread(target=lambda: got.append(client.post("/rescale")))
        slow.start()
        assert begun.wait(30)
        assert client.get("/status") == {"path": "/status"}
        with pytest.raises(JobDirError, match=r"has not answered within 0.05 s; `anabranch status "):
            ControlClient(job, patience=0.05).post("/rescale")
        go_on.set()
        slow.join()
    assert got == [{"path": "/rescale"}]


# What a client says when there is nobody to talk to.


def refusal(job: JobDir) -> str:
    with pytest.raises(JobDirError) as error:
        ControlClient(job)
    return str(error.value)


def test_not_running(job: JobDir) -> None:
    expected = f"{job.path} is not running; start it with `anabranch run FLOW.py --dir {job.path}`"
    assert refusal(job) == expected
    # Left by a process that was killed: its lock is gone with it.
    endpoint_path(job).write_text('{"port": 1, "token": "x", "process": 1}')
    assert refusal(job) == expected


def test_starting(job: JobDir, answers: Answers) -> None:
    with job.locked():
        assert "takes no commands yet or no more; try again in a moment" in refusal(job)
        endpoint_path(job).write_text(json.dumps({"port": 1, "token": "x", "process": os.getpid() + 1}))
        assert f"was left by process {os.getpid() + 1}. Try again in a moment" in refusal(job)
        endpoint_path(job).write_text("no JSON")
        assert "is not an endpoint's file" in refusal(job)
        # A run empties the folder before it listens, and its own file is no wish.
        job.clear_wishes()
        assert not endpoint_path(job).exists()
        with ControlServer(job, answers):
            assert not job.stop_asked()
            assert not job.asked("checkpoint")
            assert ControlClient(job).get("/status") == {"fine": True}


def test_another_users(job: JobDir, server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rights do not bind the superuser, as whom tests may run.
    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert "of another user, and only that user may command it" in refusal(job)


def test_another_machines(job: JobDir, server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control.socket, "gethostname", lambda: "elsewhere")
    assert "is commanded on that machine only; say it there" in refusal(job)


def test_a_run_that_ends_and_another_that_begins(job: JobDir, answers: Answers) -> None:
    with job.locked(), ControlServer(job, answers):
        client = ControlClient(job)
        before = client.endpoint
    with pytest.raises(JobDirError, match="is not running"):
        client.get("/status")
    with job.locked():
        with ControlServer(job, answers):
            assert client.get("/status") == {"fine": True}
            assert client.endpoint != before
            endpoint = client.endpoint
        # It listens no more, and its file is back for some reason.
        endpoint_path(job).write_text(
            json.dumps({"port": endpoint.port, "token": endpoint.token, "process": os.getpid()})
        )
        with pytest.raises(JobDirError, match="does not listen any more"):
            client.get("/status")


def test_a_token_of_another_run(job: JobDir, server: ControlServer) -> None:
    client = ControlClient(job)
    client.endpoint = control.Endpoint(client.endpoint.port, "other", client.endpoint.process)
    with pytest.raises(JobDirError, match="did not take the token"):
        client.get("/status")


def test_a_server_leaves_the_file_of_another_alone(job: JobDir, answers: Answers) -> None:
    with job.locked():
        first = ControlServer(job, answers)
        with ControlServer(job, answers) as second:
            first.close()
            assert ControlClient(job).endpoint == second.endpoint  # CTL-4


def test_no_room_for_the_file(job: JobDir, answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    with job.locked():
        with monkeypatch.context() as patch:
            patch.setattr(control.os, "replace", full)
            with pytest.raises(StorageFullError, match="the disk is full"):
                ControlServer(job, answers)
        folder = endpoint_path(job).parent
        assert list(folder.iterdir()) == []
        folder.rmdir()
        folder.touch()
        with pytest.raises(JobDirError, match="the endpoint cannot be written: File exists"):
            ControlServer(job, answers)


def test_in_an_object_store_the_file_is_on_the_disk(
    object_url: str, tmp_path: Path, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANABRANCH_STATE_DIR", str(tmp_path / "state"))
    job = new_job(f"{object_url}/job")
    with job.locked():
        assert "with the same ANABRANCH_STATE_DIR as the run" in refusal(job)
        with ControlServer(job, answers) as server:
            assert server.path == tmp_path / "state" / f"{job.job()['id']}.endpoint"
            assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
            assert ControlClient(job).get("/status") == {"fine": True}
            assert job.storage.list("control") == []
        assert not server.path.exists()
    assert lease.holder(job.storage) is None
    assert "is not running" in refusal(job)
