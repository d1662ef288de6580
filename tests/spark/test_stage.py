"""Stages without Spark: the right answer, the same answer at any scale, and again after any accident."""

from __future__ import annotations

import shutil
from pathlib import Path

import lmdb
import pytest
from inprocess import InProcess
from richflow import add_up, build, expected, write_input

from anabranch.errors import Fenced, IncompleteInput, ShardMismatch, WrongHost
from anabranch.model.ids import Attempt, WorkerId
from anabranch.spark.shards import identity
from anabranch.spark.stage import run_stage
from anabranch.state.store import _OPEN, ShardStore


def tables(job: InProcess, rows: int) -> dict[str, object]:
    steps = job.run(rows)
    return {name: add_up([step[name] for step in steps if name in step]) for name in job.plan.outputs}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("workers", "shards"), [(1, 4), (3, 8)])
def test_every_operator_against_plain_python(tmp_path: Path, seed: int, workers: int, shards: int) -> None:
    data = write_input(tmp_path / "in", seed)
    job = InProcess(build(tmp_path / "in"), tmp_path / "job", workers, shards)
    found = tables(job, rows=200)
    assert job.progress.next_step > 3
    for name, table in expected(data).items():
        assert found[name] == table, name


def test_the_same_bits_at_any_number_of_workers(tmp_path: Path) -> None:
    write_input(tmp_path / "in", seed=3)
    flow = build(tmp_path / "in")
    jobs = [InProcess(flow, tmp_path / f"job{w}", w, 8) for w in (1, 2, 5)]
    while jobs[0].planner.backlog(jobs[0].progress.positions):
        slices = jobs[0].cut(150)
        seen = []
        for job in jobs:
            commit = job.commit(slices, job.attempt(slices))
            seen.append({name: (out["rows"], out["hash"]) for name, out in commit["outputs"].items()})
        assert seen[0] == seen[1] == seen[2]


def test_a_step_that_failed_behind_any_stage_is_run_again(tmp_path: Path) -> None:
    data = write_input(tmp_path / "in", seed=4)
    job = InProcess(build(tmp_path / "in"), tmp_path / "job", 2, 4)
    steps = []
    while job.planner.backlog(job.progress.positions):
        slices = job.cut(150)
        for number in range(job.plan.depth + 1):
            job.attempt(slices, number, stop_after=number)
        reports = job.attempt(slices, job.plan.depth + 1)
        steps.append(job.changes(job.commit(slices, reports)))
    for name, table in expected(data).items():
        assert add_up([step[name] for step in steps if name in step]) == table, name


def test_a_stage_that_opens_no_shard_lets_go_of_those_that_were_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_input(tmp_path / "in", seed=4)
    job = InProcess(build(tmp_path / "in"), tmp_path / "job", 2, 4)
    assert not job.plan.regions(0)
    dropped = ShardStore.create(
        tmp_path / "dropped", identity(job.spec(Attempt(0), {}), next(job.placement.copies()))
    )
    shutil.rmtree(dropped.path)
    monkeypatch.setattr(_OPEN, "_look_at", 0.0)
    list(run_stage(job.plan, job.spec(Attempt(0), {}), 0, WorkerId(0), []))
    with pytest.raises(lmdb.Error, match="closed"):
        dropped.env.stat()


def test_an_old_attempt_harms_nobody(tmp_path: Path) -> None:
    data = write_input(tmp_path / "in", seed=5)
    job = InProcess(build(tmp_path / "in"), tmp_path / "job", 2, 4)
    steps = []
    while job.planner.backlog(job.progress.positions):
        slices = job.cut(200)
        # The zombie has run its first stages when the next attempt takes over, and goes on afterwards.
        old = job.spec(Attempt(0), slices)
        blobs = [list(run_stage(job.plan, old, 0, WorkerId(w), [])) for w in range(2)]
        arrived = [[blob for sent in blobs for receiver, blob in sent if receiver == w] for w in range(2)]
        list(run_stage(job.plan, old, 1, WorkerId(0), arrived[0]))
        reports = job.attempt(slices, 1)
        for worker in range(2):
            with pytest.raises(Fenced):
                list(run_stage(job.plan, old, 1, WorkerId(worker), arrived[worker]))
        steps.append(job.changes(job.commit(slices, reports)))
    for name, table in expected(data).items():
        assert add_up([step[name] for step in steps if name in step]) == table, name


@pytest.mark.parametrize("lose", ["blob", "all", "twice", "stale"])
def test_an_incomplete_input_aborts_before_anything_is_written(tmp_path: Path, lose: str) -> None:
    write_input(tmp_path / "in", seed=6)
    job = InProcess(build(tmp_path / "in"), tmp_path / "job", 2, 4)
    job.step(100)
    slices = job.cut(100)
    stale: list[bytes] = []

    def keep(stage: int, waiting: list[list[bytes]]) -> None:
        if stage == 1:
            stale.extend(waiting[1])

    def tamper(stage: int, waiting: list[list[bytes]]) -> None:
        if stage == 1:
            if lose == "blob":
                waiting[1].pop()
            elif lose == "all":
                waiting[1].clear()
            elif lose == "twice":
                waiting[1].append(waiting[1][0])
            else:
                waiting[1][:] = stale

    job.attempt(slices, 0, keep, stop_after=1)
    with pytest.raises(IncompleteInput, match="worker 1"):
        job.attempt(slices, 1, tamper)
    clean = InProcess(build(tmp_path / "in"), tmp_path / "clean", 2, 4)
    clean.step(100)
    wanted = clean.commit(slices, clean.attempt(slices))
    again = job.commit(slices, job.attempt(slices, 2))
    assert {n: o["hash"] for n, o in again["outputs"].items()} == {
        n: o["hash"] for n, o in wanted["outputs"].items()
    }


def test_a_task_on_a_wrong_host_refuses(tmp_path: Path) -> None:
    write_input(tmp_path / "in", seed=7)
    job = InProcess(build(tmp_path / "in"), tmp_path / "job", 2, 4, hosts=2)
    job.step(100)
    shutil.move(tmp_path / "job" / "state" / "host-1", tmp_path / "job" / "elsewhere")
    slices = job.cut(100)
    with pytest.raises(WrongHost, match="host-1"):
        job.attempt(slices)
    shutil.move(tmp_path / "job" / "elsewhere", tmp_path / "job" / "state" / "host-1")
    job.commit(slices, job.attempt(slices, 1))


def test_a_missing_shard_is_not_created_by_accident(tmp_path: Path) -> None:
    write_input(tmp_path / "in", seed=8)
    job = InProcess(build(tmp_path / "in"), tmp_path / "job", 2, 4)
    job.step(100)
    shard = next((tmp_path / "job" / "state" / "host-0").glob("shard-00001"))
    shutil.rmtree(shard)
    with pytest.raises(ShardMismatch, match="shard-00001"):
        job.attempt(job.cut(100))
    assert not shard.exists()
