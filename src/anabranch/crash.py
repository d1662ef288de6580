"""Places where a test may kill the process: around every durable write and every hand-over.

A *point* has a name, such as `commit.before`.  The environment variable ANABRANCH_CRASH arms one point for all
processes of a run: `NAME=DIRECTORY`, where the directory holds as many files as the point may be reached.  Whoever
reaches it takes one file away, and the process that takes the last one dies by SIGKILL, which no handler sees.  So
a point fires once, in whichever process it is, and a run that is repeated with the same variable survives it.

Not armed, a point costs a comparison.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import IO

VARIABLE = "ANABRANCH_CRASH"

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
    if _ARMED == name and _take():
        os.kill(os.getpid(), signal.SIGKILL)


def write(file: IO[bytes], data: bytes | memoryview, name: str) -> None:
    """Write all of `data`; with `NAME.torn` armed, half of it reaches the disk and the process dies."""
    if f"{name}.torn" == _ARMED and _take():
        file.write(memoryview(data)[: len(data) // 2])
        file.flush()
        os.fsync(file.fileno())
        os.kill(os.getpid(), signal.SIGKILL)
    file.write(data)


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
