"""One round: a random flow, a job directory, harm done to it while it runs, and the judgement.

Where the harm falls is left to the clock, so a seed repeats the flow, its input and the order of actions, and not the
instruction at which a process died.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import psutil

from chaos.actions import ACTIONS, make_disk, remove_disk, status
from chaos.check import Verdict, check, check_table
from chaos.cluster import HOSTS, Cluster
from chaos.feed import Feed
from chaos.flows import random_flow
from chaos.job import Driver, Failed, command, environment, send, wait_until, write_flow
from chaos.records import Broken, Harvest, Inputs
from chaos.rescales import Rescales

_SHARDS = 8
_DISK = 160
_TICK = 0.03
DID = "did "
"""Before the name of an action, in counts."""
_STUCK = 180.0
"""Seconds without a step, while there is input, after which a job counts as stuck."""


class Round:
    """What a round has: its directory, its job, and the driver of the moment."""

    def __init__(
        self,
        root: Path,
        rng: Random,
        actions: list[str],
        harms: int,
        say: Callable[[str], None],
        run_args: list[str],
        cluster: bool,
    ) -> None:
        self.root = root
        self.rng = rng
        self.enabled = actions
        self.harms = harms
        self.say = say
        self.run_args = run_args
        self.counts: Counter[str] = Counter()
        self.began = time.monotonic()
        self.env = environment(root)
        self.damaged: Path | None = None
        self.backups: dict[Path, bytes] = {}
        self.was_full = False
        self._numbers = 0
        rows = 30 * harms + 60
        self.description = json.loads(json.dumps(random_flow(rng, rows)))
        self.flow = write_flow(root, self.description)
        self.feed = Feed(root / "in", self.description["inputs"], rows, rng)
        self.disk = root / "disk"
        self.small_disk: bool = "disk_full" in actions and rng.random() < 0.4 and make_disk(self.disk, _DISK)
        self.job = self.disk / "job"
        self.harvest = Harvest(self.job)
        self.rescales = Rescales(self.job)
        # Without a number of its own a job splits and merges shards as it is rescaled.
        self.shards = ["--shards", str(_SHARDS)] if "rescale" not in actions or rng.random() < 0.6 else []
        self.cluster: Cluster | None = (
            Cluster(root / "cluster", HOSTS[: rng.choice((2, 3))], self.env) if cluster else None
        )
        self.logical_hosts = rng.choice((1, 1, 2, 3))
        self._drivers: list[Driver] = []
        # Which action follows which has a source of its own: how often the others are asked hangs on the clock, and
        # on how many processes there are.
        self._schedule = Random(rng.random())
        # Each round likes other actions: what is rare in all rounds together comes many times, and close together, in some.
        self._liking = {name: ACTIONS[name].weight * rng.choice((0.5, 1, 1, 4)) for name in actions}
        self._last_kill = (-1, 0)
        self._asleep: list[psutil.Process] = []
        self._wake = (0, 0.0)

    # What actions use.

    @property
    def driver(self) -> Driver:
        return self._drivers[-1]

    def tell(self, what: str) -> None:
        self.say(f"  {time.monotonic() - self.began:6.1f} s, step {len(self.harvest)}: {what}")

    def count(self, kind: str, what: str) -> None:
        self.counts[kind] += 1
        self.tell(what)

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def arguments(self) -> list[str]:
        """How the next driver is called: any number of workers will do, and so does the layout that is there."""
        hosts = self.logical_hosts if self.cluster is None else len(self.cluster.hosts)
        size = ["--workers", str(self.rng.randint(hosts, max(hosts, 4)))]
        size += ["--hosts", str(hosts)] if self.cluster is None else []
        if self._drivers and "rescale" in self.enabled and self.rng.random() < 0.6:
            size = []
        where = [] if self.cluster is None else self.cluster.arguments()
        rows = str(self.rng.choice((20, 40, 80)))
        return [
            str(self.flow), "--dir", str(self.job), *self.shards, "--step-ms", "50", "--max-step-rows", rows,
            *size, *where, *self.run_args,
        ]  # fmt: skip

    def hosts(self) -> list[Path]:
        """The state directories of hosts, as far as they are there."""
        if self.cluster is None:
            return sorted(path for path in (self.job / "state").glob("*") if path.is_dir())
        return [path for host in self.cluster.hosts for path in self.cluster.state_dir(host).glob("*/*")]

    def haunt(self, asleep: list[psutil.Process]) -> None:
        """Wake these up when a step or two have been done without them.

        Not later than after a few seconds: one that sleeps in a write transaction holds its shard's lock, and nobody
        can pass while it lives.
        """
        self._asleep += asleep
        self.harvest.gather()
        self._wake = (len(self.harvest) + self.rng.randint(1, 2), time.monotonic() + self.rng.uniform(10, 20))

    def stop(self) -> None:
        """Stop the driver in an orderly way."""
        self.driver.process.terminate()
        status = self.driver.wait(_STUCK)
        if status != 0:
            raise Failed(f"an orderly stop ended with {status}: {self.driver.said()}")
        self.tell("stopped in an orderly way")

    # The round itself.

    def play(self) -> Verdict:
        """Run the job through all harm to its end; returns the judgement.

        Raises:
            Failed: it did not get there.
        """
        try:
            if self.cluster is not None:
                self.cluster.start()
            self._start()
            for left in range(self.harms, 0, -1):
                self._run_a_while(left)
                self._harm()
            self._finish()
            return self._judge()
        except Broken as error:
            raise Failed(str(error)) from error
        finally:
            for driver in self._drivers:
                driver.clean_up()
            if self.cluster is not None:
                self.cluster.stop()

    def close(self, keep: bool) -> None:
        """Give the small disk back; when asked to keep the round, what was on it is copied beside it."""
        if self.small_disk:
            remove_disk(self.disk, self.root / "kept" if keep else None)

    def _start(self) -> None:
        if self._drivers:
            self.counts["restarts"] += 1
            # What the dead one left may still be at work beside the next one, or be gone.
            if not self._asleep and self.rng.random() < 0.5:
                self.driver.clean_up()
        self.was_full = False
        arguments = self.arguments()
        self._drivers.append(Driver(arguments, self.root / f"run-{self.number()}", self.env))
        self.tell(f"started: {' '.join(arguments[3:])}")

    def _run_a_while(self, left: int) -> None:
        """Feed a share of what is left, and let some steps pass."""
        gifts = math.ceil(len(self.feed) / (left + 1))
        # Some drivers are struck while they start, and many while they rescale.
        moving = self.rescales.open
        early = self._schedule.random() < (0.6 if moving else 0.15)
        strike = time.monotonic() + self._schedule.uniform(0.2, 3 if moving else 6)
        goal = len(self.harvest) + self._schedule.randint(1, 3)
        patience = time.monotonic() + _STUCK
        while not (early and time.monotonic() > strike):
            self._look()
            if gifts and self.rng.random() < 0.25:
                self.feed.give()
                gifts -= 1
            reached = len(self.harvest) >= goal or (self.rng.random() < 0.1 and not self._behind())
            if not early and not gifts and self.driver.started and reached:
                break
            if time.monotonic() > patience:
                raise Failed(f"no step within {_STUCK:.0f} s; {self._where()}")
            time.sleep(_TICK)
        time.sleep(self._schedule.uniform(0, 0.3))

    def _look(self) -> None:
        """Gather what was committed; a driver that is down without our doing is a failure."""
        self.harvest.gather()
        self._count_ended()
        self._wake_in_time()
        if self.driver.running:
            return
        said = self.driver.said()
        if self.was_full and ("no space left" in said or "full" in said):
            self.tell(f"the driver said: {said[-200:]}")
            self._start()
            return
        if self.damaged is not None and str(self.damaged.parent) in said:
            # It was told what is wrong, and does what an operator would.
            self.count("repairs", f"refused: {said[-200:]}")
            shutil.rmtree(self.damaged.parent)
            self.damaged = None
            self._start()
            return
        if self.backups and "No version of the state can be opened" in said:
            self.count("repairs", f"refused: {said[-200:]}")
            self._restore()
            self._start()
            return
        raise Failed(f"the driver ended by itself with {self.driver.process.returncode}: {said}")

    def _count_ended(self) -> None:
        for ended, migration in self.rescales.look(self.driver.process.pid):
            self.count(ended, f"a migration is {ended}: {migration}")

    def _restore(self) -> None:
        """Bring back damaged files of checkpoints that are still there."""
        for path, data in self.backups.items():
            if path.exists():
                path.write_bytes(data)
        self.backups.clear()

    def _wake_in_time(self) -> None:
        if not self._asleep or (len(self.harvest) < self._wake[0] and time.monotonic() < self._wake[1]):
            return
        woken = sum(send(process, signal.SIGCONT) for process in reversed(self._asleep))
        self._asleep = []
        self.tell(f"{woken} ghosts woke up")

    def _harm(self) -> None:
        possible = [name for name in self.enabled if ACTIONS[name].possible(self)]
        if not possible:
            return
        name = self._schedule.choices(possible, [self._liking[name] for name in possible])[0]
        if name == "worker" and not self._may_kill_worker():
            return
        self.counts[f"{DID}{name}"] += 1
        if name in ("zombie", "restart", "rescale", "leave_host", "disk_full"):
            self._settle()
        ACTIONS[name].do(self)
        self.harvest.gather()
        if name == "disk_full":
            self._look()
        elif not self.driver.running:
            self._start()

    def _may_kill_worker(self) -> bool:
        """A step is tried five times; more than two kills in the same one would be the end by design."""
        step, kills = self._last_kill
        self._last_kill = (len(self.harvest), kills + 1 if step == len(self.harvest) else 1)
        return self._last_kill[1] <= 2

    def _settle(self) -> None:
        """Wait until the driver has started, or is down, and no ghost sleeps: one may hold a lock that the driver needs, to
        start, to answer or to stop, and nobody looks after ghosts while an action waits for that."""

        def settled() -> bool:
            self._wake_in_time()
            return not self._asleep and (self.driver.started or not self.driver.running)

        if not wait_until(settled, _STUCK):
            raise Failed(f"the driver has not started within {_STUCK:.0f} s; {self._where()}")
        self._look()

    def _behind(self) -> bool:
        """Whether there is input that no step has read."""
        self.harvest.gather()
        ends = Inputs(self.root / "in", self.description["inputs"]).ends()
        return any(
            end > self.harvest.positions.get(name, {}).get(partition, 0)
            for name, partitions in ends.items()
            for partition, end in partitions.items()
        )

    def _finish(self) -> None:
        self.feed.give_all()
        steps, since = len(self.harvest), time.monotonic()
        while self._behind():
            self._look()
            if len(self.harvest) > steps:
                steps, since = len(self.harvest), time.monotonic()
            if time.monotonic() - since > _STUCK:
                raise Failed(f"no step within {_STUCK:.0f} s; {self._where()}")
            time.sleep(0.1)
        self._settle()
        self.stop()
        self._count_ended()

    def _where(self) -> str:
        return f"{len(self.harvest)} steps, read {self.harvest.positions}; {self.driver.said()}"

    def _judge(self) -> Verdict:
        missed = self.counts["missed"]
        if missed > 3 and missed == self.counts[f"{DID}worker"]:
            raise Failed(f"no Python worker was found to be killed, {missed} times: chaos does not know them")
        verdict = check(self.job, self.root / "in", self.description, self.harvest)
        name = self.rng.choice(sorted(self.description["outputs"]))
        shown = subprocess.run(
            command("output", str(self.job), name, "--json"),
            capture_output=True,
            text=True,
            check=False,
            env=self.env,
        )
        if shown.returncode != 0:
            raise Failed(f"anabranch output {name}: {shown.stderr}")
        if "stopped" not in (said := status(self.job)):
            raise Failed(f"anabranch status after an orderly stop: {said}")
        table = check_table(shown.stdout, self.description, self.harvest, self.root / "in", name)
        verdict.problems += table.problems
        return verdict
