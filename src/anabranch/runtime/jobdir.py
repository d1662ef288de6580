"""The job directory: the one place that holds all that must survive, and who may write to it.

    job.json          what the job is: id, flow, fingerprint, format; created once
    lock              held by the running coordinator
    epochs/           one record for each coordinator that the job has had
    layouts/          one record for each layout
    log/              plan and commit records of steps, snapshots
    checkpoints/      versions of the state
    inputs/NAME/      input logs of sources that cannot replay
    outputs/NAME/     outputs that have no path of their own
    state/HOST/       shards, unless hosts keep them elsewhere
    status.json       what the coordinator last said of itself; nothing depends on it
    control/          wishes of other processes: stop
    spark.log         Spark's own console noise

It is a directory, or a URL in an object store; `state` and `spark.log` are always on a disk.  No record in it holds
the place of the directory itself, so that it can be moved.  Must not know what a step does, nor Spark.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anabranch import crash
from anabranch.errors import CorruptError, Fenced, JobDirError, StorageFullError
from anabranch.flow.plan import Plan, describe
from anabranch.log.steplog import StepLog
from anabranch.model.ids import Epoch, Step
from anabranch.model.placement import Placement
from anabranch.runtime import lease
from anabranch.spark.spec import STATE_DIR_VARIABLE
from anabranch.storage import Storage, open_storage, record

log = logging.getLogger(__name__)

FORMAT = 1
RECOVERY_PARTITIONS = 32
"""Of a new job that is told nothing."""
_FOLDERS = ("epochs", "layouts", "log", "checkpoints", "inputs", "outputs", "state", "control")
_BEFORE_JOB = ("lock", "epochs/", "log/first.json")
"""What a coordinator makes before it knows whether the job exists."""
_LOOK_EVERY = 0.5
"""Seconds between two looks for a wish in an object store, where a look is a request."""

_JOB = crash.declare_write("job", "the record of a new job is written")
_EPOCH = crash.declare_write("epoch", "a coordinator takes its epoch")
_LAYOUT = crash.declare_write("layout", "a layout is written")


class JobDir:
    """Paths and records of one job directory."""

    def __init__(self, where: str | os.PathLike[str]) -> None:
        self.storage = open_storage(where)
        self._looked: dict[str, tuple[float, bool]] = {}

    @property
    def path(self) -> str:
        """The absolute path, or the URL."""
        return self.storage.url

    @property
    def log(self) -> Storage:
        return self.storage.child("log")

    @property
    def checkpoints(self) -> Storage:
        return self.storage.child("checkpoints")

    @property
    def outputs(self) -> Storage:
        return self.storage.child("outputs")

    def input_log(self, name: str) -> Storage:
        return self.storage.child("inputs", name)

    @property
    def state(self) -> Path:
        """Where hosts keep their shards unless they are told otherwise: always on a disk.

        Beside an object store that is `$ANABRANCH_STATE_DIR/JOB-ID`, or else `anabranch/JOB-ID` in the user's cache
        directory.
        """
        if self.storage.local is not None:
            return self.storage.local / "state"
        told = os.environ.get(STATE_DIR_VARIABLE)
        return (Path(told) if told else _cache()) / str(self.job()["id"])

    @property
    def spark_log(self) -> Path:
        """Where Spark's console noise goes: always on a disk."""
        if self.storage.local is not None:
            return self.storage.local / "spark.log"
        return self.state / "spark.log"

    # What the job is.

    def exists(self) -> bool:
        return self.storage.exists("job.json")

    def create(self, plan: Plan, recovery_partitions: int = RECOVERY_PARTITIONS) -> dict[str, Any]:
        """Make a new job.  The directory must be absent or empty."""
        self._refuse_foreign()
        if self.storage.local is not None:
            for folder in _FOLDERS:
                (self.storage.local / folder).mkdir(parents=True, exist_ok=True)
        StepLog(self.log).create()
        job: dict[str, Any] = {
            "format": FORMAT,
            "id": uuid.uuid4().hex,
            "flow": plan.name,
            "fingerprint": plan.fingerprint,
            "operators": [describe(planned.node) for planned in plan.operators],
            "recovery_partitions": recovery_partitions,
            "created": time.time(),
        }
        job = json.loads(json.dumps(job, default=str))
        record.create(self.storage, "job.json", job, _JOB)
        return job

    def job(self) -> dict[str, Any]:
        """The job's own record.  Raises JobDirError when the directory holds none."""
        try:
            job: dict[str, Any] = record.read(self.storage, "job.json")
        except FileNotFoundError:
            there = self.storage.local.exists() if self.storage.local is not None else self.storage.list()
            what = "is not a job directory (it has no job.json)" if there else "does not exist"
            raise JobDirError(
                f"{self.path} {what}; `anabranch run FLOW.py --dir {self.path}` makes one"
            ) from None
        if job["format"] != FORMAT:
            raise JobDirError(
                f"{self.path} has format {job['format']}, this version of Anabranch reads format {FORMAT}; "
                "use the version that made it"
            )
        return job

    def _refuse_foreign(self) -> None:
        """Refuse a directory that holds anything but what a coordinator that died at once has left."""
        if self.exists():
            return
        for name in self.storage.list():
            inside = [name + below for below in self.storage.list(name[:-1])] if name.endswith("/") else []
            ours = name[:-1] in _FOLDERS if name.endswith("/") else False
            if name not in _BEFORE_JOB and not (ours and set(inside) <= set(_BEFORE_JOB)):
                raise JobDirError(
                    f"{self.path} is not empty and is not a job directory (it has no job.json, and has "
                    f"{name.rstrip('/')!r}); choose another --dir, or empty it if you are sure"
                )

    def check_partitions(self, wanted: int | None) -> None:
        """Refuse another number of recovery partitions than the job was made with."""
        made = self.job()["recovery_partitions"]
        if wanted is not None and wanted != made:
            raise JobDirError(
                f"--recovery-partitions {wanted}: the job was made with {made}, and they stay; leave the flag out"
            )

    def check_same_flow(self, plan: Plan) -> None:
        """Refuse a flow whose graph is not the one that the job's state belongs to."""
        job = self.job()
        if job["fingerprint"] == plan.fingerprint:
            return
        before = {operator["id"]: operator for operator in job["operators"]}
        after = {p.node.id: json.loads(json.dumps(describe(p.node), default=str)) for p in plan.operators}
        changes = [f"operator {name!r} is gone" for name in before.keys() - after.keys()]
        changes += [f"operator {name!r} is new" for name in after.keys() - before.keys()]
        for name in before.keys() & after.keys():
            changes += [
                f"operator {name!r}: {field} was {before[name].get(field)!r}, is {after[name].get(field)!r}"
                for field in sorted(before[name].keys() | after[name].keys())
                # As text: the order of columns counts.
                if json.dumps(before[name].get(field)) != json.dumps(after[name].get(field))
            ]
        if job["flow"] != plan.name:
            changes.append(f"the flow was called {job['flow']!r}, is called {plan.name!r}")
        said = "; ".join(sorted(changes)) or "its fingerprint differs"
        raise JobDirError(
            f"{self.path} holds the state of another graph: {said}. Run the flow it was made with, or choose "
            "another --dir"
        )

    # Who may write.

    @contextmanager
    def locked(self) -> Iterator[Epoch]:
        """Be the one coordinator; gives the epoch.

        Raises:
            JobDirError: another coordinator is at work, and is named; the directory is not a job's, or cannot
                be written to.
        """
        if self.storage.local is None:
            self._refuse_foreign()
            holder = lease.leased(self.storage)
            if holder is not None:
                raise lease.taken(self.path, holder["owner"])
            epoch = self.next_epoch()
            with lease.renewed(self.storage, epoch):
                yield epoch
            return
        with lease.file_lock(self._lock_file(self.storage.local)):
            self._sweep()
            yield self.next_epoch()

    def _sweep(self) -> None:
        """Remove halves of records that killed coordinators have left."""
        for folder in ("", "epochs", "layouts", "log"):
            self.storage.sweep(folder)
        for folder in [name for name in self.log.list() if name.endswith("/")][-1:]:
            self.log.sweep(folder[:-1])

    def _lock_file(self, directory: Path) -> Path:
        try:
            self._refuse_foreign()
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / lease.NAME
            path.touch()
        except OSError as error:
            raise JobDirError(
                f"{self.path} cannot be used as a job directory: {error.strerror}; choose another --dir"
            ) from error
        return path

    def running(self) -> bool:
        """Whether a coordinator is at work now, as far as its lock tells."""
        if self.storage.local is None:
            return lease.leased(self.storage) is not None
        return lease.file_locked(self.storage.local / lease.NAME)

    def kill_holder(self) -> None:
        """Kill the coordinator at work.  Raises JobDirError when it is on another machine."""
        holder = lease.holder(self.storage)
        if holder is None:
            return
        process, host = holder
        if host != socket.gethostname():
            raise JobDirError(
                f"{self.path} is being run by process {process} on {host}; kill it there, nothing is lost"
            )
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            return
        except PermissionError:
            raise JobDirError(
                f"{self.path} is being run by process {process} of another user; it is theirs to stop"
            ) from None

    def next_epoch(self) -> Epoch:
        """Take an epoch of one's own; whoever holds an earlier one can write no more.

        Raises:
            JobDirError: another coordinator took it at the same moment.
        """
        last = max((int(name.partition(".")[0]) for name in self.storage.list("epochs")), default=0)
        value = {
            "epoch": last + 1,
            "process": os.getpid(),
            "host": socket.gethostname(),
            "started": time.time(),
        }
        name = f"epochs/{last + 1:09d}.json"
        try:
            record.create(self.storage, name, value, _EPOCH)
        except FileExistsError:
            other = record.read(self.storage, name)
            raise lease.taken(self.path, f"process {other['process']} on {other['host']}") from None
        return Epoch(last + 1)

    # Layouts.

    def placement(self, moved: Placement | None = None) -> Placement | None:
        """Where the copies of all shards are: as the newest layout record says, or as the step log does (`moved`),
        whichever is newer; None in a new job."""
        names = self.storage.list("layouts")
        if not names and any(name.endswith("/") for name in self.log.list()):
            raise CorruptError(
                f"{self.storage.where('layouts')} is empty, but steps were planned; restore it from a backup of the "
                "job directory"
            )
        if not names:
            return None
        written = Placement.from_json(record.read(self.storage, f"layouts/{names[-1]}"))
        return moved if moved is not None and moved.version > written.version else written

    def layouts(self) -> list[dict[str, Any]]:
        """Every layout record, oldest first: `layout`, `incarnations`, `cuts`, `intent`, `step`, `time` and `why`."""
        return [record.read(self.storage, f"layouts/{name}") for name in self.storage.list("layouts")]

    def write_layout(self, placement: Placement, step: Step, why: dict[str, Any] | None = None) -> None:
        """Record a layout, for the history, and for recovery where it is not the step log that says it.

        Raises:
            Fenced: another coordinator has written that version.
        """
        value = placement.to_json() | {"step": step, "time": time.time(), "why": why or {}}
        try:
            record.create(self.storage, f"layouts/{placement.version:09d}.json", value, _LAYOUT)
        except FileExistsError:
            raise Fenced(
                f"layout {placement.version} was written by another coordinator; this one must stop"
            ) from None

    # What is said, and what is wished.

    def write_status(self, status: dict[str, Any]) -> None:
        """Say how things are.  Nothing depends on it, so a full disk is no reason to stop."""
        try:
            record.replace(self.storage, "status.json", status, durable=False)
        except StorageFullError as error:
            log.warning("status not written error=%s", error)

    def status(self) -> dict[str, Any]:
        try:
            status: dict[str, Any] = record.read(self.storage, "status.json")
        except (FileNotFoundError, CorruptError):
            return {"state": "new"}
        return status

    def ask(self, wish: str) -> None:
        """Leave a wish for the coordinator."""
        self.storage.replace(f"control/{wish}", b"", durable=False)

    def asked(self, wish: str) -> bool:
        """Whether there is such a wish; in an object store, as of half a second ago."""
        if self.storage.local is not None:
            return self.storage.exists(f"control/{wish}")
        now = time.monotonic()
        looked, found = self._looked.get(wish, (-_LOOK_EVERY, False))
        if now - looked >= _LOOK_EVERY:
            found = self.storage.exists(f"control/{wish}")
            self._looked[wish] = (now, found)
        return found

    def clear(self, wish: str) -> None:
        """Take a wish away: it was fulfilled, or came too early."""
        self.storage.delete(f"control/{wish}")
        self._looked.pop(wish, None)

    def ask_to_stop(self) -> None:
        self.ask("stop")

    def stop_asked(self) -> bool:
        return self.asked("stop")

    def clear_wishes(self) -> None:
        for wish in self.storage.list("control"):
            self.clear(wish)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anabranch"
