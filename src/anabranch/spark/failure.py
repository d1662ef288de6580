"""Carry our own errors from a Spark task to the driver.

Spark turns an exception in a Python task into text inside a Java exception.  A task therefore raises
`TaskFailed`, whose message is the error's class and arguments as JSON between two marks; the driver looks
for the marks.  Nothing is unpickled.
"""

from __future__ import annotations

import json
import re
from typing import Any

from anabranch import errors

_MISSING = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")
_DIED = re.compile(r"Python worker exited unexpectedly|ExecutorLostFailure")
_MARKED = re.compile(r"«anabranch ([0-9a-f]+)»")


class TaskFailed(Exception):
    """An AnabranchError on its way to the driver."""


def wrap(error: errors.AnabranchError) -> TaskFailed:
    body = json.dumps({"class": type(error).__name__, "args": [str(arg) for arg in error.args]})
    return TaskFailed(f"{error} «anabranch {body.encode().hex()}»")


def unwrap(text: str) -> errors.AnabranchError | None:
    """The error that a task raised, or None when the text is of something else."""
    found = _MARKED.search(text)
    if found is None:
        return None
    body: dict[str, Any] = json.loads(bytes.fromhex(found[1]))
    kind = getattr(errors, body["class"], errors.EngineError)
    error: errors.AnabranchError = kind(*body["args"])
    return error


def worker_died(error: errors.AnabranchError) -> bool:
    """Whether a step was aborted because a Python process, or the executor around it, ended without a word.

    Only that can be the doing of a poisoned record: everything else that goes wrong in a task raises.
    """
    return isinstance(error, errors.StepAborted) and _DIED.search(str(error)) is not None


def missing_module(text: str) -> errors.ConfigError | None:
    """What to say when a worker cannot import what the flow needs; trying again would not help."""
    found = _MISSING.search(text)
    if found is None:
        return None
    return errors.ConfigError(
        f"Spark's Python processes cannot import {found[1]!r}: put the module beside the flow's file, or install it "
        "in the Python environment of every host"
    )
