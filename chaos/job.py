"""A job as users run it: `anabranch run` in a process of its own, with its JVM and Python workers below it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).parent.parent

RUN_ARGS: list[str] = ["--checkpoint-every", "3steps", "--recovery-partitions", "4"]
"""What every run of a job under test is given: whatever makes much happen in little time."""

_SAID = 20_000
"""The words that a round knows a refusal by stand in its first line, and a line for each damaged version may follow."""

_DAEMONS = {"pyspark.daemon", "anabranch.spark.daemon"}
"""Modules that fork Spark's Python workers."""

FLOW = """\
import json
from pathlib import Path

from chaos.build import build

HERE = Path(__file__).parent
flow = build(json.loads((HERE / "flow.json").read_text()), HERE / "in")
"""


class Failed(Exception):
    """The job did not survive, or did something that it must not."""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "anabranch.cli.main", *arguments]


def environment(root: Path, **more: str) -> dict[str, str]:
    """For a run below `root`: what a killed JVM leaves behind stays there, too."""
    for folder in ("tmp", "spark"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "TMPDIR": str(root / "tmp"),
        "SPARK_LOCAL_DIRS": str(root / "spark"),
        **more,
    }


def write_flow(root: Path, description: dict[str, Any]) -> Path:
    """The flow's file, beside its description and its inputs."""
    (root / "flow.json").write_text(json.dumps(description, indent=1))
    (root / "flow.py").write_text(FLOW)
    return root / "flow.py"


class Driver:
    """One `anabranch run`, from its start to its end."""

    def __init__(self, arguments: Iterable[str], output: Path, env: dict[str, str]) -> None:
        self.output = output.with_suffix(".out")
        self.errors = output.with_suffix(".err")
        self._started = False
        # All processes that were seen below this one: what outlives it is found again.
        self.seen: dict[int, psutil.Process] = {}
        with open(self.output, "wb") as out, open(self.errors, "wb") as err:
            self.process = subprocess.Popen(
                command("run", *arguments, *RUN_ARGS, "--json"),
                stdout=out,
                stderr=err,
                env=env,
                start_new_session=True,
            )
        self.top = psutil.Process(self.process.pid)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def events(self) -> list[dict[str, Any]]:
        """What it said so far; a last line that is still being written is left out."""
        lines = self.output.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    @property
    def started(self) -> bool:
        """Whether it has got as far as its first step."""
        self._started = self._started or b'"event": "started"' in self.output.read_bytes()
        return self._started

    def said(self) -> str:
        """The end of its standard error."""
        return self.errors.read_text(errors="replace")[-_SAID:].strip()

    # The processes below it.

    def below(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            found = self.top.children(recursive=True)
        for process in found:
            self.seen[process.pid] = process
        return found

    def jvm(self) -> psutil.Process | None:
        return next((process for process in self.below() if _name(process) == "java"), None)

    def workers(self) -> list[psutil.Process]:
        """Spark's Python processes that run tasks: those below a daemon."""
        return python_workers(self.below())

    # Its end.

    def kill_tree(self) -> None:
        """Everything at once.  Stopped first, so that nobody can react to another's death."""
        everybody = [self.top, *self.below()]
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for process in everybody:
                send(process, signum)
        self.process.wait()

    def wait(self, seconds: float) -> int | None:
        """Its exit status, or None when it is still running after so long."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def clean_up(self) -> None:
        """End whatever is left of it."""
        self.below()
        if self.running:
            self.process.kill()
            self.process.wait()
        for process in self.seen.values():
            send(process, signal.SIGKILL)


def python_workers(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Of these, the Python processes whose parent is a daemon that Spark started, which is a child of a JVM."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            if parent is not None and _is_daemon(process) and _is_daemon(parent):
                found.append(process)
    return found


def send(process: psutil.Process, signum: int) -> bool:
    """Send a signal; False when the process is gone (psutil makes sure that its number is not another's now)."""
    try:
        process.send_signal(signum)
    except psutil.NoSuchProcess:
        return False
    return True


def wait_until(condition: Callable[[], object], seconds: float, every: float = 0.02) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return ""


def _is_daemon(process: psutil.Process) -> bool:
    return not _DAEMONS.isdisjoint(process.cmdline())
