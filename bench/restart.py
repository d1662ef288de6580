"""Kill everything and start it again: how long until there is output that was not there before.

Both sides go through the same story over the same files: a file with every key; a checkpoint; then input at a steady
pace, which makes what is to be replayed where the state is lost; then many small files, and SIGKILL for the driver, its
JVM and the Python workers while they are at those. What the kill left is copied, and every measured start begins
with such a copy, in a new process. The clock starts before the process and stops when a file tells of new output.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.runtime.jobdir import JobDir
from bench.harness import PEERS, ROOT, PeerFailed, environment, inherited

_WAITING_FILES = 20
_WAITING_ROWS = 10_000
_LOOK = 0.02
"""Seconds between two looks: little against what is measured, and no load on its two cores."""


@dataclass(frozen=True, slots=True)
class Story:
    """What both sides go through."""

    keys: int
    rate: float
    """Rows a second that come after the checkpoint."""
    seconds: float
    """For how long they come."""
    every: float = 0.2
    """Seconds between two files."""


class Side(ABC):
    """One side's directory, with its input beside its state."""

    name: str

    def __init__(self, root: Path) -> None:
        self.root = root / self.name
        self.data = self.root / "in"
        self.killed = root / f"{self.name}.killed"
        self.log = root / f"{self.name}.log"

    @abstractmethod
    def command(self) -> list[str]: ...

    def checkpoint(self) -> Callable[[], bool]:
        """Ask for a checkpoint of what was taken so far; tells whether it is there."""
        return lambda: True

    def settled(self) -> bool:
        """Whether what goes on in the background has come far enough for a kill to be fair."""
        return True

    @abstractmethod
    def outputs(self) -> set[str]:
        """What there is in output: names that grow by one with each step or batch."""

    def prepare(self, story: Story) -> None:
        """Live through the story, up to the kill."""
        self.data.mkdir(parents=True)
        rng = np.random.default_rng(11)
        clock = _Files(self.data)
        clock.write(rng.permutation(story.keys), rng)
        with self.running() as said:
            taken = story.keys
            self._wait("the state to be loaded", lambda: _rows(said) >= taken)
            self._wait("a checkpoint", self.checkpoint())
            count = int(story.rate * story.every)
            for _ in range(round(story.seconds / story.every)):
                due = time.monotonic() + story.every
                clock.write(rng.integers(0, story.keys, count), rng)
                taken += count
                time.sleep(max(0.0, due - time.monotonic()))
            self._wait("all input to be taken", lambda: _rows(said) >= taken)
            self._wait("snapshots", self.settled)
            before = self.outputs()
            for _ in range(_WAITING_FILES):
                clock.write(rng.integers(0, story.keys, _WAITING_ROWS), rng)
            self._wait("new output", lambda: self.outputs() > before)
            for _ in range(_WAITING_FILES):
                clock.write(rng.integers(0, story.keys, _WAITING_ROWS), rng)
            # By now it is busy with more of them.
            time.sleep(2 * _LOOK)
        _copy(self.root, self.killed)

    def restart(self, without: str | None = None) -> float:
        """Seconds from the start of a process to its first new output; `without` a directory below the root."""
        _copy(self.killed, self.root)
        if without is not None:
            shutil.rmtree(self.root / without)
        # Copying leaves pages to be written, and what is measured syncs its files.
        os.sync()
        before = self.outputs()
        started = time.monotonic()
        with self.running():
            self._wait("new output after a restart", lambda: bool(self.outputs() - before))
            return time.monotonic() - started

    @contextlib.contextmanager
    def running(self) -> Iterator[Path]:
        """The side at work; SIGKILL for all of it at the end.  Gives the file that it prints to."""
        said = self.log.with_suffix(".out")
        with said.open("wb") as out, self.log.open("ab") as errors:
            child = subprocess.Popen(
                self.command(), stdout=out, stderr=errors, cwd=ROOT, env=inherited(), start_new_session=True
            )
        self.child = child
        try:
            yield said
        finally:
            kill_session(child)

    def _wait(self, what: str, condition: Callable[[], bool], timeout: float = 600) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if self.child.poll() is not None or time.monotonic() > deadline:
                tail = self.log.read_text(errors="replace")[-2000:]
                raise PeerFailed(f"{self.name}: waited in vain for {what}; its log ends with\n{tail}")
            time.sleep(_LOOK)


class Ours(Side):
    name = "ours"

    def command(self) -> list[str]:
        return [sys.executable, "-m", "bench.ours.restart", str(self.data), str(self.root)]

    def checkpoint(self) -> Callable[[], bool]:
        JobDir(self.root / "job").ask("checkpoint")
        return lambda: any(self.root.glob("job/checkpoints/*/manifest"))

    def outputs(self) -> set[str]:
        return _names(self.root / "job" / "log" / "000000000", ".commit")


class Spark(Side):
    name = "spark"

    def command(self) -> list[str]:
        return [
            str(environment("bare-spark")),
            str(PEERS / "spark_restart.py"),
            str(self.data),
            str(self.root),
        ]

    def settled(self) -> bool:
        """Every batch is a checkpoint, but a start is only quick from a snapshot, of which there is one in ten batches."""
        state = self.root / "checkpoint" / "state" / "0"
        return all(any((state / partition).glob("*.zip")) for partition in ("0", "1"))

    def outputs(self) -> set[str]:
        """A batch counts when its files are complete or when it is committed: what is first."""
        written = {one.parent.name for one in self.root.glob("out/*/_SUCCESS")}
        return written | _names(self.root / "checkpoint" / "commits", "")


class _Files:
    """Writes input files whose names and modification times are in order: Spark takes the oldest first."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.number = 0
        self.mtime = int(time.time()) - 100_000

    def write(self, keys: np.ndarray, rng: np.random.Generator) -> None:
        values = rng.integers(-1_000, 1_000, len(keys))
        path = self.directory / f"part-{self.number:06d}.parquet"
        hidden = path.with_name(f".{path.name}")
        pq.write_table(pa.table({"key": keys.astype(np.int64), "value": values}), hidden)
        os.utime(hidden, (self.mtime + self.number,) * 2)
        hidden.rename(path)
        self.number += 1


def kill_session(leader: subprocess.Popen[bytes]) -> None:
    """SIGKILL for every process of a session, until there is none.

    Spark's Python processes are a group of their own, and orphans have other parents; the session stays.
    """
    while members := [pid for pid in psutil.pids() if _session(pid) == leader.pid]:
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        leader.poll()
        time.sleep(_LOOK)
    leader.wait()


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def _rows(said: Path) -> int:
    lines = said.read_text().splitlines()
    return next((int(json.loads(line)["rows"]) for line in reversed(lines) if line.endswith("}")), 0)


def _names(directory: Path, suffix: str) -> set[str]:
    if not directory.exists():
        return set()
    return {one.name for one in directory.iterdir() if one.name.endswith(suffix) and one.name[0] != "."}


def _copy(source: Path, target: Path) -> None:
    """All of a directory, modification times and holes in files included."""
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["cp", "-a", "--sparse=always", str(source), str(target)], check=True)
