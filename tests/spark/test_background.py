"""Checkpoints of a running flow, and its recovery on other workers and hosts, without Spark."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from inprocess import InProcess
from richflow import build, write_input

from anabranch.errors import EngineError, Fenced, ShardMismatch
from anabranch.log.steplog import Progress
from anabranch.model.ids import Attempt, Epoch, HostId, Step, WorkerId
from anabranch.model.layout import rescale
from anabranch.spark.background import (
    restore_worker,
    roll_back_worker,
    shard_versions,
    snapshot_host,
)
from anabranch.spark.spec import StepSpec
from anabranch.state.manifest import Manifest, chain_pieces, plan_work
from anabranch.state.store import ShardStore
from anabranch.storage.local import LocalStorage

P = 6


class Checkpointed(InProcess):
    """A job that takes checkpoints and can go back to one."""

    def begin(self) -> None:
        self.storage = LocalStorage(self.root / "checkpoints")
        self.manifest: Manifest | None = None
        self.regions = sorted({p.region for p in self.plan.operators if p.region is not None})

    def now(self) -> StepSpec:
        """What the next step is told; a copy, since the job's own counts go on."""
        return copy.deepcopy(self.spec(Attempt(0), {}))

    def checkpoint(self, asked: StepSpec) -> Manifest:
        before = self.manifest
        work = plan_work(before, P)
        version = 1 if before is None else before.version + 1
        ask = partial(
            snapshot_host,
            storage=self.storage,
            version=version,
            since=None if before is None else before.step,
            partitions=P,
            work=work,
        )
        written = [piece for host in asked.layout.hosts for piece in ask(asked, host)]
        pieces = chain_pieces(before, work, written)
        self.manifest = Manifest(
            version, asked.step, {}, asked.layout.to_json(), P, self.plan.fingerprint, "0", 0.0, pieces
        )
        return self.manifest

    def each(self, ask: object, **arguments: object) -> list:
        spec = self.now()
        return [ask(spec, WorkerId(w), **arguments) for w in range(spec.workers)]


def hashes(job: InProcess, slices: dict) -> dict[str, tuple[int, int]]:
    commit = job.commit(slices, job.attempt(slices))
    return {name: (output["rows"], output["hash"]) for name, output in commit["outputs"].items()}


@pytest.fixture
def job(tmp_path: Path) -> Checkpointed:
    write_input(tmp_path / "in", seed=5)
    made = Checkpointed(build(tmp_path / "in"), tmp_path / "job", workers=3, shards=8, hosts=2)
    made.begin()
    return made


def test_a_flow_goes_on_from_a_checkpoint_on_other_workers_and_hosts(job: Checkpointed) -> None:
    slices, seen = [], []
    asked: list[tuple[StepSpec, Progress]] = []
    while job.planner.backlog(job.progress.positions):
        slices.append(job.cut(120))
        seen.append(hashes(job, slices[-1]))
        # A checkpoint is asked for at one step and written when the flow is a step ahead.
        if asked:
            spec, progress = asked.pop()
            job.checkpoint(spec)
        if len(seen) in (2, 3, 5):
            asked.append((job.now(), copy.deepcopy(job.progress)))
    assert job.manifest is not None
    assert job.manifest.version == 3
    assert {piece.version for piece in job.manifest.pieces} == {1, 2, 3}

    shutil.rmtree(job.root / "state")
    job.progress = progress
    job.epoch = Epoch(2)
    layout = rescale(
        job.layout, 4, [HostId("host-1"), HostId("other"), HostId("third")], _Same(len(job.layout.shards))
    )
    job.placement = replace(job.placement, layout=layout)
    assert {found.state for many in job.each(shard_versions, regions=job.regions) for found in many} == {
        "missing"
    }
    rows = job.each(restore_worker, storage=job.storage, manifest=job.manifest)
    assert sum(rows) > 0
    again = [hashes(job, one) for one in slices[job.manifest.step :]]
    assert again == seen[job.manifest.step :]


class _Same:
    """The number of shards stays."""

    def __init__(self, shards: int) -> None:
        self.shards = shards

    def shards_for(self, workers: int) -> int:
        return self.shards


def test_survivors_go_back_and_a_lost_host_is_restored(job: Checkpointed) -> None:
    first = job.cut(120)
    hashes(job, first)
    manifest = job.checkpoint(job.now())
    saved = copy.deepcopy(job.progress)
    slices = [job.cut(120)]
    seen = [hashes(job, slices[0])]
    slices.append(job.cut(120))
    seen.append(hashes(job, slices[1]))

    shutil.rmtree(job.root / "state" / "host-1")
    job.progress, job.epoch = saved, Epoch(2)
    spec = job.now()
    for worker, host in enumerate(job.layout.workers):
        found = shard_versions(spec, WorkerId(worker), job.regions)
        if host == "host-1":
            assert {one.state for one in found} == {"missing"}
            restore_worker(spec, WorkerId(worker), storage=job.storage, manifest=manifest)
        else:
            assert all(one.reaches(manifest.step) for one in found)
            roll_back_worker(spec, WorkerId(worker))
            roll_back_worker(spec, WorkerId(worker))
    for found in job.each(shard_versions, regions=job.regions):
        for one in found:
            expected = {r: s[one.shard] for r, s in spec.markers.items() if one.shard in s}
            assert (one.state, one.markers) == ("there", expected)
    assert [hashes(job, one) for one in slices] == seen
    # A task of the time before finds the fence.
    with pytest.raises(Fenced):
        roll_back_worker(replace(spec, epoch=Epoch(1)), WorkerId(0))


def test_what_cannot_be_done_is_said(job: Checkpointed) -> None:
    hashes(job, job.cut(120))
    manifest = job.checkpoint(job.now())
    with pytest.raises(EngineError, match="as of step 1, not 9"):
        restore_worker(replace(job.now(), step=Step(9)), WorkerId(0), storage=job.storage, manifest=manifest)
    ahead = {region: {shard: Step(7) for shard in steps} for region, steps in job.now().markers.items()}
    with pytest.raises(ShardMismatch, match="must go back to step 7"):
        roll_back_worker(replace(job.now(), markers=ahead, step=Step(8)), WorkerId(0))
    with pytest.raises(ShardMismatch, match="step log says"):
        job.checkpoint(replace(job.now(), markers={}))


def test_shards_that_are_taken_over_are_stamped(job: Checkpointed) -> None:
    for path in (job.root / "state").glob("*/shard-*"):
        ShardStore.open(path).stamp_clean("an earlier boot")
    assert {one.state for many in job.each(shard_versions, regions=()) for one in many} == {"there"}
    job.each(roll_back_worker)
    for path in (job.root / "state").glob("*/shard-*"):
        assert ShardStore.open(path).boot_id() != "an earlier boot"
