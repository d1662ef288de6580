"""Places where a test may kill the process: around every durable write and every hand-over.

A *point* has a name, such as `commit.before`.  The environment variable ANABRANCH_CRASH arms one point for all
processes of a run: `NAME=DIRECTORY`, where the directory holds as many files as the point may be reached.  Whoever
reaches it takes one file away, and the process that takes the last one dies by SIGKILL, which no handler sees.  So
a point fires once, in whichever process it is, and a run that is repeated with the same variable survives it.

With `?=DIRECTORY` nobody dies: every process notes in the directory which points it reaches, a byte each time in a
file of the point's name, so that a test knows what to arm and how often it comes by.

Not armed, a point costs a comparison.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import IO

VARIABLE = "ANABRANCH_CRASH"
TRACE = "?"

POINTS: dict[str, str] = {}
"""Every point by name, with what is at stake there."""


def declare(name: str, meaning: str) -> str:
    """Name a point; returns the name.  Modules declare theirs when they are loaded."""
    POINTS[name] = meaning
    return name


def declare_write(name: str, meaning: str) -> str:
    """Name the three points of a durable write: before it, in its middle, after it."""
    for when in ("before", "torn", "after"):
        declare(f"{name}.{when}", f"{when} {meaning}")
    return name


def point(name: str) -> None:
    """Die here if this point is armed and its time has come."""
    if _ARMED and _reached(name):
        os.kill(os.getpid(), signal.SIGKILL)


def write(file: IO[bytes], data: bytes | memoryview, name: str) -> None:
    """Write all of `data`; with `NAME.torn` armed, half of it reaches the disk and the process dies."""
    if _ARMED and _reached(f"{name}.torn"):
        file.write(memoryview(data)[: len(data) // 2])
        file.flush()
        os.fsync(file.fileno())
        os.kill(os.getpid(), signal.SIGKILL)
    file.write(data)


def _reached(name: str) -> bool:
    """Whether this passage is the one to die at."""
    if _ARMED == TRACE:
        # Appending is atomic, so that processes may do it at the same time.
        descriptor = os.open(f"{_LEFT}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(descriptor, b".")
        os.close(descriptor)
    return name == _ARMED and _take()


def _take() -> bool:
    """Take one file of the directory; True for the last one."""
    left = sorted(os.listdir(_LEFT)) if os.path.isdir(_LEFT) else []
    for place, name in enumerate(left):
        try:
            (Path(_LEFT) / name).unlink()
        except FileNotFoundError:
            continue
        return place == len(left) - 1
    return False


_ARMED, _, _LEFT = os.environ.get(VARIABLE, "").partition("=")
