"""A job whose coordinator plays a script through the control endpoint; no Spark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import anabranch as ab
from anabranch.cli.main import main
from anabranch.flow.plan import make_plan
from anabranch.runtime.control import ControlServer
from anabranch.runtime.jobdir import JobDir

Capture = pytest.CaptureFixture[str]


Json = dict[str, Any]


def account(**changes: Any) -> Json:
    """The account of a rescaling, halfway."""
    return {
        "id": 7,
        "state": "moving",
        "strategy": "fluid",
        "asked": "auto",
        "cancelled": False,
        "from": {"workers": 2, "hosts": ["host-0"], "shards": 32, "layout": 3},
        "to": {"workers": 4, "hosts": ["host-0", "host-1"], "shards": 32, "layout": 4},
        "resharding": None,
        "copied": None,
        "shards_total": 16,
        "shards_moved": 4,
        "bytes_total": 4_000_000,
        "bytes_moved": 1_000_000,
        "began": 1_700_000_000.0,
        "seconds": 1.5,
        "eta_seconds": 4.4,
        "latency_before": 0.2,
        "latency_now": 0.21,
        "longest_step": 0.24,
        "error": None,
        "layout": None,
        **changes,
    }


DONE = {
    "state": "done",
    "shards_moved": 16,
    "bytes_moved": 4_000_000,
    "seconds": 6.04,
    "eta_seconds": None,
    "layout": 4,
}


class Script:
    """Plays a coordinator: each look at the status shows the next account, and the last one for good."""

    def __init__(self, *accounts: Json, first: Json | None = None) -> None:
        self.accounts = list(accounts)
        self.first = first or account(state="preparing", shards_moved=0, bytes_moved=0, eta_seconds=None)
        self.asked: list[tuple[str, Json]] = []
        self.refusal: Exception | None = None
        self.status: Json = {"state": "running", "steps": 10}
        self.hosts: list[Json] = []

    def __call__(self, method: str, path: str, body: Json) -> Json:
        if path == "/status":
            shown = self.accounts.pop(0) if len(self.accounts) > 1 else (self.accounts or [None])[0]
            return {**self.status, "migration": shown}
        self.asked.append((path, body))
        if self.refusal is not None:
            raise self.refusal
        if path == "/hosts":
            return {"hosts": self.hosts}
        return self.first


def new_job(tmp_path: Path) -> JobDir:
    """A job that has never run."""
    flow = ab.Flow("shop")
    flow.input("rows", ab.iterable([], schema={"item": str})).output("sold")
    jobdir = JobDir(tmp_path / "job")
    with jobdir.locked():
        jobdir.create(make_plan(flow))
    return jobdir


@contextmanager
def run_by(job: JobDir, script: Script) -> Iterator[Script]:
    with job.locked(), ControlServer(job, script):
        yield script


def fails(capsys: Capture, *arguments: str) -> str:
    """The one line that the command says before it fails."""
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("anabranch: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("anabranch: ").rstrip("\n")
