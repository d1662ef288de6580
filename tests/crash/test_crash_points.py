"""Die at every crash point, go on, and compare every step with the oracle.

A *scenario* is a way to run the fixed flow; its last run is the one that is armed.  What comes before that is done once
for each scenario, and copied.  Each is first run with tracing, which tells the points that it reaches and how often.
A point is armed in the first scenario that reaches it, at a passage that CRASH_SEED chooses, and in others where
more is at stake there.  Points of one group follow one another in one job, because starting Spark is what takes the
time.  `make test` takes a sample of what the plain scenario reaches, `make test-all` every point; one that no scenario
reaches is a failure.
"""

from __future__ import annotations

import copy
import functools
import importlib
import os
import pkgutil
import shutil
import signal
import subprocess
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import obstore
import pytest
from crash_flow import FLOW
from obstore.store import S3Store

import anabranch
from anabranch import crash
from chaos.check import check
from chaos.feed import Feed
from chaos.job import Driver, command, environment, wait_until, write_flow
from chaos.records import Harvest

SEED = int(os.environ.get("CRASH_SEED", "1"))
SAMPLE = 2
PATIENCE = 300.0
ROWS = 60
TRIES = 3


@dataclass(frozen=True)
class Scenario:
    """The armed run, and what happened to the job before it."""

    armed: tuple[str, ...]
    before: tuple[str, ...] | None = None
    """A run before it."""
    dies: int = 0
    """At the so-many-th commit of the run before; 0 for an orderly stop."""
    damage: Callable[[Path], None] = lambda job: None
    """What is done to the job then."""
    store: bool = False
    """Whether the job directory is in an object store."""
    rescales: tuple[tuple[str, ...], ...] = ()
    """What is asked of every run as soon as it has started; one waits for the other."""


def lose_state(job: Path) -> None:
    shutil.rmtree(job / "state")


def lose_some(job: Path) -> None:
    """One host, and one of the shards of the other."""
    shutil.rmtree(job / "state" / "host-1")
    data = min((job / "state" / "host-0").glob("shard-*")) / "data.mdb"
    data.write_bytes(data.read_bytes()[:4096])


TWO = ("--workers", "2", "--hosts", "2")
SCENARIOS = {
    "plain": Scenario(TWO),
    # Records of steps are only removed behind a snapshot of the log, which an orderly stop makes.
    "again": Scenario(("--workers", "3", "--hosts", "2", "--retain-steps", "2"), (*TWO, "--steps", "5")),
    "lost": Scenario(TWO, TWO, dies=8, damage=lose_state),
    "half": Scenario(TWO, TWO, dies=8, damage=lose_some),
    "store": Scenario(TWO, store=True),
    # State that moves in pieces, whole shards beside and inside a step, and none: to one host.
    "live": Scenario(
        TWO,
        rescales=(
            ("--workers", "3", "--hosts", "3", "--strategy", "fluid", "--budget", "1k"),
            ("--workers", "4", "--hosts", "2", "--strategy", "hot"),
            ("--workers", "2", "--hosts", "1", "--strategy", "sudden"),
        ),
    ),
}
NOT_PLAIN = (
    "copy",
    "drop",
    "inputtrim",
    "lease",
    "logtrim",
    "move",
    "replay",
    "rescale",
    "restore.between",
    "rollback",
    "trim",
)
"""Points, or the first word of them, that the plain scenario reaches never or not each time."""

ALSO = {
    "lost": ["restore.filled", "restore.placed"],
    "half": [
        "epoch.after",
        "recovery.rebuilt",
        "recovery.opened",
        "layout.before",
        "layout.after",
        "shards.between",
        "manifest.after",
    ],
    "store": [
        "segment.after",
        "stage.after",
        "commit.before",
        "commit.after",
        "piece.after",
        "manifest.after",
    ],
    "live": [
        "plan.after",
        "shards.between",
        "shards.committed",
        "commit.before",
        "commit.after",
        "publish.before",
        "layout.before",
        "layout.after",
        "snapshot.shard",
        "manifest.before",
    ],
}
"""Scenarios in which points are armed beside the first that reaches them."""


