"""A run whose JVM dies while it waits for something else than a step says so and ends."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos.job import Driver, environment, send, wait_until

PATIENCE = 60.0

FLOW = """\
from pathlib import Path

import anabranch as ab

flow = ab.Flow("waiting")
lines = flow.input("lines", ab.files(Path(__file__).parent / "data", format="text"))
lines.key_by("value").count().output("counts")
"""


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    """A run that has read all there is."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "lines.txt").write_text("a\nb\na\n")
    (tmp_path / "flow.py").write_text(FLOW)
    arguments = [str(tmp_path / "flow.py"), "--dir", str(tmp_path / "job"), "--workers", "1", "--shards", "2"]
    driver = Driver(arguments, tmp_path / "run", environment(tmp_path))
    try:
        assert wait_until(_saying(driver, "idle"), PATIENCE, 0.05), driver.said()
        yield driver
    finally:
        driver.clean_up()


def _saying(driver: Driver, event: str) -> Callable[[], bool]:
    return lambda: any(one["event"] == event for one in driver.events())


def test_while_it_waits_for_input(driver: Driver) -> None:
    jvm = driver.jvm()
    assert jvm is not None
    assert send(jvm, signal.SIGKILL)
    assert driver.wait(PATIENCE) == 1
    assert "Spark's JVM has died" in driver.said()


def test_while_it_waits_for_the_last_checkpoint(driver: Driver) -> None:
    jvm = driver.jvm()
    assert jvm is not None
    assert send(jvm, signal.SIGSTOP)
    driver.process.terminate()
    assert wait_until(_saying(driver, "stopping"), PATIENCE, 0.05), driver.said()
    assert send(jvm, signal.SIGKILL)
    assert driver.wait(PATIENCE) == 1
    assert "Spark's JVM has died" in driver.said()
