"""Die at every point of a migration, go on, and compare: rows, layouts, and what is on the hosts' disks.

A test takes one point through all *changes* that reach it, one after the other in one job, while rows come in.  Where a
Python worker dies, the run recovers by itself and the change must be done.  Where the coordinator dies, the next `run`,
which is told nothing of workers or hosts, must go on with what had begun, and so must the one behind that if it dies over
it.  Either way the job ends in the layout of before or in the one that was wished for, as its records say, with exactly
the shards of that layout on disk.  `make test` takes one point and one change, chosen by CRASH_SEED, `make test-all` all.

The directory of an armed point is filled while a run lasts, so that one run can be killed at one point again and again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from crash_flow import FLOW

import anabranch as ab
from anabranch import crash
from anabranch.errors import AnabranchError
from chaos.check import check
from chaos.feed import Feed
from chaos.job import Driver, environment, wait_until, write_flow
from chaos.records import Harvest, Inputs, read_record
from chaos.rescales import told

SEED = int(os.environ.get("CRASH_SEED", "1"))
PATIENCE = 300.0
ROWS = 1000
ROWS_EVERY = 3
"""Steps from one gift of rows to the next: a migration has to do with rows and without."""
OVER = ("done", "cancelled", "failed")


@dataclass(frozen=True)
class Change:
    """A rescaling, as `ab.Job` is asked for it."""

    workers: int
    hosts: tuple[str, ...]
    strategy: str
    budget: int | None = None
    cancelled: bool = False
    """Whether it is to turn back as soon as it has begun."""
    copies: bool = False
    """Whether state is copied beside the steps: by `hot`, and where shards split or merge."""


H0, H1, H2 = HOSTS = ("host-0", "host-1", "host-2")
CHANGES = {
    "sudden": Change(2, (H0, H1), "sudden"),
    "batched": Change(2, (H1, H2), "batched"),
    "fluid": Change(2, (H0, H2), "fluid", budget=1024),
    "turned": Change(2, (H1,), "fluid", budget=1024, cancelled=True),
    "hot": Change(2, (H0, H1), "hot", copies=True),
    "split": Change(5, HOSTS, "batched", copies=True),
    # It turns back before anything has merged.
    "merged-turned": Change(1, (H0,), "batched", cancelled=True),
    "merged": Change(1, (H2,), "sudden", copies=True),
    "split-turned": Change(5, HOSTS, "sudden", cancelled=True, copies=True),
}
"""From one worker on the first host on, in this order: each moves shards between hosts.
Two workers make do with the 16 shards of one; five have 128."""

MOVES = ("move.collected", "move.sent", "move.acquired", "drop.renamed")
ONCE = ("rescale.committed", "rescale.finished", "layout.before", "layout.torn", "layout.after")
STEPS = ("plan.after", "commit.before", "commit.after")
REACHED: dict[str, list[str]] = {
    **{point: [*CHANGES] for point in (*MOVES, *ONCE, *STEPS)},
    "copy.filled": [name for name, change in CHANGES.items() if change.copies],
}
"""The points that are armed, and the changes that reach them."""
ON_THE_WAY_BACK = {
    "plan.after": "fluid",
    "commit.before": "fluid",
    "rescale.committed": "fluid",
    "move.collected": "fluid",
    "move.acquired": "batched",
    "drop.renamed": "fluid",
    "rescale.finished": "batched",
    "layout.before": "fluid",
}
"""The points that are armed when a change has turned back, and how it moves."""
MOVED_BEFORE_TURNING = 3
"""Shards that have left for good by then, so that the way back takes some steps."""


class Play:
    """A job that rows come to, one run after the other, armed at one point."""

    def __init__(self, root: Path, point: str, recovering: str | None = None) -> None:
        self.root = root
        self.point = point
        self.recovering = recovering
        """Where somebody dies in the run that goes on behind a coordinator that died."""
        self.job = root / "job"
        self.left = root / "left"
        self.left.mkdir()
        self.flow = write_flow(root, FLOW)
        self.feed = Feed(root / "in", FLOW["inputs"], ROWS, Random(SEED))
        self.inputs = Inputs(root / "in", FLOW["inputs"])
        self.harvest = Harvest(self.job)
        self.fed = -ROWS_EVERY
        """The number of steps when the last rows came."""
        self.feeding = True
        self.runs = 0
        self.driver: Driver

    def run(self, *arguments: str, point: str | None = None) -> None:
        """Start a run, and wait until it can be asked for something, or has died."""
        limits = ("--max-step-rows", "15", "--step-ms", "50")
        self.driver = Driver(
            [str(self.flow), "--dir", str(self.job), *limits, *arguments],
            self.root / f"run-{self.runs}",
            environment(self.root) | {crash.VARIABLE: f"{point or self.point}={self.left}"},
        )
        self.runs += 1
        self.fed = len(self.harvest) - ROWS_EVERY
        self.wait("its start", lambda: self.driver.started and len(self.harvest))

    @property
    def ended(self) -> bool:
        # While it runs: a driver that is dead has no children to be found by.
        self.driver.below()
        return not self.driver.running

    def wait(self, what: str, condition: Callable[[], object]) -> None:
        """Until it is true, or the run has ended.  Rows come in meanwhile."""

        def look() -> bool:
            self.harvest.gather()
            due = len(self.harvest) >= self.fed + ROWS_EVERY
            if self.feeding and (due or told(self.job).get("state") == "idle"):
                self.feed.give()
                self.fed = len(self.harvest)
            return bool(condition()) or self.ended

        assert wait_until(look, PATIENCE, 0.05), f"still waiting for {what}: {self.describe()}"
        self.harvest.gather()

    def describe(self) -> str:
        status = told(self.job)
        facts = {key: status.get(key) for key in ("state", "migration", "notes", "faults", "error")}
        return f"{facts} {self.driver.said()}"

    # What the records and the disk say.

    def placement(self) -> dict[str, Any]:
        """The newest one, in the records of layouts and of committed steps."""
        written = [read_record(path) for path in (self.job / "layouts").glob("*.json")]
        moved = [plan["placement"] for plan in self.harvest.plans if "placement" in plan]
        return max([*written, *moved], key=lambda one: int(one["layout"]["version"]))

    @property
    def settled(self) -> bool:
        placement = self.placement()
        return placement["intent"] is None and not placement["cuts"]

    @property
    def state(self) -> str | None:
        """Of the last rescaling, if the coordinator has come to hear of one."""
        return (told(self.job).get("migration") or {}).get("state")

    def stores_wanted(self) -> set[str]:
        placement = self.placement()
        layout, generation = placement["layout"], placement["generation"]
        suffix = f".{generation}" if generation else ""
        return {
            f"{layout['workers'][owner]}/shard-{shard:05d}{suffix}"
            for shard, owner in enumerate(layout["shards"])
        }

    def stores_found(self) -> set[str]:
        # Beside them a host may have locks, which are files.
        found = (path for path in (self.job / "state").glob("*/*") if path.is_dir())
        return {f"{path.parent.name}/{path.name}" for path in found}

    # What is done to it.

    def change(self, name: str) -> None:
        """One change, with a death on its way."""
        change, before, steps = CHANGES[name], self.placement(), len(self.harvest)
        self.arm(Random(f"{SEED} {self.point} {name}").randint(1, self.passages(change)))
        self.ask(change)
        self.wait("its end", lambda: self.settled and self.state in OVER)
        if self.point in STEPS:
            # A change may take fewer steps than it was to survive.
            self.wait("the coordinator's death", lambda: False)
        if self.ended:
            self.go_on()
        else:
            assert self.state == ("cancelled" if change.cancelled else "done"), self.describe()
        assert self.fired, f"{self.point} was not passed so often: {self.describe()}"
        self.judge(change, before, self.harvest.plans[steps:])

    def turn_back(self, strategy: str) -> None:
        """A change that is well on its way turns back, and somebody dies when the records say so."""
        before = self.placement()
        job = ab.Job(self.job)
        job.rescale(
            2, hosts=[H1], strategy=strategy, budget=1024 if strategy == "fluid" else None, wait=False
        )
        self.wait("it to be well on its way", lambda: self.shards_moved >= MOVED_BEFORE_TURNING)
        job.cancel_rescale(wait=False)
        self.wait("a step that turns back", lambda: (self.placement()["intent"] or {}).get("cancelled"))
        assert not self.settled, self.describe()
        self.arm(1)
        self.wait("its end", lambda: self.settled and self.state in OVER)
        if self.ended:
            self.go_on()
        else:
            assert self.state == "cancelled", self.describe()
        assert self.fired, f"{self.point} was not passed on the way back: {self.describe()}"
        assert self.placement()["layout"]["workers"] == before["layout"]["workers"], self.describe()
        self.check_stores()

    @property
    def shards_moved(self) -> int:
        return int((told(self.job).get("migration") or {}).get("shards_moved", 0))

    def passages(self, change: Change) -> int:
        """How often the point is passed at least."""
        if self.point in ONCE:
            return 1
        # Each stage with state sends once for all shards; and one that turns back soon has moved little.
        return 2 if change.cancelled or self.point == "move.sent" else 6

    def arm(self, passages: int) -> None:
        # All at once: steps go on, and whoever passed while the first file is the only one would take it for the last.
        filled = self.root / "armed"
        filled.mkdir()
        for passage in range(passages):
            (filled / str(passage)).touch()
        filled.rename(self.left)

    @property
    def fired(self) -> bool:
        return not any(self.left.iterdir())

    def ask(self, change: Change) -> None:
        """Ask for it, and, once it has begun, to turn back; a coordinator that is dead by then need not answer."""
        job = ab.Job(self.job)
        try:
            job.rescale(
                change.workers,
                hosts=change.hosts,
                strategy=change.strategy,
                budget=change.budget,
                wait=False,
            )
            if change.cancelled:
                self.wait("its beginning", lambda: not self.settled)
                job.cancel_rescale(wait=False)
        except AnabranchError:
            if not wait_until(lambda: self.ended, 10.0):
                raise

    def go_on(self) -> None:
        """The coordinator is dead; another one goes on with what it finds."""
        self.bury()
        if self.recovering is not None:
            self.arm(1)
            self.run(point=self.recovering)
            self.wait("a death in recovering", lambda: self.fired)
            self.wait("the end of what was found", lambda: self.settled)
            self.bury()
        self.run()
        self.wait("the end of what was found", lambda: self.settled)
        assert not self.ended, self.describe()

    def bury(self) -> None:
        """End what is left of a run whose coordinator was killed, or kill it."""
        self.driver.clean_up()
        assert self.driver.process.returncode == -signal.SIGKILL, self.describe()

    def judge(self, change: Change, before: dict[str, Any], plans: Collection[dict[str, Any]]) -> None:
        """The layout is the one that the last committed intent leads to, the old one if there is none."""
        found = sorted(self.placement()["layout"]["workers"])
        placements = [plan["placement"] for plan in plans if "placement" in plan]
        intents = [one["intent"] for one in placements if one["intent"] is not None]
        if intents and not intents[-1]["cancelled"]:
            assert (len(found), {*found}) == (change.workers, {*change.hosts}), self.describe()
        else:
            assert found == sorted(before["layout"]["workers"]), self.describe()
        self.check_stores()

    def check_stores(self) -> None:
        assert wait_until(lambda: self.stores_found() == self.stores_wanted(), 30.0), (
            f"{sorted(self.stores_found() ^ self.stores_wanted())}: {self.describe()}"
        )

    def finish(self) -> None:
        """Read all there is, stop, and compare with the oracle."""
        self.feeding = False
        ends = _begun(self.inputs.ends())
        self.wait("all rows to be read", lambda: _begun(self.harvest.positions) == ends)
        ab.Job(self.job).stop()
        self.wait("its end", lambda: False)
        assert self.driver.process.returncode == 0, self.driver.said()
        verdict = check(self.job, self.root / "in", FLOW, self.harvest)
        assert verdict.problems == [], self.describe()
        assert self.stores_found() == self.stores_wanted()


def _begun(positions: Mapping[str, Mapping[str, int]]) -> dict[tuple[str, str], int]:
    """Without what nothing has come of: some inputs may have no rows when a test ends."""
    return {(name, part): at for name, one in positions.items() for part, at in one.items() if at}


def play(root: Path, point: str, changes: Collection[str], recovering: str | None = None) -> None:
    job = Play(root, point, recovering)
    try:
        job.run("--workers", "1", "--hosts", "1")
        for name in changes:
            job.change(name)
        job.finish()
    finally:
        job.driver.clean_up()


def test_a_sample_of_migrations(tmp_path: Path) -> None:
    rng = Random(SEED)
    point = rng.choice(sorted(REACHED))
    play(tmp_path, point, [rng.choice(REACHED[point])])


@pytest.mark.slow
@pytest.mark.parametrize("point", REACHED)
def test_every_change_at_every_point(point: str, tmp_path: Path) -> None:
    play(tmp_path, point, REACHED[point])


@pytest.mark.slow
@pytest.mark.parametrize("point", ["epoch.after", "rollback.shard", "recovery.opened", "drop.renamed"])
def test_dying_again_in_recovering(point: str, tmp_path: Path) -> None:
    play(tmp_path, "rescale.committed", ["sudden", "fluid", "turned", "split"], recovering=point)


@pytest.mark.slow
@pytest.mark.parametrize("point", ON_THE_WAY_BACK)
def test_dying_on_the_way_back(point: str, tmp_path: Path) -> None:
    job = Play(tmp_path, point)
    try:
        job.run("--workers", "2", "--hosts", "1")
        job.turn_back(ON_THE_WAY_BACK[point])
        job.finish()
    finally:
        job.driver.clean_up()