def declared() -> list[str]:
    """Every point of the package."""
    for module in pkgutil.walk_packages(anabranch.__path__, "anabranch."):
        importlib.import_module(module.name)
    return list(crash.POINTS)


POINTS = declared()
GROUPS = {
    group: [point for point in POINTS if point.partition(".")[0] == group]
    for group in sorted({point.partition(".")[0] for point in POINTS})
}
"""Points in the order of their module, by the first word of their name."""


class Stage:
    """A scenario up to its armed run, in a directory of its own; it can be played any number of times."""

    def __init__(self, root: Path, scenario: Scenario, bucket: str = "") -> None:
        self.root = root
        self.scenario = scenario
        self.bucket = bucket
        self.job = root / "job"
        self.flow = write_flow(root, FLOW)
        Feed(root / "in", FLOW["inputs"], ROWS, Random(SEED)).give_all()
        self.harvest = Harvest(self.job)
        self.where = str(self.job)
        if scenario.before is not None:
            self._play_before(scenario, scenario.before)
        self.gathered = self.harvest
        self.saved = root / "saved"
        if self.job.exists():
            self.job.rename(self.saved)

    def _play_before(self, scenario: Scenario, arguments: tuple[str, ...]) -> None:
        if scenario.dies:
            driver = self.run(*arguments, armed=self.arm("commit.after", scenario.dies))
            assert driver.process.returncode == -signal.SIGKILL, driver.said()
        else:
            driver = self.run(*arguments)
            assert driver.process.returncode == 0, driver.said()
        scenario.damage(self.job)

    def set(self) -> None:
        """As before the armed run.  At the same place: the flow knows its inputs by their path."""
        shutil.rmtree(self.job, ignore_errors=True)
        self.harvest = copy.deepcopy(self.gathered)
        if self.saved.exists():
            subprocess.run(["cp", "-a", "--sparse=always", self.saved, self.job], check=True)
        if self.scenario.store:
            self.where = f"{self.bucket}/{uuid.uuid4().hex}"

    def arm(self, point: str, passage: int) -> str:
        """The value of the variable that makes the process die which is the so-many-th at the point."""
        left = self.root / "left"
        shutil.rmtree(left, ignore_errors=True)
        left.mkdir()
        for number in range(passage):
            (left / str(number)).touch()
        return f"{point}={left}"

    @property
    def fired(self) -> bool:
        return not any((self.root / "left").iterdir())

    def run(self, *arguments: str, armed: str = "") -> Driver:
        env = environment(self.root)
        if armed:
            env[crash.VARIABLE] = armed
        if self.scenario.store:
            env["ANABRANCH_STATE_DIR"] = str(self.root / "state")
        limits = ("--until-idle", "--shards", "4", "--max-step-rows", "15", "--step-ms", "50")
        name = f"run-{len(list(self.root.glob('run-*.err')))}"
        driver = Driver([str(self.flow), "--dir", self.where, *limits, *arguments], self.root / name, env)
        try:
            self._rescale(driver)
            assert wait_until(lambda: self._ended(driver), PATIENCE, 0.05), f"still running: {driver.said()}"
        finally:
            driver.clean_up()
        if self.scenario.store:
            self._download()
        self.harvest.gather()
        self.harvest.gather_outputs()
        return driver

    def _rescale(self, driver: Driver) -> None:
        """A driver that is dead before it is asked, or done, is a refusal."""
        if self.scenario.rescales:
            assert wait_until(lambda: self._ended(driver) or driver.started, PATIENCE, 0.05), driver.said()
        for wanted in self.scenario.rescales:
            asked = command("rescale", self.where, *wanted, "--no-wait")
            done = subprocess.run(
                asked, capture_output=True, text=True, check=False, env=environment(self.root)
            )
            assert done.returncode in (0, 1), done.stderr
            self._ended(driver)

    def _ended(self, driver: Driver) -> bool:
        # While it runs: a driver that is dead has no children to be found by.
        driver.below()
        return not driver.running

    def _download(self) -> None:
        """The records of steps and the outputs that they name; what failed attempts have left there is no output."""
        bucket, _, prefix = self.where.removeprefix("s3://").partition("/")
        store = S3Store(bucket, endpoint=os.environ["AWS_ENDPOINT_URL"], client_options={"allow_http": True})
        names = [meta["path"] for chunk in obstore.list(store, prefix) for meta in chunk]
        self._fetch(store, prefix, [name for name in names if name.startswith(f"{prefix}/log/")])
        self.harvest.gather()
        final = {
            f"{prefix}/outputs/{output}/{file['final']}"
            for commit in self.harvest.commits
            for output, one in commit["outputs"].items()
            for file in one["files"]
        }
        self._fetch(store, prefix, [name for name in names if name in final])

    def _fetch(self, store: S3Store, prefix: str, names: list[str]) -> None:
        for name in names:
            path = self.job / name.removeprefix(f"{prefix}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(obstore.get(store, name).bytes())

    def judge(self, point: str) -> None:
        verdict = check(self.job, self.root / "in", FLOW, self.harvest)
        assert verdict.problems == [], f"after {point}"
        assert verdict.steps > 8


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[str], Stage]:
    @functools.cache
    def staged(name: str) -> Stage:
        scenario = SCENARIOS[name]
        bucket = request.getfixturevalue("bucket") if scenario.store else ""
        return Stage(tmp_path_factory.mktemp(name), scenario, bucket)

    return staged


