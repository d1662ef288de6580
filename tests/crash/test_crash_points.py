"""Die at every crash point, go on, and compare every step with the oracle.

A *scenario* is a way to run the fixed flow; its last run is the one that is armed.  Each is first run once with
tracing, which tells the points that it reaches and how often.  A point is armed in the first scenario that reaches it,
at a passage that CRASH_SEED chooses.  `make test` takes a sample of what the plain scenario reaches, `make test-all`
every point; one that no scenario reaches is a failure.
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

import anabranch
from anabranch import crash
from chaos.check import check
from chaos.feed import Feed
from chaos.job import Driver, environment, wait_until, write_flow
from chaos.records import Harvest

SEED = int(os.environ.get("CRASH_SEED", "1"))
SAMPLE = 2
PATIENCE = 180.0
ROWS = 60

FLOW: dict[str, Any] = {
    "name": "crash",
    "inputs": {
        "orders": {"kind": "jsonl", "weights": True},
        "items": {"kind": "iterable", "weights": False},
        "people": {"kind": "parquet", "weights": False},
        "lines": {"kind": "text", "weights": False, "bad": True},
    },
    "nodes": [
        {"op": "input", "input": "orders", "of": []},
        {"op": "input", "input": "items", "of": []},
        {"op": "input", "input": "people", "of": []},
        {"op": "input", "input": "lines", "of": []},
        {
            "op": "join", "of": [0, 2], "keys": ["a", "s"], "how": "full",
            "take": {"n": "left", "x": "right", "d": "left"},
        },
        {
            "op": "aggregate", "of": [4], "keys": ["s"], "made": False,
            "slots": {"a": ["count", None], "n": ["max", "n"], "x": ["sum", "x"], "d": ["min", "d"]},
        },
        {"op": "stateful_map", "of": [1], "keys": ["a"], "weights": False},
        {"op": "union", "of": [3, 1]},
        {"op": "distinct", "of": [7], "keys": ["a"]},
        {"op": "stateful_batches", "of": [3], "keys": ["s"], "weights": False},
        {"op": "reduce", "of": [0], "keys": ["a"], "weights": True},
    ],
    "outputs": {"joined": 4, "totals": 5, "gaps": 6, "distinct": 8, "sums": 9, "folded": 10},
}  # fmt: skip
"""Inputs of every replayable kind and one that cannot replay, two regions in a row, and dead letters."""


@dataclass(frozen=True)
class Scenario:
    """Runs before the armed one, with what is done to the job after them, and how the armed one is called."""

    before: tuple[str, ...] | None
    damage: Callable[[Path], None]
    armed: tuple[str, ...]


def nothing(job: Path) -> None:
    pass


def lose_state(job: Path) -> None:
    shutil.rmtree(job / "state")


def lose_half(job: Path) -> None:
    shutil.rmtree(job / "state" / "host-1")


SCENARIOS = {
    "plain": Scenario(None, nothing, ("--workers", "2", "--hosts", "2")),
    "again": Scenario(
        ("--workers", "2", "--hosts", "2", "--steps", "4"), nothing, ("--workers", "3", "--hosts", "2")
    ),
    "lost": Scenario(
        ("--workers", "2", "--hosts", "2", "--steps", "4"), lose_state, ("--workers", "2", "--hosts", "2")
    ),
    "half": Scenario(
        ("--workers", "2", "--hosts", "2", "--steps", "4"), lose_half, ("--workers", "2", "--hosts", "2")
    ),
}


def declared() -> list[str]:
    """Every point of the package."""
    for module in pkgutil.walk_packages(anabranch.__path__, "anabranch."):
        importlib.import_module(module.name)
    return sorted(crash.POINTS)


POINTS = declared()


class CrashJob:
    """The fixed flow in a directory of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.job = root / "job"
        self.flow = write_flow(root, FLOW)
        Feed(root / "in", FLOW["inputs"], ROWS, Random(SEED)).give_all()
        self.harvest = Harvest(self.job)

    def run(self, *arguments: str, armed: str = "") -> Driver:
        env = environment(self.root, **({crash.VARIABLE: armed} if armed else {}))
        limits = ("--until-idle", "--shards", "4", "--max-step-rows", "25", "--step-ms", "50")
        name = f"run-{len(list(self.root.glob('run-*.err')))}"
        driver = Driver([str(self.flow), "--dir", str(self.job), *limits, *arguments], self.root / name, env)
        try:
            assert wait_until(lambda: self._ended(driver), PATIENCE, 0.05), f"still running: {driver.said()}"
        finally:
            driver.clean_up()
        self.harvest.gather()
        return driver

    def _ended(self, driver: Driver) -> bool:
        # While it runs: it may remove old records, and a driver that is dead has no children to be found by.
        self.harvest.gather()
        driver.below()
        return not driver.running

    def prepare(self, scenario: Scenario) -> None:
        if scenario.before is not None:
            driver = self.run(*scenario.before)
            assert driver.process.returncode == 0, driver.said()
            scenario.damage(self.job)

    def judge(self) -> None:
        verdict = check(self.job, self.root / "in", FLOW, self.harvest)
        assert verdict.problems == []
        assert verdict.steps > 4


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, int]]:
    """How often the armed run of a scenario passes each point; a scenario that fails says so with its point."""

    @functools.cache
    def traced(name: str) -> dict[str, int]:
        job = CrashJob(tmp_path_factory.mktemp(f"trace-{name}"))
        passed = job.root / "passed"
        passed.mkdir()
        scenario = SCENARIOS[name]
        job.prepare(scenario)
        driver = job.run(*scenario.armed, armed=f"{crash.TRACE}={passed}")
        assert driver.process.returncode == 0, f"scenario {name}: {driver.said()}"
        job.judge()
        return {path.name: path.stat().st_size for path in passed.iterdir()}

    return traced


