"""Background work never takes a process from the steps, and gets done on a machine that has no time for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from inprocess import InProcess
from pyspark import SparkContext

import anabranch as ab
from anabranch.errors import Starved
from anabranch.model.ids import Attempt, HostId
from anabranch.spark.asking import Background, HostAsker
from anabranch.spark.dag import Dag
from anabranch.spark.pools import Pool, Watch, begin, write_files
from anabranch.spark.spec import StepSpec

HOSTS = [HostId("here"), HostId("there")]


def priority() -> str:
    return f"{os.sched_getscheduler(0)} {os.getpriority(os.PRIO_PROCESS, 0)}"


_NICE = max(10, os.getpriority(os.PRIO_PROCESS, 0))
IDLE, NICE = f"{os.SCHED_IDLE} {_NICE}", f"{os.SCHED_OTHER} {_NICE}"


class Who:
    """Tells the process of a task and its priority."""

    def __call__(self, partition: int, blobs: Iterator[bytes]) -> Iterator[bytes]:
        for _ in blobs:
            pass
        begin()
        yield f"{os.getpid()} {priority()}".encode()


def processes(dag: Dag) -> dict[str, str]:
    answers = dag.collect(dag.handles(HOSTS, False), Who())
    return dict(answer.decode().split(maxsplit=1) for answer in answers)


def test_each_pool_has_processes_of_its_own(spark: SparkContext) -> None:
    dags = [Dag(spark, pool=pool) for pool in Pool]
    found = [processes(dag) for dag in [*dags, dags[0]]]
    assert [set(one.values()) for one in found] == [{priority()}, {IDLE}, {NICE}, {priority()}]
    steps, left_over, nice = found[0].keys() | found[3].keys(), found[1].keys(), found[2].keys()
    assert not steps & left_over
    assert not steps & nice
    assert not left_over & nice


def test_files_are_not_written_in_left_over_time_and_what_starves_is_done_again(
    spark: SparkContext, tmp_path: Path
) -> None:
    flow = ab.Flow("counts")
    flow.input("rows", ab.generator(rows=1, columns={"key": ab.index()})).key_by("key").count().output("out")
    spec = InProcess(flow, tmp_path, hosts=2).spec(Attempt(0), {})

    def starving(spec: StepSpec, host: HostId) -> str:
        if priority() == IDLE:
            raise Starved("as a machine without a moment to spare would have it")
        return f"{host} {priority()}"

    def writing(spec: StepSpec, host: HostId) -> str:
        return f"{priority()} {write_files(priority)}"

    asker = HostAsker(Background(spark), placed=False)
    assert asker.ask(spec, HOSTS, writing) == [f"{IDLE} {NICE}"] * 2
    assert asker.ask(spec, HOSTS, starving) == [f"here {NICE}", f"there {NICE}"]
    # The machine is not tried again for a while.
    assert asker.ask(spec, HOSTS, lambda spec, host: priority()) == [NICE, NICE]
    assert asker.ask(spec, HOSTS, lambda spec, host: priority(), alone=True) == [priority(), priority()]
    asker.close()


@pytest.mark.parametrize(
    ("ran", "waited", "starves"), [(0.1, 1.9, False), (0.2, 2.1, True), (0.3, 2.1, False), (50, 400, False)]
)
def test_starving_is_to_wait_long_and_run_little(ran: float, waited: float, starves: bool) -> None:
    told = iter([(7.0, 3.0), (7.0 + ran, 3.0 + waited)])
    watch = Watch(lambda: next(told))
    if starves:
        with pytest.raises(Starved, match="waited"):
            watch()
    else:
        watch()


def test_nobody_starves_where_the_system_does_not_tell_or_at_normal_priority() -> None:
    Watch(lambda: None)()
    Watch()()