@pytest.fixture(scope="module")
def trace(stage: Callable[[str], Stage]) -> Callable[[str], dict[str, int]]:
    """How often the armed run of a scenario passes each point; a scenario that fails says so with its point."""

    @functools.cache
    def traced(name: str) -> dict[str, int]:
        job = stage(name)
        passed = job.root / "passed"
        passed.mkdir()
        job.set()
        driver = job.run(*job.scenario.armed, armed=f"{crash.TRACE}={passed}")
        assert driver.process.returncode == 0, f"scenario {name}: {driver.said()}"
        job.judge(name)
        return {path.name: path.stat().st_size for path in passed.iterdir()}

    return traced


def die_and_go_on(points: dict[str, int], job: Stage) -> None:
    """Die at one point after the other, each of which is passed so often in a trace; go on to the end; compare.

    The next death is that of the run which goes on after the last one.  A run that survives, because its driver does,
    or because the point did not come, gets to its end and is judged, and the next one begins anew.
    """
    died = False
    for point, passages in points.items():
        passage = Random(f"{SEED} {point}").randint(1, max(1, min(passages // (len(points) + 1), 5)))
        for _ in range(TRIES):
            if not died:
                job.set()
            armed = job.run(*job.scenario.armed, armed=job.arm(point, passage))
            died = armed.process.returncode == -signal.SIGKILL
            if not died:
                assert armed.process.returncode == 0, f"{point}: {armed.said()}"
                job.judge(point)
            if job.fired:
                break
            # How many checkpoints there are hangs on the clock, and what is done once may be done already.
            passage = 1
        assert job.fired, f"{point} was passed in a trace, and not once in {TRIES} runs"
    if died:
        again = job.run(*job.scenario.armed)
        assert again.process.returncode == 0, f"after {point}: {again.said()}"
        job.judge(point)


def test_a_sample(stage: Callable[[str], Stage]) -> None:
    known = [point for point in POINTS if not point.startswith(NOT_PLAIN)]
    die_and_go_on(dict.fromkeys(Random(SEED).sample(known, SAMPLE), 1), stage("plain"))


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_every_point(
    group: str, stage: Callable[[str], Stage], trace: Callable[[str], dict[str, int]]
) -> None:
    points = GROUPS[group]
    for name in SCENARIOS:
        passed = {point: trace(name)[point] for point in points if point in trace(name)}
        die_and_go_on(passed, stage(name))
        points = [point for point in points if point not in passed]
        if not points:
            return
    pytest.fail(f"no scenario reaches {', '.join(points)}; add one to SCENARIOS")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ALSO)
def test_where_more_is_at_stake(
    scenario: str, stage: Callable[[str], Stage], trace: Callable[[str], dict[str, int]]
) -> None:
    die_and_go_on({point: trace(scenario)[point] for point in ALSO[scenario]}, stage(scenario))


@pytest.mark.slow
def test_no_point_is_passed_undeclared(trace: Callable[[str], dict[str, int]]) -> None:
    passed = {name for scenario in SCENARIOS for name in trace(scenario)}
    assert passed <= set(POINTS)
