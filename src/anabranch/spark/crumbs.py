"""Find the record on which worker processes die: a segmentation fault in a user's extension, `os._exit`, no memory.

A dead process says nothing.  So once a step has died twice its tasks are run in isolation: before a user's function
gets a record, or a source a slice, operator and record are noted in a **crumb**, a small file mapped into memory that
outlives the process.  The next attempt finds it.  A record on which processes died FATAL times is not tried again: it
stops the flow, or becomes a dead letter, by name.

CRB-1  A crumb is left by a task that ended inside of a user's function or a source, and by no other.
CRB-2  A record is blamed only after FATAL deaths in one epoch: a process that was killed from outside, once, blames
       nobody; and an epoch begins without blame, so that a function that was mended gets its chance.
CRB-3  Which records are set aside depends on their content alone, never on where or in which order they came: the same
       ones at any number of workers, and when the step is replayed.

When a task fails Spark kills the other tasks of the job, two seconds later or more, or lets them run on for a while.
They leave crumbs as well.  So a task holds a lock on its crumb for as long as it lives, and a thread notes every 50 ms
that it does; of each attempt only the first to fall silent count, be it by death or by an error.  That is seen per
machine: of another one, the twofold death alone protects a record whose function takes seconds.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgpack

from anabranch.errors import StorageFullError
from anabranch.model.ids import OperatorId, WorkerId
from anabranch.spark.shards import state_root
from anabranch.spark.spec import StepSpec

FATAL = 2
"""Deaths after which a record is not tried again."""

_HEAD = struct.Struct("<Qd")
"""Length of the note, 0 for none, and when the process was last alive (CLOCK_MONOTONIC)."""
_SIZE = 1 << 15
_SHOWN = 4_000
"""Characters of a record that are kept; of a longer one, a digest tells it from others."""
_BEAT = 0.05
_TOGETHER = 1.0


class Identity(NamedTuple):
    """A record that an operator was given, the same in every attempt."""

    operator: str
    record: str


class Crumbs:
    """The guard of one task in isolation; see `isolation`."""

    def __init__(self, path: Path, died: Counter[Identity]) -> None:
        self._died = died
        self._handle, self._map = _mapped(path)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def died(self, operator: OperatorId, record: str) -> int:
        """How many processes have died on this."""
        return self._died[_identity(operator, record)]

    def admit(self, operator: OperatorId, record: str) -> str | None:
        """Note that the record is about to be tried, or say why it must not be."""
        identity = _identity(operator, record)
        deaths = self._died[identity]
        if deaths >= FATAL:
            self.leave()
            return f"the worker process died on this record {deaths} times"
        note = msgpack.packb(identity)
        # A process can die between any two of these; the length makes the note valid, and so it comes last.
        _HEAD.pack_into(self._map, 0, 0, time.monotonic())
        self._map[_HEAD.size : _HEAD.size + len(note)] = note
        _HEAD.pack_into(self._map, 0, len(note), time.monotonic())
        return None

    def leave(self) -> None:
        """Take the note back: the function returned."""
        _HEAD.pack_into(self._map, 0, 0, time.monotonic())

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._map.close()
        os.close(self._handle)

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT):
            struct.pack_into("<d", self._map, 8, time.monotonic())


@contextmanager
def isolation(spec: StepSpec, stage: int, worker: WorkerId) -> Iterator[Crumbs | None]:
    """A guard for the operators of one stage, where the step is to be isolated; costs nothing where not."""
    if not spec.isolate:
        yield None
        return
    folder = _folder(spec)
    folder.mkdir(parents=True, exist_ok=True)
    for other in folder.parent.iterdir():
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    path = folder / f"{spec.epoch}.{spec.attempt}-stage-{stage}-worker-{worker}"
    crumbs = Crumbs(path, _deaths(folder, spec))
    try:
        yield crumbs
    except Exception:
        # Whoever raised it has dealt with it; anything else, such as `sys.exit` in a function, is a death.
        crumbs.leave()
        raise
    else:
        path.unlink(missing_ok=True)
    finally:
        crumbs.close()


def clear_crumbs(spec: StepSpec, worker: WorkerId) -> None:
    """Forget all deaths on this worker's machine; for the coordinator to ask, once a step that died is committed."""
    shutil.rmtree(_folder(spec).parent, ignore_errors=True)


class _End(NamedTuple):
    """How a task ended that did not succeed."""

    identity: Identity | None
    attempt: int
    alive: float


def _folder(spec: StepSpec) -> Path:
    return state_root(spec) / "breadcrumbs" / f"step-{spec.step:012d}"


def _deaths(folder: Path, spec: StepSpec) -> Counter[Identity]:
    ends: list[_End] = []
    for path in folder.iterdir():
        epoch, attempt = (int(part) for part in path.name.split("-", 1)[0].split("."))
        if epoch < spec.epoch:
            path.unlink(missing_ok=True)
        elif epoch == spec.epoch and attempt < spec.attempt:
            ends += _read(path, attempt)
    first = {end.attempt: end.alive for end in sorted(ends, key=lambda end: -end.alive)}
    return Counter(
        end.identity for end in ends if end.identity and end.alive <= first[end.attempt] + _TOGETHER
    )


def _read(path: Path, attempt: int) -> list[_End]:
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return []
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        data = os.pread(handle, _SIZE, 0)
    except BlockingIOError:
        return []
    finally:
        os.close(handle)
    if len(data) < _SIZE:
        return []
    length, alive = _HEAD.unpack_from(data)
    if not length:
        return [_End(None, attempt, alive)]
    operator, record = msgpack.unpackb(data[_HEAD.size : _HEAD.size + length])
    return [_End(Identity(operator, record), attempt, alive)]


def _identity(operator: OperatorId, record: str) -> Identity:
    if len(record) > _SHOWN:
        digest = blake2b(record.encode(errors="surrogatepass"), digest_size=16).hexdigest()
        record = f"{record[:_SHOWN]}… ({len(record)} characters, {digest})"
    return Identity(str(operator), record)


def _mapped(path: Path) -> tuple[int, mmap.mmap]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        # A page of a sparse file that finds the disk full kills the process.
        os.posix_fallocate(handle, 0, _SIZE)
        return handle, mmap.mmap(handle, _SIZE)
    except OSError as error:
        os.close(handle)
        if error.errno == errno.ENOSPC:
            raise StorageFullError(f"the disk of {path.parent} is full; free some space") from error
        raise
