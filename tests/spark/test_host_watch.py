"""The watch over the hosts of a step; without Spark."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from py4j.protocol import Py4JError

from anabranch.model.ids import HostId
from anabranch.spark.placement import HostWatch

A, B = HostId("a"), HostId("b")


class Context:
    """What a watch needs of Spark."""

    def __init__(self) -> None:
        self.alive = ["a", "b"]
        self.looks = 0
        self.broken = False
        self.looked = threading.Condition()
        self.group: str | None = None
        self.cancelled: list[str] = []
        self.reasons: set[str] = set()
        self._jsc = self

    def sc(self) -> Context:
        return self

    def setLocalProperty(self, name: str, value: str) -> None:
        assert name == "spark.jobGroup.id"
        self.group = value

    def cancelJobGroup(self, group: str, reason: str) -> None:
        self.cancelled.append(group)
        self.reasons.add(reason)

    def hosts(self, _: Any) -> list[str]:
        with self.looked:
            self.looks += 1
            self.looked.notify_all()
            if self.broken:
                raise Py4JError("lost")
            return list(self.alive)

    def wait_for_looks(self, count: int = 2) -> None:
        """When the last of them begins, those before it are over."""
        with self.looked:
            goal = self.looks + count
            assert self.looked.wait_for(lambda: self.looks >= goal, 60)


@pytest.fixture
def context() -> Context:
    return Context()


@pytest.fixture
def watch(context: Context) -> Iterator[HostWatch]:
    made = HostWatch(context, context.hosts, 0.001)  # type: ignore[arg-type]
    yield made
    made.close()


def test_a_step_whose_hosts_are_there_is_left_alone(context: Context, watch: HostWatch) -> None:
    with watch.over([A, B]):
        context.wait_for_looks()
    assert context.cancelled == []


def test_a_step_that_loses_a_host_is_cancelled(context: Context, watch: HostWatch) -> None:
    with watch.over([A, B]):
        context.wait_for_looks()
        first = context.group
        context.alive.remove("b")
        context.wait_for_looks(3)
    assert context.cancelled
    # The next one does not need it, and is not hit by what comes a moment late.
    with watch.over([A]):
        assert context.group != first
        context.wait_for_looks()
    assert set(context.cancelled) == {first}
    assert context.reasons == {"because there is no executor on b"}


def test_between_steps_nobody_looks(context: Context, watch: HostWatch) -> None:
    with watch.over([A]):
        context.wait_for_looks()
    context.alive.clear()
    watch.close()
    assert context.cancelled == []


def test_it_goes_on_when_spark_does_not_answer(context: Context, watch: HostWatch) -> None:
    context.broken = True
    with watch.over([A, B]):
        context.wait_for_looks()
        context.alive.remove("a")
        context.broken = False
        context.wait_for_looks(3)
    assert context.cancelled
