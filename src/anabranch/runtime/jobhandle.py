"""`anabranch.Job`: a job directory seen from outside, whether or not somebody runs it.

What can be read is read from the directory; what needs the coordinator goes through its control endpoint, so a `Job`
works in any process of the same user on the coordinator's machine.  Must not import Spark.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from anabranch.errors import ConfigError, EngineError, JobDirError, UserError
from anabranch.log.steplog import StepLog
from anabranch.model.placement import Placement
from anabranch.model.ranges import hash_range
from anabranch.protocol.orders import Strategy
from anabranch.runtime.control import ControlClient
from anabranch.runtime.jobdir import JobDir

Json = dict[str, Any]

STRATEGIES = ("auto", "stop-start", *map(str, Strategy))
ENDED = ("done", "cancelled", "failed")
"""States that a rescaling stays in."""
_LOOK_EVERY = 0.1
_FORCE_PATIENCE = 5.0
_SILENCE = 30.0
"""Seconds for which a coordinator that is at work may say nothing of a rescaling: it may be recovering."""
_WEIGH_PATIENCE = 2.0
_TELL_EVERY = 2.0


class Job:
    """A job in its directory, or at its URL.

    Raises:
        JobDirError: there is no job.

    >>> job = Job("job")  # doctest: +SKIP
    >>> job.rescale(4)["state"]  # doctest: +SKIP
    'done'
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.jobdir = JobDir(directory)
        self.name = str(self.jobdir.job()["flow"])

    def __repr__(self) -> str:
        return f"Job({self.jobdir.path!r})"

    # What is.

    def running(self) -> bool:
        """Whether a coordinator is at work now."""
        return self.jobdir.running()

    def status(self) -> Json:
        """What the coordinator says of itself now, or said last; `anabranch status --json` prints the same."""
        return self.jobdir.status()

    def layout(self) -> Json:
        """Which worker and host has which shards, with their sizes as far as they are known.

        A running job is asked to weigh its shards anew, which takes a moment.
        """
        running = self.running()
        return _described(self.jobdir, self._weighed() if running else self.status(), running)

    def history(self) -> list[Json]:
        """Every layout that the job has had, oldest first, and what the way there took."""
        return [_summary(record) for record in self.jobdir.layouts()]

    def hosts(self) -> list[Json]:
        """The hosts that the job uses or could use: `host`, `workers`, `shards`, `bytes`, `alive`, `used`.

        Of a job that is not running, those of its layout; whether they are alive is then not known (None).
        """
        if self.running():
            return list(ControlClient(self.jobdir).get("/hosts")["hosts"])
        return [one | {"alive": None, "used": True} for one in self.layout()["hosts"]]

    # What is to be.

    def rescale(
        self,
        workers: int | None = None,
        *,
        hosts: int | Sequence[str] | None = None,
        strategy: str = "auto",
        budget: int | None = None,
        remove_hosts: Sequence[str] = (),
        wait: bool = True,
        timeout: float | None = None,
    ) -> Json:
        """Give the running job another number of workers, or other hosts, while it goes on.

        Args:
            workers: how many; None leaves their number.
            hosts: which hosts, or, embedded, how many; None leaves them, but for those that are removed.
            strategy: one of `STRATEGIES`.
            budget: most bytes of state that a step moves; None adapts it to the time that steps take.
            remove_hosts: hosts to empty, so that they can be shut down.
            wait: whether to come back when it is done; else when it was accepted.
            timeout: most seconds to wait.  The rescaling itself goes on after it.

        Returns:
            The account of the rescaling, as in the status under `migration`.

        Raises:
            UserError: it was refused, or somebody cancelled it.
            EngineError: it failed; the layout is as before.
            JobDirError: the job is not running, or ended, or the timeout passed.
        """
        body = _wish(workers, hosts, strategy, budget, remove_hosts)
        _check_timeout(timeout)
        migration = ControlClient(self.jobdir).post("/rescale", body)
        if not wait:
            return migration
        return check_done(self._last(migration, timeout))

    def cancel_rescale(self, *, wait: bool = True, timeout: float | None = None) -> Json:
        """Turn the rescaling under way back, and forget those that are queued behind it.

        Returns and raises as `rescale` does; where none was under way, only queued, there is no account: it is empty.
        """
        _check_timeout(timeout)
        migration = ControlClient(self.jobdir).post("/rescale/cancel")
        if not wait or not migration:
            return migration
        return check_cancelled(self._last(migration, timeout))

    def watch(self, migration: Json, timeout: float | None = None) -> Iterator[Json]:
        """Accounts of a rescaling, from the given one to that of its end, a few a second.

        Raises:
            UserError: it was taken out of the queue.
            JobDirError: the job ended before, or the timeout passed, or a later rescaling is shown in its place.
        """
        yield migration
        deadline = None if timeout is None else time.monotonic() + timeout
        client: ControlClient | None = None
        heard = time.monotonic()
        while migration["state"] not in ENDED:
            if deadline is not None and time.monotonic() > deadline:
                raise JobDirError(
                    f"{self.jobdir.path}: the rescaling is not done within {timeout:g} s; it goes on, and "
                    f"`anabranch status {self.jobdir.path}` shows it"
                )
            time.sleep(_LOOK_EVERY)
            try:
                client = client or ControlClient(self.jobdir)
                status = client.get("/status")
                heard = time.monotonic()
            except JobDirError as error:
                if self.running() and time.monotonic() - heard < _SILENCE:
                    continue
                status = self._after_the_end(migration, error)
            ended = [one for one in status.get("rescaled", ()) if one["id"] == migration["id"]]
            shown = ended[-1] if ended else status.get("migration")
            if shown is None or shown["id"] < migration["id"]:
                if migration["id"] not in [one["id"] for one in status.get("queued", [migration])]:
                    raise UserError(
                        f"rescaling {migration['id']} was taken out of the queue; nothing has changed"
                    )
                continue
            if shown["id"] > migration["id"]:
                raise JobDirError(
                    f"{self.jobdir.path}: rescaling {migration['id']} has ended, and {shown['id']} is under way; "
                    f"`anabranch layout {self.jobdir.path} --history` shows both"
                )
            migration = shown
            yield migration

    def stop(
        self, *, force: bool = False, timeout: float = 300.0, tell: Callable[[str], None] | None = None
    ) -> Json:
        """Stop the job in an orderly way, and wait for it; returns the last status.

        Args:
            force: do without the final checkpoint, and kill a coordinator that does not answer; nothing is lost.
            timeout: most seconds to wait.
            tell: called now and then with what is waited for.

        Raises:
            JobDirError: it has not stopped in time, or failed meanwhile.
        """
        was_running, began = self.running(), time.monotonic()
        telling = None if tell is None else _Telling(tell)
        while self.running():
            # Again and again: a coordinator that is just starting clears what it finds.
            self.jobdir.ask("stop")
            if force:
                self.jobdir.ask("force")
            waited = time.monotonic() - began
            if force and waited > _FORCE_PATIENCE:
                self.jobdir.kill_holder()
                break
            if waited > timeout:
                raise JobDirError(
                    f"{self.jobdir.path} has not stopped within {timeout:g} s; it is waiting for "
                    f"{self._waiting_for()}. `stop --force` stops it now and loses nothing"
                )
            if telling is not None:
                telling.say(self._waiting_for())
            time.sleep(_LOOK_EVERY / 2)
        status = self.status()
        if was_running and status["state"] == "failed":
            raise JobDirError(f"{self.jobdir.path} failed before it could stop: {status['error']}")
        return status

    def checkpoint(self, *, timeout: float = 300.0, tell: Callable[[str], None] | None = None) -> None:
        """Make a checkpoint of all that is committed, and wait for it.

        Args:
            timeout: most seconds to wait.
            tell: called now and then with what is waited for.

        Raises:
            JobDirError: the job is not running, or ended, or the timeout passed.
        """
        where = self.jobdir.path
        if not self.running():
            raise JobDirError(
                f"{where} is not running, so there is nothing new to checkpoint; `anabranch checkpoint {where} "
                f"--list` shows what there is"
            )
        self.jobdir.ask("checkpoint")
        telling = None if tell is None else _Telling(tell)
        deadline = time.monotonic() + timeout
        while self.jobdir.asked("checkpoint"):
            if not self.running():
                raise JobDirError(f"{where} ended before the checkpoint was made")
            if time.monotonic() > deadline:
                raise JobDirError(f"{where} has made no checkpoint within {timeout:g} s")
            if telling is not None:
                telling.say("the checkpoint to be written")
            time.sleep(_LOOK_EVERY / 2)

    def _waiting_for(self) -> str:
        """What a job that is to stop does before it does."""
        return self.status().get("waiting_for") or "the step under way"

    def _last(self, migration: Json, timeout: float | None) -> Json:
        for shown in self.watch(migration, timeout):
            migration = shown
        return migration

    def _after_the_end(self, migration: Json, error: JobDirError) -> Json:
        """The last status of a job that is gone, if the rescaling had ended before."""
        status = self.status()
        shown = status.get("migration")
        if shown is not None and shown["id"] == migration["id"] and shown["state"] in ENDED:
            return status
        if migration["state"] == "queued":
            raise JobDirError(
                f"{self.jobdir.path} ended before the turn of rescaling {migration['id']} came: it is forgotten, and "
                f"no row is lost; ask again when the job runs ({error})"
            )
        raise JobDirError(
            f"{self.jobdir.path} ended during the rescaling: no row is lost, and the next `anabranch run` goes on with "
            f"the layout of before or after ({error})"
        )

    def _weighed(self) -> Json:
        """The status with fresh sizes, or with what is known when that takes long."""
        try:
            client = ControlClient(self.jobdir)
            client.post("/weigh")
            status = client.get("/status")
            asked, deadline = status.get("steps", 0), time.monotonic() + _WEIGH_PATIENCE
            while time.monotonic() < deadline:
                if (status.get("sizes") or {"step": -1})["step"] >= asked - 1:
                    break
                time.sleep(_LOOK_EVERY / 2)
                status = client.get("/status")
        except (UserError, EngineError):
            # Sizes are an ornament: whoever may not command the job may still look at its layout.
            return self.status()
        return status


