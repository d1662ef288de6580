"""Being the one coordinator of a job directory: a lock on a disk, a lease in an object store.

Safety never depends on either.  Every coordinator takes an epoch of its own by an exclusive create, every record of a
step is created exclusively, and shards refuse a writer whose epoch is old: of two coordinators one fails at its next
create, whatever they believe of the lock.  The lock spares users that, and tells them who is at work.

A lock on a disk is the kernel's (`flock`): it is gone with its process.  A lease is a record that its holder renews;
without news for `STALE` seconds, by the clock of whoever looks, it counts as gone.  On the machine of its holder one can
see at once that the process is gone.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from anabranch import crash
from anabranch.errors import AnabranchError, CorruptError, JobDirError
from anabranch.model.ids import Epoch
from anabranch.state.boot import current_boot_id
from anabranch.storage import Storage, record

log = logging.getLogger(__name__)

STALE = 15.0
RENEW = 5.0
NAME = "lock"
_LEASE = crash.declare_write("lease", "a coordinator takes or renews its lease")
_TRIES = 10
_PAUSE = 0.02


def owner() -> str:
    """This process, as it is named to others."""
    return f"process {os.getpid()} on {socket.gethostname()}"


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold the lock on a disk.  Raises JobDirError, naming the holder."""
    with open(path, "a+") as file:
        if not _lock_patiently(file):
            file.seek(0)
            raise taken(str(path.parent), file.read().strip())
        file.truncate(0)
        file.write(owner() + "\n")
        file.flush()
        yield


def file_locked(path: Path) -> bool:
    """Whether somebody holds the lock on a disk now."""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True
    return False


def holder(storage: Storage) -> tuple[int, str] | None:
    """Process and machine of whoever holds the lock or the lease now."""
    if storage.local is None:
        lease = leased(storage)
        said = "" if lease is None else lease["owner"]
    else:
        said = (storage.local / NAME).read_text() if file_locked(storage.local / NAME) else ""
    found = re.match(r"process (\d+) on (\S+)", said)
    return None if found is None else (int(found[1]), found[2])


def leased(storage: Storage) -> dict[str, Any] | None:
    """The lease that somebody holds now, if it is not stale."""
    try:
        lease: dict[str, Any] = record.read(storage, NAME)
    except (FileNotFoundError, CorruptError):
        return None
    if lease["machine"] == _machine() and _began(lease["process"]) != lease["began"]:
        return None
    return lease if abs(time.time() - lease["beat"]) < STALE else None


@contextmanager
def renewed(storage: Storage, epoch: Epoch) -> Iterator[None]:
    """Hold the lease, renewing it in a thread, until the block ends."""
    lease = _Lease(storage, epoch)
    lease.beat()
    thread = threading.Thread(target=lease.keep, name="anabranch-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        lease.over.set()
        thread.join()
        lease.release()


def taken(where: str, holder: str) -> JobDirError:
    return JobDirError(
        f"{where} is being run by {holder or 'another process'}; stop it first with `anabranch stop {where}`"
    )


class _Lease:
    """A lease of one epoch.  Once a later epoch has it, it is left alone: that coordinator took over."""

    def __init__(self, storage: Storage, epoch: Epoch) -> None:
        self.storage = storage
        self.epoch = epoch
        self.over = threading.Event()

    def beat(self) -> None:
        process = os.getpid()
        value = {
            "owner": owner(),
            "epoch": self.epoch,
            "beat": time.time(),
            "machine": _machine(),
            "process": process,
            "began": _began(process),
        }
        record.replace(self.storage, NAME, value, point=_LEASE)

    def keep(self) -> None:
        while not self.over.wait(RENEW):
            try:
                if not self._mine():
                    log.warning(
                        "another coordinator has taken over dir=%s epoch=%d", self.storage, self.epoch
                    )
                    return
                self.beat()
            except AnabranchError as error:
                # Nothing depends on the lease; the store may answer again before it is stale.
                log.warning("could not renew the lease dir=%s error=%s", self.storage, error)

    def release(self) -> None:
        try:
            if self._mine():
                self.storage.delete(NAME)
        except AnabranchError as error:
            log.warning("could not release the lease dir=%s error=%s", self.storage, error)

    def _mine(self) -> bool:
        try:
            return bool(record.read(self.storage, NAME)["epoch"] <= self.epoch)
        except (FileNotFoundError, CorruptError):
            return True


def _machine() -> str:
    """Where process numbers mean the same as here: this boot of this machine, in this container."""
    try:
        container = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        container = 0
    return f"{current_boot_id()} {container}"


def _began(process: int) -> str:
    """When a process began, so that another one with its number is not taken for it; empty when there is none."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
    # The name comes second, in brackets, and may have spaces in it.
    return stat.rpartition(")")[2].split()[19]


def _lock_patiently(file: IO[str]) -> bool:
    """Take the lock; whoever only looks holds it for a moment, and must not be taken for another run."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE)
        else:
            return True
    return False
