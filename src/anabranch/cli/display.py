"""What `anabranch run` shows: a live line on a terminal, plain lines otherwise, JSON on request."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from anabranch.errors import AnabranchError
from anabranch.log.steplog import Progress
from anabranch.model.ids import Step
from anabranch.model.layout import Layout
from anabranch.runtime.observe import StepDone

_LIVE_EVERY = 0.1
_PLAIN_EVERY = 1.0
BAR = 20
"""Characters of a bar."""


def _nothing() -> None:
    pass


class TextDisplay:
    """One line that is rewritten on a terminal; one line a second elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.when_started: Callable[[], None] = _nothing
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self._last = 0.0
        self._told = 0.0
        self._rows = 0
        self._busy = 0.0

    def started(self, layout: Layout, progress: Progress) -> None:
        self.when_started()
        again = f", continuing at step {progress.next_step}" if progress.next_step else ""
        self._say(
            f"running with {plural(len(layout.workers), 'worker')} on {plural(len(layout.hosts), 'host')}, "
            f"{len(layout.shards)} shards{again}"
        )

    def step(self, done: StepDone, progress: Progress) -> None:
        self._rows += done.rows
        self._busy += done.seconds
        now = time.monotonic()
        if now - self._last < (_LIVE_EVERY if self.live else _PLAIN_EVERY):
            return
        rate = self._rows / self._busy if self._busy else 0.0
        line = (
            f"step {done.step} · {human(rate)} rows/s · {done.seconds * 1000:.0f} ms · "
            f"backlog {human(done.backlog_rows)} rows · {human(progress.input_rows)} rows in, "
            f"{human(progress.output_rows)} out · {plural(done.workers, 'worker')}"
        )
        self._last, self._rows, self._busy = now, 0, 0.0
        self._show(line)

    def idle(self, progress: Progress) -> None:
        if self.live:
            rows = human(progress.input_rows)
            self._show(f"{plural(progress.next_step, 'step')} · idle, waiting for input · {rows} rows in")

    def fault(self, step: Step, attempt: int, error: AnabranchError) -> None:
        self._say(f"step {step}, attempt {attempt} failed, trying again: {error}")

    def replaying(self, step: Step, first: Step, end: Step) -> None:
        done, all_steps = step - first, end - first
        if self.live:
            self._show(f"recovering {bar(done, all_steps)} replaying step {step} of {first} to {end - 1}")
        elif done == 0:
            self._say(f"recovering: replaying steps {first} to {end - 1}")

    def note(self, text: str) -> None:
        self._say(text)

    def stopping(self, waiting_for: str) -> None:
        # A stop goes through several waits in a moment; only a long one is worth another line.
        now = time.monotonic()
        if self.live or now - self._told >= _PLAIN_EVERY:
            self._told = now
            self._show(f"stopping: waiting for {waiting_for}")

    def stopped(self, progress: Progress) -> None:
        self._say(
            f"stopped after {plural(progress.next_step, 'step')}: {progress.input_rows:,} rows in, "
            f"{progress.output_rows:,} rows out"
        )

    def _show(self, line: str) -> None:
        if self.live:
            width = shutil.get_terminal_size().columns
            self.stream.write(f"\r\x1b[K{line[: width - 1]}")
            self.stream.flush()
        else:
            self._say(line)

    def _say(self, line: str) -> None:
        self.stream.write(f"\r\x1b[K{line}\n" if self.live else f"{line}\n")
        self.stream.flush()


class JsonDisplay:
    """One JSON object a line, on standard output."""

    def __init__(self) -> None:
        self.when_started: Callable[[], None] = _nothing

    def started(self, layout: Layout, progress: Progress) -> None:
        self.when_started()
        self._write(
            event="started",
            workers=len(layout.workers),
            shards=len(layout.shards),
            step=progress.next_step,
        )

    def step(self, done: StepDone, progress: Progress) -> None:
        self._write(
            event="step",
            step=done.step,
            rows=done.rows,
            output_rows=done.output_rows,
            dead_letters=done.dead_letters,
            seconds=round(done.seconds, 6),
            backlog_rows=done.backlog_rows,
            backlog_bytes=done.backlog_bytes,
            workers=done.workers,
        )

    def idle(self, progress: Progress) -> None:
        self._write(event="idle", step=progress.next_step)

    def fault(self, step: Step, attempt: int, error: AnabranchError) -> None:
        self._write(event="fault", step=step, attempt=attempt, error=f"{type(error).__name__}: {error}")

    def replaying(self, step: Step, first: Step, end: Step) -> None:
        self._write(event="replaying", step=step, first=first, end=end)

    def note(self, text: str) -> None:
        self._write(event="note", text=text)

    def stopping(self, waiting_for: str) -> None:
        self._write(event="stopping", waiting_for=waiting_for)

    def stopped(self, progress: Progress) -> None:
        self._write(
            event="stopped",
            steps=progress.next_step,
            input_rows=progress.input_rows,
            output_rows=progress.output_rows,
        )

    def _write(self, **event: Any) -> None:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()


def tell_waiting(reason: str) -> None:
    """For a command that has somebody waiting."""
    sys.stderr.write(f"waiting for {reason} …\n")


def human(number: float) -> str:
    """A count in at most five characters: 950, 1.2k, 34M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            scaled = number / limit
            return f"{scaled:.1f}{unit}" if scaled < 10 else f"{scaled:.0f}{unit}"
    return f"{number:.0f}"


def bar(part: float, whole: float, width: int = BAR) -> str:
    """How much of a whole there is, as a bar; nothing of nothing is empty."""
    filled = min(width, int(width * part / whole)) if whole else 0
    return "█" * filled + "░" * (width - filled)


def plural(count: int, noun: str) -> str:
    """A count with its noun: 1 step, 2 steps."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
