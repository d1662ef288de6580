"""Pools of Python processes on every host: one for the tasks of steps, two for the work beside them.

Spark keeps idle Python processes in a pool, one for each environment that tasks ask for, and forks another where none is
idle.  With one pool for all, a checkpoint took a process that had the step's shards open, and the step got a new one: 0.4 s
with a million keys, instead of 0.1.  So background work asks for an environment of its own, and its processes keep their
priority for life, with all threads of the libraries in them; an unprivileged process could not raise it again.

Work beside the steps gets what they leave (Linux's idle class): there a step that wakes up has the processor at once.  At
nice 10, or 19, it waits for the rest of a time slice, many times in a step: at half load on two processors a process that
only burns time made steps of 86 ms last 153, or 136; in the idle class 98.  On a machine that has nothing left, though, a
checkpoint would never end and undo records would pile up.  `Watch` notices that, the work is done again in the other
pool (`Background` in `spark/asking.py`), and there it gets a tenth of what a step's task gets.

Files are another matter: a thread that waits for the processor inside the file system holds up all who need the same locks,
and every page that a step writes for the first time does.  The 99th percentile of steps beside checkpoints was 200 ms
instead of 165.  So they are written on a thread that is merely nice (`write_files`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import TypeVar

from anabranch.errors import Starved

POOL_VARIABLE = "ANABRANCH_POOL"
_NICE = 10
_PATIENCE = 2.0
"""Seconds of waiting for a processor."""
_LEAST = 0.1
"""Of that time; what the other pool would get."""
_STATISTICS = Path("/proc/thread-self/schedstat")


_files: ThreadPoolExecutor | None = None
T = TypeVar("T")


class Pool(Enum):
    """What a process is for."""

    STEPS = "steps"
    LEFT_OVER = "left-over"
    NICE = "nice"


def settle() -> None:
    """Give this process, and those that it will fork, the priority of its pool."""
    if _pool() is not Pool.STEPS:
        # A sandbox may forbid it: the work is the same, at normal priority.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _NICE)


def begin() -> None:
    """At the beginning of a task: in the pool that gets what steps leave, this thread does so from now on."""
    global _files
    if _pool() is not Pool.LEFT_OVER or _files is not None or _scheduled() is None:
        return
    files = ThreadPoolExecutor(1, thread_name_prefix="anabranch-files")
    # A thread has the priority of the one that starts it, and no way up.
    files.submit(int).result()
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        _files = files


def write_files(action: Callable[[], T]) -> T:
    """Do something that changes files; not on a thread that gets only what steps leave."""
    return action() if _files is None else _files.submit(action).result()


class Watch:
    """To be called now and then by work beside the steps."""

    def __init__(self, scheduled: Callable[[], tuple[float, float] | None] | None = None) -> None:
        self._scheduled = scheduled or (_scheduled if _is_idle_class() else lambda: None)
        self._start = self._scheduled()

    def __call__(self) -> None:
        """Raises Starved: the machine has next to nothing left for this process."""
        now = self._scheduled()
        if self._start is None or now is None:
            return
        ran, waited = now[0] - self._start[0], now[1] - self._start[1]
        if waited > _PATIENCE and ran < waited * _LEAST:
            raise Starved(
                f"work beside the steps ran for {ran:.1f} s and waited {waited:.1f} s for a processor"
            )


def _pool() -> Pool:
    return Pool(os.environ.get(POOL_VARIABLE, Pool.STEPS.value))


def _is_idle_class() -> bool:
    return hasattr(os, "SCHED_IDLE") and os.sched_getscheduler(0) == os.SCHED_IDLE


def _scheduled() -> tuple[float, float] | None:
    """Seconds that this thread has run, and has waited for a processor; None where the system does not tell."""
    try:
        ran, waited, _ = map(int, _STATISTICS.read_text().split())
    except (OSError, ValueError):
        return None
    return (ran / 1e9, waited / 1e9) if ran else None
