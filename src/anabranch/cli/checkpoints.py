"""`anabranch checkpoint`: make a checkpoint now, and see what they take."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from typing import Any

from anabranch.cli.display import human, tell_waiting
from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.jobhandle import Job
from anabranch.state.versions import Versions


def checkpoint(options: Namespace) -> int:
    job = Job(options.dir)
    if not options.list:
        job.checkpoint(timeout=options.timeout, tell=None if options.json else tell_waiting)
    if options.json:
        print(json.dumps(usage(job.jobdir)))
        return 0
    print("\n".join(checkpoint_lines(job.jobdir)) or "no checkpoints")
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


def _age(then: float) -> str:
    seconds = max(0.0, time.time() - then)
    for limit, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= limit:
            return f"{seconds / limit:.0f} {unit}"
    return f"{seconds:.0f} s"
