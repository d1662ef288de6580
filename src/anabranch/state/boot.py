"""Which boot of the host this is."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from uuid import uuid4


@cache
def current_boot_id() -> str:
    """The kernel's id of this boot.

    Where the kernel has none, a fresh id for each process: then no unsynced shard is ever
    trusted, which costs a replay and never a wrong answer.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"unknown-{uuid4()}"
