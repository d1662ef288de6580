"""Background work never takes a process from the steps."""

from __future__ import annotations

import os
from collections.abc import Iterator

from pyspark import SparkContext

from anabranch.model.ids import HostId
from anabranch.spark.dag import Dag

HOSTS = [HostId("here"), HostId("there")]


class Who:
    """Tells the process of a task and its priority."""

    def __call__(self, partition: int, blobs: Iterator[bytes]) -> Iterator[bytes]:
        for _ in blobs:
            pass
        yield f"{os.getpid()} {os.getpriority(os.PRIO_PROCESS, 0)}".encode()


def processes(dag: Dag) -> set[tuple[int, int]]:
    answers = dag.collect(dag.handles(HOSTS, False), Who())
    return {(int(pid), int(nice)) for pid, nice in (answer.split() for answer in answers)}


def test_background_work_has_processes_of_its_own_at_low_priority(spark: SparkContext) -> None:
    for_steps, beside = Dag(spark), Dag(spark, background=True)
    first = processes(for_steps)
    background = processes(beside)
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert {nice for _, nice in first} == {usual}
    assert {nice for _, nice in background} == {max(usual, 10)}
    assert {pid for pid, _ in background}.isdisjoint(pid for pid, _ in first | processes(for_steps))
