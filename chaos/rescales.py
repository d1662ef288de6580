"""Rescaling a job while harm is done to it: random targets and strategies, asked for as a user does from another terminal.

What became of them is read from the records of layouts, and, where a migration leaves none, from `status.json`, which
keeps the last one only.  A driver that dies takes those that waited with it, so fewer end than were accepted.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaos.job import Failed, command, wait_until
from chaos.records import Broken, read_record

if TYPE_CHECKING:
    from chaos.round import Round

STRATEGIES = ("sudden", "batched", "fluid", "hot", "stop-start", "auto")
_ENDS = {"done": "finished", "cancelled": "cancelled", "failed": "given_up"}
"""The last states of a migration, and what each is counted as."""
_MOST_WORKERS = 6
_MOST_HOSTS = 3
_PATIENCE = 60.0
_LONG = 180.0


class Rescales:
    """The migrations of one job, as far as it tells of them."""

    def __init__(self, job: Path) -> None:
        self._job = job
        self._layouts: set[str] = set()
        self._ended: set[tuple[int, int]] = set()
        self._told: set[tuple[int, float]] = set()
        self.open = False
        """Whether one was accepted and was not yet seen to end."""

    def look(self, run: int) -> list[tuple[str, str]]:
        """What ended since the last look: as what each is counted, and what to tell of it.

        `run` is the driver's process: each numbers its migrations anew, and finds what its predecessor said.
        """
        ended: list[tuple[str, str]] = []
        for path in sorted((self._job / "layouts").glob("*.json")):
            if path.name not in self._layouts:
                self._layouts.add(path.name)
                why = read_record(path).get("why") or {}
                if why.get("kind") == "rescale" and self._new(run, why["number"]):
                    ended.append(("cancelled" if why["cancelled"] else "finished", f"{why}"))
        said = told(self._job)
        migration = said.get("migration") if said.get("process") == run else None
        if migration and migration["state"] in _ENDS and not self._known(migration):
            self._check(migration)
            if self._new(run, migration["id"]):
                ended.append((_ENDS[migration["state"]], f"{migration}"))
        self.open = self.open and not ended
        return ended

    def _known(self, migration: dict[str, Any]) -> bool:
        key = (migration["id"], migration["began"])
        known = key in self._told
        self._told.add(key)
        return known

    def _check(self, migration: dict[str, Any]) -> None:
        """What is said to be done has a layout that says so."""
        if migration["state"] != "done" or migration["from"] == migration["to"]:
            return
        path = self._job / "layouts" / f"{migration['layout']:09d}.json"
        if not path.exists():
            raise Failed(f"a migration is said to be done, and there is no {path}: {migration}")
        found = len(read_record(path)["layout"]["workers"])
        if found != migration["to"]["workers"]:
            raise Failed(f"a migration is said to be done, and {path} has {found} workers: {migration}")

    def _new(self, run: int, number: int) -> bool:
        known = (run, number) in self._ended
        self._ended.add((run, number))
        return not known


def told(job: Path) -> dict[str, Any]:
    """What the coordinator last said of itself; empty when it never did."""
    try:
        return read_record(job / "status.json")
    except (FileNotFoundError, Broken):
        return {}


def rescale(round_: Round) -> None:
    """To any number of workers, on any hosts, in any way.  Small budgets cut even these small shards."""
    rng = round_.rng
    workers = rng.randint(1, _MOST_WORKERS)
    strategy = rng.choice(STRATEGIES)
    wanted = ["--workers", str(workers), "--strategy", strategy]
    if round_.cluster is None:
        wanted += ["--hosts", str(rng.randint(1, min(workers, _MOST_HOSTS)))]
    elif rng.random() < 0.7:
        hosts = round_.cluster.hosts
        wanted += ["--hosts", ",".join(rng.sample(hosts, rng.randint(1, min(workers, len(hosts)))))]
    if strategy == "fluid" and rng.random() < 0.7:
        wanted += ["--budget", rng.choice(("1k", "4k", "32k"))]
    if _ask(round_, *wanted):
        round_.rescales.open = True
        round_.count("rescales", f"rescale {' '.join(wanted)}")
        if rng.random() < 0.25:
            # By the next action, a second or two later, such small state has moved.
            cancel(round_)


def leave_host(round_: Round) -> None:
    """Empty a host and shut it down: no step may fail by that."""
    cluster = round_.cluster
    assert cluster is not None
    host = round_.rng.choice(cluster.hosts)
    if not _ask(round_, "--remove-host", host, "--timeout", "120", wait=True):
        return
    round_.count("rescales", f"host {host} was emptied")
    if host in (used := told(round_.job).get("hosts", [])):
        raise Failed(f"host {host} was removed, and the job still uses {used}")
    round_.harvest.gather()
    shut, step = time.time(), len(round_.harvest)
    cluster.lose(host)
    while len(round_.harvest) < step + 2 and round_.feed.give() is not None:
        wait_until(round_.harvest.gather, 5)
    faults = [fault for fault in told(round_.job).get("faults", []) if fault["time"] > shut]
    round_.tell(f"host {host} was shut down")
    if faults and round_.driver.running:
        raise Failed(f"host {host} was emptied and shut down, and then: {faults}")


def cancel(round_: Round) -> None:
    if _ask(round_, "--cancel"):
        round_.tell("asked for the rescaling to be cancelled")


def _ask(round_: Round, *arguments: str, wait: bool = False) -> bool:
    """Whether it was accepted.  A refusal is one line that says why, and nothing else.

    Raises:
        Failed: it was neither.
    """
    # With --json it says nothing of the way there.
    how = ["--wait", "--json"] if wait else ["--no-wait"]
    asked = command("rescale", str(round_.job), *arguments, *how)
    try:
        done = subprocess.run(
            asked,
            capture_output=True,
            text=True,
            check=False,
            env=round_.env,
            timeout=_LONG if wait else _PATIENCE,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"rescale {' '.join(arguments)} took too long") from None
    said = done.stderr.strip()
    if done.returncode == 0:
        return True
    if done.returncode != 1 or not said.startswith("anabranch: ") or "\n" in said:
        raise Failed(f"rescale {' '.join(arguments)} ended with {done.returncode}: {said}")
    round_.tell(f"rescale {' '.join(arguments)} was refused: {said}")
    return False
