"""What is made ready beside the steps for a coming layout: handles, and the processes that are missing; without Spark."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
from py4j.protocol import Py4JError

from anabranch.errors import StepAborted
from anabranch.model.ids import HostId
from anabranch.runtime.carrying import Carrier
from anabranch.spark.job import StepRunner

A, B, C = HostId("a"), HostId("b"), HostId("c")
SPEC: Any = type("Spec", (), {"step": 3, "layout": type("Layout", (), {"hosts": (A, B)})})()


class Dag:
    """Remembers which processes were asked for."""

    def __init__(self) -> None:
        self.warmed: list[Counter[HostId]] = []
        self.kept: list[bool] = []
        self.lost = False
        self.started: list[list[int]] = []
        """For each time that processes are asked for, the numbers of those that are new; behind that, all are."""

    def handles(self, hosts: Any, placed: bool) -> Any:
        if self.lost:
            raise Py4JError("lost")
        return Handles(hosts)

    def collect(self, handles: Any, task: Any) -> list[bytes]:
        self.warmed.append(Counter(handles.hosts[number] for number in task.missing))
        self.kept.append(task.keep)
        new = self.started.pop(0) if self.started else task.missing
        return [b"%d" % number for number in new]


class Handles:
    def __init__(self, hosts: Any) -> None:
        self.hosts = hosts

    def unpersist(self, blocking: bool) -> None:
        pass


def runner(placed: bool) -> tuple[StepRunner, Dag]:
    made = object.__new__(StepRunner)
    made._dag = dag = Dag()  # type: ignore[assignment]
    made._plan, made._handles, made.placed = None, {}, placed  # type: ignore[assignment]
    made._processes, made._changing = Counter(), threading.Lock()
    return made, dag


def test_embedded_only_as_many_processes_are_started_as_there_are_more_workers() -> None:
    made, dag = runner(placed=False)
    made._make_handles((A, B))  # a step runs in it
    made.prepare(SPEC, (A, B, C, A))
    assert [sum(hosts.values()) for hosts in dag.warmed] == [2]
    made.prepare(SPEC, (A, B, C))
    made.prepare(SPEC, (B, C, C, A))
    assert len(dag.warmed) == 1, "all are there"


def test_on_a_cluster_each_host_gets_what_it_lacks() -> None:
    made, dag = runner(placed=True)
    made._make_handles((A, A, B))
    made.prepare(SPEC, (A, B, B, C))
    assert dag.warmed == [{B: 1, C: 1}]


def test_who_got_a_process_that_steps_use_is_sent_again() -> None:
    made, dag = runner(placed=True)
    made._make_handles((A,))
    dag.started = [[], [1], []]  # A's tasks get what is there
    made.prepare(SPEC, (A, A, B))
    assert dag.warmed == [{A: 1, B: 1}, {A: 1, B: 1}, {A: 1}, {A: 1}]
    assert not any(dag.kept)


def test_where_processes_are_always_idle_they_are_kept_in_the_end() -> None:
    made, dag = runner(placed=False)
    made._make_handles((A,))
    dag.started = [[] for _ in range(100)]
    made.prepare(SPEC, (A, B))
    assert dag.kept.count(True) == 1
    assert dag.kept[-1]


def test_after_a_failure_nobody_knows_which_processes_are_left() -> None:
    made, dag = runner(placed=False)
    made._make_handles((A, B))
    made.forget_handles()
    made.prepare(SPEC, (A, B))
    assert [sum(hosts.values()) for hosts in dag.warmed] == [2]


def test_handles_that_cannot_be_made_are_our_error() -> None:
    made, dag = runner(placed=True)
    dag.lost = True
    with pytest.raises(StepAborted, match="step 3"):
        made.prepare(SPEC, (A, B))


@pytest.mark.parametrize("error", [None, StepAborted("a process died")])
def test_processes_for_work_beside_the_steps_are_started_at_every_host(error: StepAborted | None) -> None:
    """Where that fails, they are started when there is such work."""
    asked: list[Any] = []

    class Asker:
        def ask(self, spec: Any, hosts: Any, ask: Any) -> list[None]:
            asked.append(hosts)
            if error is not None:
                raise error
            return [ask(spec, host) for host in hosts]

    carrier = Carrier(None, Asker(), None, None)  # type: ignore[arg-type]
    carrier.warm_up(SPEC)
    carrier._thread.shutdown()
    carrier.poll()
    assert asked == [(A, B)]
