"""A flow on a real standalone cluster is rescaled while hosts join, leave and die; each has a disk of its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import anabranch as ab
from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.jobhandle import ENDED
from chaos.cluster import HOSTS, Cluster
from cluster import check_totals, places_of_tasks, recording, run_command, standalone_cluster

pytestmark = pytest.mark.cluster

FIRST, SECOND, THIRD = HOSTS
PATIENCE = 240.0
"""Seconds; far more than anything here takes on a machine that has nothing else to do."""

KEYS = 4_000
FLOW = f"""
import anabranch as ab

flow = ab.Flow("hosts")
events = flow.input("events", ab.generator(rate=8_000, keys={KEYS}, partitions=3, seed=5))
totals = events.key_by("key").aggregate(n=ab.count(), total=ab.sum("value"))
totals.output("totals")
totals.select("n").key_by("n").count().output("sizes")
"""


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline, never = time.monotonic() + PATIENCE, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        never.wait(0.1)


class Running:
    """One run of the flow in a process of its own, and what it says."""

    def __init__(self, directory: Path, name: str, arguments: list[str]) -> None:
        self.directory = directory
        self.said = directory.parent / f"{name}.jsonl"
        self.complaints = directory.parent / f"{name}.err"
        with open(self.said, "wb") as out, open(self.complaints, "wb") as err:
            self.process = subprocess.Popen(
                [*run_command(directory, FLOW), *arguments], stdout=out, stderr=err
            )

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = self.said.read_text().splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if event["event"] == kind]

    def steps_run(self) -> int:
        if self.process.poll() is not None:
            raise AssertionError(f"the run has ended: {self.complaints.read_text()}")
        return len(self.events("step"))

    def more_steps(self, count: int = 5) -> None:
        """Wait for steps that begin from now on."""
        goal = self.steps_run() + 1 + count
        wait_until(lambda: self.steps_run() >= goal, f"{count} more steps")

    def job(self) -> ab.Job:
        """The job, once it is at work."""
        self.more_steps(3)
        return ab.Job(self.directory)

    def stop(self) -> None:
        ab.Job(self.directory).stop(timeout=PATIENCE)
        assert self.process.wait(PATIENCE) == 0, self.complaints.read_text()


@contextlib.contextmanager
def running(directory: Path, name: str, *arguments: str) -> Iterator[Running]:
    run = Running(directory, name, [*arguments, "--step-ms", "50", "--checkpoint-every", "15steps"])
    try:
        yield run
        run.stop()
    finally:
        run.process.kill()
        run.process.wait()


def check_tables(directory: Path) -> None:
    # The same rows, all there at once.
    check_totals(directory, "events", ab.generator(rows=100_000_000, keys=KEYS, partitions=3, seed=5))


def stores(cluster: Cluster, directory: Path, host: str) -> list[int]:
    """The shards that a host has on its disk, each as often as it is there: splits and merges count generations."""
    job = JobDir(directory).job()["id"]
    names = [path.name for path in cluster.state_dir(host).glob(f"{job}/*/shard-*")]
    return sorted(int(name.removeprefix("shard-").split(".")[0]) for name in names)


def check_disks(cluster: Cluster, job: ab.Job, directory: Path, hosts: tuple[str, ...]) -> None:
    """Every shard is on the disk of its host, and nowhere else."""
    layout = job.layout()
    expected: dict[str, set[int]] = {host: set() for host in HOSTS}
    for worker in layout["workers"]:
        expected[worker["host"]] |= set(worker["shards"])
    assert {host for host, shards in expected.items() if shards} == set(hosts)
    assert sum(map(len, expected.values())) == layout["shards"]
    assert {host: stores(cluster, directory, host) for host in HOSTS} == {
        host: sorted(shards) for host, shards in expected.items()
    }


def known(job: ab.Job) -> dict[str, dict[str, Any]]:
    return {one["host"]: one for one in job.hosts()}


def join(cluster: Cluster, job: ab.Job, host: str) -> None:
    """A host joins, and is seen but not used."""
    assert host not in known(job)
    cluster.join(host)
    wait_until(lambda: known(job).get(host, {}).get("alive"), f"an executor on {host}")
    one = known(job)[host]
    assert (one["used"], one["shards"], one["workers"]) == (False, 0, [])


@pytest.mark.parametrize("first", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["one", "two"])
def test_a_host_joins_others_are_emptied_and_shut_down_and_an_executor_dies(
    tmp_path: Path, first: int
) -> None:
    directory, events = tmp_path / "job", tmp_path / "events"
    hosts, workers = HOSTS[: first + 1], first + 1
    with standalone_cluster(tmp_path / "cluster", hosts[:first]) as cluster:
        arguments = ["--workers", str(first), "--shards", "12"]
        with running(directory, "run", *cluster.arguments(**recording(events)), *arguments) as run:
            job = run.job()
            assert [one["used"] for one in job.hosts()] == [True] * first
            join(cluster, job, hosts[first])
            run.more_steps()
            check_disks(cluster, job, directory, hosts[:first])
            done = job.rescale(workers, strategy="fluid", timeout=PATIENCE)
            assert (done["state"], done["strategy"], done["to"]["hosts"]) == ("done", "fluid", list(hosts))
            assert (done["shards_total"], done["shards_moved"]) == (12 // workers, 12 // workers)
            assert done["bytes_moved"] > 0
            assert known(job)[hosts[first]]["used"]
            check_disks(cluster, job, directory, hosts)
            run.more_steps()
            homes = {number: {host} for number, host in enumerate(hosts)}
            left = list(hosts)
            for host, strategy in zip(reversed(hosts[:first]), ("hot", "sudden"), strict=False):
                left.remove(host)
                done = job.rescale(remove_hosts=[host], strategy=strategy, timeout=PATIENCE)
                assert (done["state"], done["strategy"], done["to"]["hosts"]) == ("done", strategy, left)
                assert done["to"]["workers"] == workers
                for number, worker in enumerate(job.layout()["workers"]):
                    homes[number].add(worker["host"])
                check_disks(cluster, job, directory, tuple(left))
                one = known(job)[host]
                assert (one["alive"], one["used"], one["shards"]) == (True, False, 0)
                cluster.shut_down(host)
                wait_until(lambda host=host: host not in known(job), f"{host} to be forgotten")
                run.more_steps()
            assert run.events("fault") == []
            # With so few keys, one that changes may be too many for another copy.
            assert [note for note in run.events("note") if "by fluid" not in note["text"]] == []
            (executor,) = cluster.executors()
            executor.kill()
            wait_until(lambda: run.events("fault"), "the death to be noticed")
            run.more_steps()
            check_disks(cluster, job, directory, tuple(left))
        assert {event["workers"] for event in run.events("step")} >= {first, workers}
    places = {worker: set(hosts) for worker, hosts in places_of_tasks(events, only_steps=True).items()}
    assert homes == {worker: places[worker] for worker in range(workers)}
    check_tables(directory)


@pytest.mark.slow
def test_a_host_comes_again_with_what_it_had(tmp_path: Path) -> None:
    directory = tmp_path / "job"
    with standalone_cluster(tmp_path / "cluster", (FIRST, SECOND)) as cluster:
        with running(directory, "run", *cluster.arguments(), "--workers", "2", "--shards", "12") as run:
            job = run.job()
            join(cluster, job, THIRD)
            job.rescale(3, timeout=PATIENCE)
            run.more_steps()
            cluster.shut_down(THIRD)
            wait_until(lambda: job.status()["hosts"] == [FIRST, SECOND], "the host to be done without")
            run.more_steps()
            faults = len(run.events("fault"))
            assert stores(cluster, directory, THIRD)
            join(cluster, job, THIRD)
            done = job.rescale(3, hosts=HOSTS, strategy="fluid", timeout=PATIENCE)
            assert done["to"]["hosts"] == [*HOSTS]
            check_disks(cluster, job, directory, HOSTS)
            # A start anew leaves no state behind either, where a host is left.
            job.rescale(2, remove_hosts=[THIRD], strategy="stop-start", timeout=PATIENCE)
            run.more_steps()
            wait_until(lambda: not stores(cluster, directory, THIRD), "the host to be emptied")
            job.rescale(3, hosts=HOSTS, strategy="hot", timeout=PATIENCE)
            run.more_steps()
            check_disks(cluster, job, directory, HOSTS)
            assert len(run.events("fault")) == faults
        check_tables(directory)


@pytest.mark.slow
def test_a_host_dies_while_shards_split(tmp_path: Path) -> None:
    directory = tmp_path / "job"
    with standalone_cluster(tmp_path / "cluster", (FIRST, SECOND)) as cluster:
        with running(directory, "run", *cluster.arguments(), "--workers", "2") as run:
            job = run.job()
            before = job.layout()
            join(cluster, job, THIRD)
            job.rescale(9, strategy="fluid", wait=False)
            wait_until(lambda: job.status()["shards"] > before["shards"], "shards to split")
            cluster.lose(THIRD)
            wait_until(lambda: job.status()["migration"]["state"] in ENDED, "the rescaling to end")
            assert job.status()["migration"]["state"] == "failed"
            assert THIRD in job.status()["migration"]["error"]
            run.more_steps()
            # One of the others may have come after the start.
            hosts = tuple(one["host"] for one in before["hosts"])
            assert tuple(job.status()["hosts"]) == hosts
            check_disks(cluster, job, directory, hosts)
        check_tables(directory)


@pytest.mark.slow
@pytest.mark.parametrize("dies", [THIRD, FIRST], ids=["the one that gets", "one that gives"])
@pytest.mark.parametrize("strategy", ["hot", "sudden", "batched"])
def test_a_host_dies_whatever_the_strategy(tmp_path: Path, strategy: str, dies: str) -> None:
    directory = tmp_path / "job"
    left = tuple(host for host in HOSTS if host != dies)
    with standalone_cluster(tmp_path / "cluster", (FIRST, SECOND)) as cluster:
        with running(directory, "run", *cluster.arguments(), "--workers", "2", "--shards", "12") as run:
            job = run.job()
            join(cluster, job, THIRD)
            begun = job.rescale(3, strategy=strategy, wait=False)

            def shown() -> dict[str, Any]:
                return job.status().get("migration") or begun

            wait_until(lambda: shown()["state"] != "preparing", "the migration to begin")
            cluster.lose(dies)
            wait_until(lambda: shown()["state"] in ENDED, "the migration to end")
            # What takes a single step may have been done before.
            assert shown()["state"] == "failed" or strategy == "sudden", shown()
            wait_until(lambda: set(job.status()["hosts"]) <= set(left), "the host to be done without")
            run.more_steps()
            check_disks(cluster, job, directory, tuple(job.status()["hosts"]))
            assert (shown()["id"], dies in (shown()["error"] or dies)) == (begun["id"], True)
        check_tables(directory)


@pytest.mark.slow
@pytest.mark.parametrize("dies", [THIRD, FIRST], ids=["the one that gets", "one that gives"])
def test_a_host_dies_in_the_middle_of_a_migration(tmp_path: Path, dies: str) -> None:
    directory = tmp_path / "job"
    left = tuple(host for host in HOSTS if host != dies)
    with standalone_cluster(tmp_path / "cluster", (FIRST, SECOND)) as cluster:
        with running(directory, "run", *cluster.arguments(), "--workers", "2", "--shards", "12") as run:
            job = run.job()
            join(cluster, job, THIRD)
            job.checkpoint(timeout=PATIENCE)
            begun = job.rescale(3, strategy="fluid", budget=1024, wait=False)

            def is_halfway() -> bool:
                shown = job.status().get("migration") or begun
                assert shown["state"] not in ("done", "failed"), shown
                return shown["state"] == "moving" and shown["shards_moved"] > 0

            wait_until(is_halfway, "the migration to be halfway")
            cluster.lose(dies)
            wait_until(lambda: run.events("fault"), "the loss to be noticed")
            wait_until(lambda: job.status()["migration"]["state"] == "failed", "the rescaling to be given up")
            run.more_steps()
            shown = job.status()["migration"]
            assert (shown["id"], shown["state"]) == (begun["id"], "failed")
            assert dies in shown["error"]
            assert job.status()["hosts"] == sorted(left)
            check_disks(cluster, job, directory, left)
        check_tables(directory)

        # The disks of the cluster are not seen from here: all comes from the last checkpoint.
        with running(directory, "embedded", "--workers", "2", "--hosts", "1") as run:
            run.more_steps()
            assert ab.Job(directory).status()["hosts"] == ["host-0"]
        assert run.events("fault") == []
        check_tables(directory)

        other = "127.0.0.5"
        cluster.shut_down(left[0])
        cluster.join(other)
        with running(directory, "others", *cluster.arguments(), "--workers", "4") as run:
            job = run.job()
            assert job.status()["hosts"] == sorted((left[1], other))
            job.rescale(2, hosts=[other], timeout=PATIENCE)
            run.more_steps()
            assert stores(cluster, directory, left[1]) == []
            assert stores(cluster, directory, other) == list(range(12))
        assert run.events("fault") == []
    check_tables(directory)
