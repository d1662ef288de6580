"""Copying beside the steps, without Spark: jobs that are run again, and tasks of jobs that were given up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from inprocess import InProcess
from richflow import build, write_input

from anabranch.errors import Starved
from anabranch.model.ids import Attempt, HostId, Incarnation, LayoutVersion, ShardId, WorkerId
from anabranch.model.layout import Layout
from anabranch.model.placement import Placement, moved, overlaps, resharded
from anabranch.spark.copying import HostCopier, Pair, jobs_of
from anabranch.spark.failure import TaskFailed
from anabranch.spark.shards import copy_path, identity, region_tables
from anabranch.spark.spec import StepSpec
from anabranch.state.asof import AsOf
from anabranch.state.store import ShardStore


class Lists:
    """In the place of Spark, of its context, and of a `Dag`: the shuffle is a list."""

    def __init__(self, starve: int = 0) -> None:
        self.steps = self
        self.starve = starve
        self.tasks: list[Callable[[], Any]] = []
        """The tasks that fill copies, of all jobs, to be run at any time later."""

    def run(self, spec: StepSpec, job: Callable[[Any], list[bytes]]) -> list[bytes]:
        while True:
            try:
                return job(self)
            except Starved:
                continue

    def handles(self, hosts: tuple[HostId, ...], placed: bool) -> int:
        return len(hosts)

    def exchanged(self, handles: int, task: Any, receivers: int) -> tuple[list[list[bytes]], None]:
        arrived: list[list[bytes]] = [[] for _ in range(receivers)]
        for partition in range(handles):
            for receiver, blob in task.task(partition, iter(())):
                arrived[receiver].append(blob)
        return arrived, None

    def collect(self, arrived: list[list[bytes]], task: Any) -> list[bytes]:
        def fill() -> Iterator[bytes]:
            for partition, blobs in enumerate(arrived):
                yield from task(partition, iter(blobs))

        self.tasks.append(lambda: list(fill()))
        answers = self.tasks[-1]()
        if self.starve:
            self.starve -= 1
            raise Starved("for the test")
        return answers


class Copying:
    """A job on two hosts, and a shard that is to be copied from one to the other."""

    def __init__(self, root: Path) -> None:
        write_input(root / "in", seed=1)
        self.job = InProcess(build(root / "in"), root / "job", 2, 4, hosts=2)
        self.job.run(500)
        self.before = self.job.placement
        regions = sorted({p.region for p in self.job.plan.operators if p.region is not None})
        self.tables = region_tables(self.job.plan, regions)
        self.lists = Lists()
        self.copier = HostCopier(self.lists, self.tables, False)  # type: ignore[arg-type]
        (source,) = (copy for copy in self.before.copies() if copy.shard == 0)
        target = WorkerId(1 - source.worker)
        after = moved(self.before, ShardId(0), target, source.low, source.end, back=False)
        self.pairs: list[Pair] = [p for p in overlaps(self.before, after) if p[0] != p[1]]
        self.spec = self.job.spec(Attempt(0), {})

    def content(self, copy: Any) -> list[tuple[bytes, list[bytes], list[bytes | None]]]:
        store = ShardStore.open(copy_path(self.spec, copy), identity(self.spec, copy))
        found: dict[bytes, tuple[list[bytes], list[bytes | None]]] = {}
        for rows in AsOf(store, self.spec.step, self.spec.epoch).scan([(copy.low, copy.end)]):
            addresses, values = found.setdefault(rows.table, ([], []))
            addresses += rows.addresses
            values += rows.values
        return sorted((table, *rows) for table, rows in found.items())


@pytest.fixture
def copying(tmp_path: Path) -> Copying:
    return Copying(tmp_path)


@pytest.mark.parametrize("starve", [0, 1])
def test_a_task_of_a_job_that_was_given_up_cannot_touch_the_copy_of_the_next(
    copying: Copying, starve: int
) -> None:
    """A job that starved is run again inside of `copy`; one that failed, by another call as of the same step."""
    (pair,) = copying.pairs
    source, target = pair[:2]
    copying.lists.starve = starve
    for _ in range(2 - starve):
        assert copying.copier.copy(copying.spec, copying.pairs, None) > 0
    assert copying.content(target) == copying.content(source) != []
    late, last = copying.lists.tasks
    for task in (late, last):
        with pytest.raises(TaskFailed, match="comes too late"):
            task()
    assert copying.content(target) == copying.content(source)


def test_a_copy_is_brought_further(copying: Copying) -> None:
    (pair,) = copying.pairs
    copying.copier.copy(copying.spec, copying.pairs, None)
    copying.copier.copy(copying.spec, copying.pairs, copying.spec.step)
    assert copying.content(pair[1]) == copying.content(pair[0])


@pytest.mark.parametrize(("before", "after"), [(32, 64), (32, 256), (256, 16), (1, 1024)])
@pytest.mark.parametrize("one_host", [True, False])
def test_many_copies_are_made_in_several_jobs(before: int, after: int, one_host: bool) -> None:
    hosts = (HostId("a"), HostId("b"), HostId("c"))
    owners = tuple(WorkerId(shard * 16 // before * 3 // 16) for shard in range(before))
    placement = Placement(Layout(LayoutVersion(0), owners, hosts), (Incarnation(0),) * before)
    pairs = list(overlaps(placement, resharded(placement, after)))
    jobs = jobs_of(pairs, one_host=one_host)
    assert sorted(pair for job in jobs for pair in job) == sorted(pairs)
    made = [{target for _, target, _, _ in job} for job in jobs]
    assert sum(map(len, made)) == len(set().union(*made)), "a copy is made in one job"
    used = {target.host for _, target, _, _ in pairs}
    if one_host:
        assert all(len({target.host for target in targets}) == 1 for targets in made)
        assert len(jobs) <= 8 * len(used)
    else:
        assert len(jobs) <= 8
        # All hosts have something to do in each.
        assert len(jobs) == 1 or all({target.host for target in targets} == used for targets in made)
    assert max(map(len, made)) <= max(16, -(-after // 8))


def test_who_waits_is_told_of_each_job(copying: Copying) -> None:
    after = resharded(copying.before, 64)
    told: list[int] = []
    copying.copier.copy(copying.spec, list(overlaps(copying.before, after)), None, told.append)
    assert len(told) > 2
    assert sum(told) == 64