def die_and_go_on(point: str, scenario: Scenario, passages: int, root: Path) -> None:
    """Run until the process at the point dies; run again; compare."""
    root.mkdir(parents=True, exist_ok=True)
    job = CrashJob(root)
    job.prepare(scenario)
    left = root / "left"
    left.mkdir()
    # Later passages are rarer than a trace says where the number of attempts or steps differs.
    for number in range(Random(f"{SEED} {point}").randint(1, min(passages, 5))):
        (left / str(number)).touch()
    armed = job.run(*scenario.armed, armed=f"{point}={left}")
    assert not any(left.iterdir()), f"{point} was passed too seldom to fire: {armed.said()}"
    # A driver that died leaves the rest to the next one; the death of a worker it must survive itself.
    if armed.process.returncode != 0:
        assert armed.process.returncode == -signal.SIGKILL, armed.said()
        again = job.run(*scenario.armed)
        assert again.process.returncode == 0, again.said()
    job.judge()


def test_a_sample(trace: Callable[[str], dict[str, int]], tmp_path: Path) -> None:
    passed = trace("plain")
    known = sorted(name for name in passed if name in POINTS)
    for point in Random(SEED).sample(known, SAMPLE):
        die_and_go_on(point, SCENARIOS["plain"], passed[point], tmp_path / point)


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_every_point(point: str, trace: Callable[[str], dict[str, int]], tmp_path: Path) -> None:
    for name, scenario in SCENARIOS.items():
        if passages := trace(name).get(point, 0):
            die_and_go_on(point, scenario, passages, tmp_path / "job")
            return
    pytest.fail(f"no scenario reaches {point} ({crash.POINTS[point]}); add one to SCENARIOS")


@pytest.mark.slow
def test_no_point_is_passed_undeclared(trace: Callable[[str], dict[str, int]]) -> None:
    passed = {name for scenario in SCENARIOS for name in trace(scenario)}
    assert passed <= set(POINTS)
