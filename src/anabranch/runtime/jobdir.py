"""The job directory: the one place that holds all that must survive, and who may write to it.

    job.json          what the job is: id, flow, fingerprint, format; created once
    lock              held by the running coordinator
    epochs/           one record for each coordinator that the job has had
    layouts/          one record for each layout
    log/              plan and commit records of steps, snapshots
    inputs/NAME/      input logs of sources that cannot replay
    outputs/NAME/     outputs that have no path of their own
    state/HOST/       shards, unless hosts keep them elsewhere
    status.json       what the coordinator last said of itself; nothing depends on it
    control/          wishes of other processes: stop
    spark.log         Spark's own console noise

Must not know what a step does, nor Spark.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from anabranch.errors import CorruptError, JobDirError
from anabranch.flow.plan import Plan, describe
from anabranch.log import record
from anabranch.model.ids import Epoch
from anabranch.model.layout import Layout

FORMAT = 1
_LOCK_TRIES = 10
_LOCK_PAUSE = 0.02
_FOLDERS = ("epochs", "layouts", "log", "inputs", "outputs", "state", "control")
_BEFORE_JOB = ("lock", "epochs")
"""What a coordinator makes before it knows whether the job exists."""


class JobDir:
    """Paths and records of one job directory."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def outputs(self) -> Path:
        return self.path / "outputs"

    @property
    def state(self) -> Path:
        return self.path / "state"

    def input_log(self, name: str) -> Path:
        return self.path / "inputs" / name

    # What the job is.

    def exists(self) -> bool:
        return (self.path / "job.json").exists()

    def create(self, plan: Plan) -> dict[str, Any]:
        """Make a new job.  The directory must be absent or empty."""
        self._refuse_foreign()
        for folder in _FOLDERS:
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        job = {
            "format": FORMAT,
            "id": uuid.uuid4().hex,
            "flow": plan.name,
            "fingerprint": plan.fingerprint,
            "operators": [describe(planned.node) for planned in plan.operators],
            "created": time.time(),
        }
        record.create(self.path / "job.json", json.loads(json.dumps(job, default=str)))
        return job

    def job(self) -> dict[str, Any]:
        """The job's own record.  Raises JobDirError when the directory holds none."""
        try:
            job: dict[str, Any] = record.read(self.path / "job.json")
        except (FileNotFoundError, NotADirectoryError):
            what = "is not a job directory (it has no job.json)" if self.path.exists() else "does not exist"
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
        if self.exists() or not self.path.exists():
            return
        for path in self.path.iterdir():
            ours = path.name in _BEFORE_JOB or path.name.startswith(".job.json.")
            if not ours and not (path.name in _FOLDERS and path.is_dir() and not any(path.iterdir())):
                raise JobDirError(
                    f"{self.path} is not empty and is not a job directory (it has no job.json, and has "
                    f"{path.name!r}); choose another --dir, or empty it if you are sure"
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
        with self._open_lock() as file:
            if not _lock_patiently(file):
                file.seek(0)
                raise JobDirError(
                    f"{self.path} is being run by {file.read().strip() or 'another process'}; stop it first "
                    f"with `anabranch stop {self.path}`"
                )
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            yield self._next_epoch()

    def _open_lock(self) -> IO[str]:
        try:
            self._refuse_foreign()
            self.path.mkdir(parents=True, exist_ok=True)
            return open(self.path / "lock", "a+")
        except OSError as error:
            raise JobDirError(
                f"{self.path} cannot be used as a job directory: {error.strerror}; choose another --dir"
            ) from error

    def running(self) -> bool:
        """Whether a coordinator holds the lock now."""
        try:
            with open(self.path / "lock") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except BlockingIOError:
            return True
        return False

    def _next_epoch(self) -> Epoch:
        folder = self.path / "epochs"
        folder.mkdir(exist_ok=True)
        last = max((int(path.stem) for path in folder.glob("*.json")), default=0)
        record.create(
            folder / f"{last + 1:09d}.json",
            {"epoch": last + 1, "process": os.getpid(), "host": socket.gethostname(), "started": time.time()},
        )
        return Epoch(last + 1)

    # Layouts.

    def layout(self) -> Layout | None:
        """The newest layout, or None in a new job."""
        files = sorted((self.path / "layouts").glob("*.json"))
        if not files and any(self.log.glob("*/*.commit")):
            raise CorruptError(
                f"{self.path / 'layouts'} is empty, but steps were committed; restore it from a backup of the job "
                "directory"
            )
        return Layout.from_json(record.read(files[-1])["layout"]) if files else None

    def write_layout(self, layout: Layout, step: int) -> None:
        record.create(
            self.path / "layouts" / f"{layout.version:09d}.json",
            {"layout": layout.to_json(), "step": step, "time": time.time()},
        )

    # What is said, and what is wished.

    def write_status(self, status: dict[str, Any]) -> None:
        record.replace(self.path / "status.json", status, durable=False)

    def status(self) -> dict[str, Any]:
        try:
            status: dict[str, Any] = record.read(self.path / "status.json")
        except (FileNotFoundError, NotADirectoryError, CorruptError):
            return {"state": "new"}
        return status

    def ask_to_stop(self) -> None:
        (self.path / "control").mkdir(exist_ok=True)
        (self.path / "control" / "stop").touch()

    def stop_asked(self) -> bool:
        return (self.path / "control" / "stop").exists()

    def clear_wishes(self) -> None:
        (self.path / "control" / "stop").unlink(missing_ok=True)


def _lock_patiently(file: IO[str]) -> bool:
    """Take the lock; whoever only looks (`running`) holds it for a moment, and must not be taken for another run."""
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_PAUSE)
        else:
            return True
    return False