class _Telling:
    """Says what is waited for, when that has taken a while, again and again, and when it is something else than before."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self._told = time.monotonic()
        self._said = ""

    def say(self, reason: str) -> None:
        now = time.monotonic()
        if now - self._told > _TELL_EVERY or (self._said and reason != self._said):
            self.tell(reason)
            self._told, self._said = now, reason


def check_done(migration: Json) -> Json:
    """The account of a rescaling that is done.  Raises UserError when it was cancelled, EngineError when it failed."""
    if migration["state"] == "cancelled":
        raise UserError(f"rescaling {migration['id']} was cancelled; the layout is as before")
    return _check_whole(migration)


def check_cancelled(migration: Json) -> Json:
    """The account of a rescaling that was cancelled.  Raises UserError when it was done before."""
    if migration["state"] == "done":
        raise UserError(f"rescaling {migration['id']} was done before it could be cancelled")
    return _check_whole(migration)


def _check_whole(migration: Json) -> Json:
    if migration["state"] == "failed":
        raise EngineError(
            f"rescaling {migration['id']} failed: {migration['error']}; the layout is as before"
        )
    return migration


def _wish(
    workers: int | None,
    hosts: int | Sequence[str] | None,
    strategy: str,
    budget: int | None,
    remove_hosts: Sequence[str] | None,
) -> Json:
    """The body of a request.  Raises ConfigError for what no job could do."""
    for name, value in (("workers", workers), ("hosts", hosts), ("budget", budget)):
        if isinstance(value, int) and value < 1:
            raise ConfigError(f"{name}={value}: must be at least 1")
    for name, names in (("hosts", hosts), ("remove_hosts", remove_hosts)):
        if names is None or (name == "hosts" and isinstance(names, int)):
            continue
        if isinstance(names, str) or not isinstance(names, Sequence):
            raise ConfigError(f"{name}={names!r}: must be a list of names")
    if strategy not in STRATEGIES:
        raise ConfigError(f"strategy={strategy!r}: must be one of {', '.join(STRATEGIES)}")
    if workers is None and hosts is None and not remove_hosts:
        raise ConfigError("say what to change: the number of workers, the hosts, or hosts to remove")
    body = {
        "workers": workers,
        "hosts": hosts if hosts is None or isinstance(hosts, int) else list(hosts),
        "strategy": strategy,
        "budget": budget,
        "remove_hosts": list(remove_hosts or ()) or None,
    }
    return {name: value for name, value in body.items() if value is not None}


def _check_timeout(timeout: float | None) -> None:
    if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
        raise ConfigError(f"timeout={timeout!r}: must be a number of seconds")


def _summary(record: Json) -> Json:
    """One line of the history."""
    layout, why = record["layout"], record.get("why") or {}
    return {
        "version": layout["version"],
        "time": record["time"],
        "step": record["step"],
        "workers": len(layout["workers"]),
        "hosts": list(dict.fromkeys(layout["workers"])),
        "shards": len(layout["shards"]),
        "strategy": why.get("strategy"),
        "cancelled": bool(why.get("cancelled")),
        "bytes_moved": why.get("bytes"),
        "seconds": why.get("seconds"),
    }


def _described(jobdir: JobDir, status: Json, running: bool) -> Json:
    """The layout in force, as plain values."""
    placement = jobdir.placement(StepLog(jobdir.log).load().placement)
    if placement is None:
        raise JobDirError(f"{jobdir.path} has no layout yet: its first run has not begun with the first step")
    layout, migration = placement.layout, status.get("migration")
    sizes = status.get("sizes")
    if sizes is None or len(sizes["bytes"]) != len(layout.shards):
        sizes = None
    workers: list[Json] = [
        {"worker": number, "host": host, "shards": [], "bytes": None if sizes is None else 0.0}
        for number, host in enumerate(layout.workers)
    ]
    for copy in placement.copies():
        worker = workers[copy.worker]
        worker["shards"].append(copy.shard)
        if sizes is not None:
            worker["bytes"] += sizes["bytes"][copy.shard] * copy.share
    for worker in workers:
        worker["bytes"] = None if sizes is None else round(worker["bytes"])
    loads = [len(worker["shards"]) if sizes is None else worker["bytes"] for worker in workers]
    return {
        "version": layout.version,
        "shards": len(layout.shards),
        "bytes": None if sizes is None else sum(sizes["bytes"]),
        "sizes": sizes,
        "skew": round(max(loads) * len(loads) / sum(loads), 3) if sum(loads) else 1.0,
        "workers": workers,
        "hosts": [
            {
                "host": host,
                "workers": [worker["worker"] for worker in team],
                "shards": len({shard for worker in team for shard in worker["shards"]}),
                "bytes": None if sizes is None else sum(worker["bytes"] for worker in team),
            }
            for host in layout.hosts
            for team in [[worker for worker in workers if worker["host"] == host]]
        ],
        "cuts": _cuts(placement),
        "migration": migration
        if running and migration is not None and migration["state"] not in ENDED
        else None,
        "interrupted": not running and placement.intent is not None,
    }


def _cuts(placement: Placement) -> list[Json]:
    """The shards that are on their way."""
    found = []
    for shard, cut in sorted(placement.cuts.items()):
        low, end = hash_range(shard, len(placement.layout.shards))
        found.append(
            {
                "shard": shard,
                "from": placement.layout.shards[shard],
                "to": cut.arriving,
                # As text: readers of JSON round numbers beyond 53 bits.
                "cursor": f"{cut.cursor:016x}",
                "moved": round((cut.cursor - low) / (end - low), 4),
            }
        )
    return found
