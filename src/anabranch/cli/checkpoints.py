"""`anabranch checkpoint`: make a checkpoint now, and see what they take."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from typing import Any

from anabranch.cli.display import human
from anabranch.cli.job import open_job
from anabranch.errors import JobDirError
from anabranch.runtime.jobdir import JobDir
from anabranch.state.versions import Versions


def checkpoint(options: Namespace) -> int:
    jobdir = open_job(options.dir)
    if not options.list:
        _ask(jobdir, options)
    if options.json:
        print(json.dumps(usage(jobdir)))
        return 0
    print("\n".join(checkpoint_lines(jobdir)) or "no checkpoints")
    return 0


def checkpoint_lines(jobdir: JobDir) -> list[str]:
    """A line for each version."""
    return [
        f"  version    {one['version']}, before step {one['step']:,}, {_age(one['time'])} ago: wrote "
        f"{human(one['own_bytes'])}B, needs {human(one['bytes'])}B"
        for one in usage(jobdir)
    ]


def usage(jobdir: JobDir) -> list[dict[str, Any]]:
    """Each version with the bytes that it wrote and all that it needs."""
    versions = Versions(jobdir.checkpoints)
    return [
        {
            "version": one.version,
            "step": manifest.step,
            "time": manifest.time,
            "own_bytes": one.own,
            "bytes": one.total,
        }
        for one in versions.usage()
        for manifest in [versions.manifest(one.version)]
    ]


def _ask(jobdir: JobDir, options: Namespace) -> None:
    if not jobdir.running():
        raise JobDirError(
            f"{jobdir.path} is not running, so there is nothing new to checkpoint; `anabranch checkpoint "
            f"{jobdir.path} --list` shows what there is"
        )
    jobdir.ask("checkpoint")
    deadline = time.monotonic() + options.timeout
    told = time.monotonic()
    while jobdir.asked("checkpoint"):
        now = time.monotonic()
        if not jobdir.running():
            raise JobDirError(f"{jobdir.path} ended before the checkpoint was made")
        if now > deadline:
            raise JobDirError(f"{jobdir.path} has made no checkpoint within {options.timeout:g} s")
        if now - told > 2 and not options.json:
            sys.stderr.write("waiting for the checkpoint to be written …\n")
            told = now
        time.sleep(0.05)


def _age(then: float) -> str:
    seconds = max(0.0, time.time() - then)
    for limit, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= limit:
            return f"{seconds / limit:.0f} {unit}"
    return f"{seconds:.0f} s"
