"""A process that takes checkpoints and restores from them, killed at one of its points; again for each point.

Usage: python checkpoint_process.py ROOT POINT=TIMES…

It forks for each point, so that modules are loaded once, and prints how each child ended.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from shard_helpers import fence
from test_checkpoints import Flow, restored, rows

from anabranch import crash
from anabranch.state import manifest
from anabranch.state.restore import restore_shards
from anabranch.state.versions import Versions
from anabranch.storage.local import LocalStorage

VALUES = (b"1", b"2", b"3", b"4")


def main(root: Path) -> None:
    # Bases so often that there are pieces to trim.
    manifest._SMALL = 0
    storage = LocalStorage(root / "checkpoints")
    flow = Flow(root, 2, 1)
    for value in VALUES:
        flow.run(rows(1, 2, 200, value=value))
        version, _ = flow.checkpoint(storage, 4)
        (root / "newest").write_text(str(version.version))
    versions = Versions(storage)
    newest = versions.manifest(versions.list()[-1])
    restore_shards(storage, newest, restored(flow, newest), fence(newest.step, epoch=1))


def killed_at(root: Path, point: str, times: int) -> int:
    left = root / "left"
    left.mkdir(parents=True)
    for number in range(times):
        (left / str(number)).touch()
    child = os.fork()
    if child == 0:
        crash._ARMED, crash._LEFT = point, str(left)
        main(root / "job")
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    for argument in sys.argv[2:]:
        name, _, count = argument.partition("=")
        print(name, killed_at(Path(sys.argv[1]) / name, name, int(count)), flush=True)
