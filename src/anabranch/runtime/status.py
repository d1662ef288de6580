"""Keeps `status.json` fresh for `anabranch status`, at most a few times a second."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from typing import Any

from anabranch.errors import AnabranchError
from anabranch.log.steplog import Progress
from anabranch.model.ids import Epoch, Step
from anabranch.model.layout import Layout
from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.observe import StepDone

_EVERY = 0.25
_FAULTS_KEPT = 20
_WINDOW = 10.0


class StatusBoard:
    """The coordinator's account of itself."""

    def __init__(self, jobdir: JobDir, flow: str, epoch: Epoch) -> None:
        self.jobdir = jobdir
        self.written = 0.0
        self.recent: deque[tuple[float, int, float]] = deque()
        """(ended, rows, seconds) of the steps of the last seconds."""
        self.status: dict[str, Any] = {
            "state": "starting",
            "flow": flow,
            "epoch": epoch,
            "process": os.getpid(),
            "started": time.time(),
            "faults": [],
            "notes": [],
            "error": None,
        }
        self.said: dict[str, Any] = {}
        """What was written last: a value of its own, for other threads."""
        self._write(now=True)

    def started(self, layout: Layout, progress: Progress) -> None:
        self.status["state"] = "running"
        self.layout(layout)
        self._progress(progress)
        self._write(now=True)

    def step(self, done: StepDone, progress: Progress) -> None:
        now = time.monotonic()
        self.recent.append((now, done.rows, done.seconds))
        self.status |= {
            "state": "running",
            "step_seconds": round(done.seconds, 4),
            "backlog_rows": done.backlog_rows,
            "backlog_bytes": done.backlog_bytes,
        }
        self._progress(progress)
        self._write()

    def recovering(self) -> None:
        self.status["state"] = "recovering"
        self._write(now=True)

    def checkpoints(self, summary: dict[str, Any]) -> None:
        self.status["checkpoints"] = summary

    def waiting(self, reason: str) -> None:
        """What a stop waits for."""
        self.status |= {"state": "stopping", "waiting_for": reason}
        self._write(now=True)

    def note(self, text: str) -> None:
        notes = self.status["notes"]
        notes.append({"time": time.time(), "text": text})
        del notes[:-_FAULTS_KEPT]
        self._write(now=True)

    def idle(self, progress: Progress) -> None:
        if self.status["state"] != "idle":
            self.status |= {"state": "idle", "backlog_rows": 0, "backlog_bytes": 0}
            self._progress(progress)
            self._write(now=True)

    def rescaling(self, summary: dict[str, Any], sizes: dict[str, Any] | None, *, now: bool = False) -> None:
        """How rescalings go, and how large shards are, where that is known."""
        before, shown = self.status.get("migration"), summary["migration"]
        self.status |= summary
        if sizes is not None and sizes != self.status.get("sizes"):
            self.status["sizes"] = sizes
            now = True
        if now or shown != before:
            self._write(now=now or _phase(shown) != _phase(before))

    def layout(self, layout: Layout) -> None:
        """The flow runs in another layout."""
        self.status |= {
            "workers": len(layout.workers),
            "hosts": sorted(set(layout.workers)),
            "shards": len(layout.shards),
            "layout": layout.version,
        }

    def fault(self, step: Step, attempt: int, error: AnabranchError) -> None:
        faults = self.status["faults"]
        text = f"{type(error).__name__}: {error}"
        faults.append({"time": time.time(), "step": step, "attempt": attempt, "error": text})
        del faults[:-_FAULTS_KEPT]
        self._write(now=True)

    def failed(self, error: AnabranchError) -> None:
        self.status |= {"state": "failed", "error": f"{type(error).__name__}: {error}"}
        self._write(now=True)

    def stopped(self, progress: Progress) -> None:
        self.status |= {"state": "stopped", "waiting_for": None}
        self._progress(progress)
        self._write(now=True)

    def _progress(self, progress: Progress) -> None:
        now = time.monotonic()
        while self.recent and self.recent[0][0] < now - _WINDOW:
            self.recent.popleft()
        busy = sum(seconds for _, _, seconds in self.recent)
        rows = sum(rows for _, rows, _ in self.recent)
        self.status |= {
            "steps": progress.next_step,
            "input_rows": progress.input_rows,
            "output_rows": progress.output_rows,
            "rows_per_second": round(rows / busy, 1) if busy else 0.0,
        }

    def _write(self, *, now: bool = False) -> None:
        clock = time.monotonic()
        if now or clock - self.written >= _EVERY:
            self.written = clock
            self.status["updated"] = time.time()
            self.said = json.loads(json.dumps(self.status))
            self.jobdir.write_status(self.status)


def _phase(migration: dict[str, Any] | None) -> tuple[int, str] | None:
    """None, too, while one that had not begun when the flow had to recover waits to begin again."""
    return None if migration is None else (migration["id"], migration["state"])
