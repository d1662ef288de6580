"""A flow that runs is given other workers and hosts, again and again, and its output is what it would have been."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext

import anabranch as ab
from anabranch.errors import EngineError, UserError, WrongHost
from anabranch.log.steplog import Progress
from anabranch.model.ids import HostId
from anabranch.runtime.checkpointer import Checkpointer
from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.jobhandle import Job
from anabranch.runtime.observe import Silent, StepDone
from anabranch.runtime.outputs import changes, table
from anabranch.runtime.run import run
from anabranch.spark.dag import Dag

KEYS = 3_000


class Watch(Silent):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.notes: list[str] = []
        self.workers: list[int] = []

    def fault(self, step: int, attempt: int, error: Exception) -> None:
        self.faults.append(f"{type(error).__name__}: {error}")

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, done: StepDone, progress: Progress) -> None:
        self.workers.append(done.workers)


def make_flow() -> ab.Flow:
    source = ab.generator(rate=40_000, keys=KEYS, partitions=5, seed=11)
    flow = ab.Flow("live")
    totals = (
        flow.input("events", source)
        .key_by("key")
        .aggregate(n=ab.count(), total=ab.sum("value"), top=ab.max("value"))
    )
    totals.output("totals")
    totals.select("n").key_by("n").count().output("sizes")
    return flow


class Live:
    """Runs a flow on this thread while another thread commands it."""

    def __init__(self, where: Path, spark: SparkContext, **settings: Any) -> None:
        self.where = where
        self.watch = Watch()
        self.errors: list[BaseException] = []
        self.flow = make_flow()
        self.spark = spark
        self.settings = {"workers": 2, "hosts": 2, "shards": 12, "target_seconds": 0.05, **settings}

    def run(self, command: Callable[[Job], None]) -> Progress:
        """Run until `command`, on the other thread, is done."""

        def drive() -> None:
            try:
                command(self._running())
            except BaseException as error:  # noqa: BLE001  told below
                self.errors.append(error)
            # Again and again: a run that is just starting clears what it finds.
            Job(self.where).stop()

        thread = threading.Thread(target=drive)
        thread.start()
        progress = run(self.flow, self.where, listener=self.watch, context=self.spark, **self.settings)
        thread.join()
        if self.errors:
            raise self.errors[0]
        return progress

    def _running(self) -> Job:
        ready = threading.Event()
        while not ready.wait(0.02):
            jobdir = JobDir(self.where)
            if jobdir.exists() and jobdir.status().get("steps", 0) > 2 and jobdir.running():
                return Job(self.where)
        raise AssertionError

    def check(self, progress: Progress) -> None:
        """Compare the tables with plain Python over the rows that were read."""
        n: Counter[int] = Counter()
        total: Counter[int] = Counter()
        top: dict[int, int] = {}
        # The same rows, all there at once.
        source = ab.generator(rows=100_000_000, keys=KEYS, partitions=5, seed=11)
        for available in source.discover({}):
            end = progress.positions["events"].get(available.partition, 0)
            piece = source.cut(available, end, 1 << 60)
            for frame in source.read(piece, lambda *bad: None):
                for key, value in zip(frame["key"].to_list(), frame["value"].to_list(), strict=True):
                    n[key] += 1
                    total[key] += value
                    top[key] = max(top.get(key, 0), value)
        jobdir = JobDir(self.where)
        found = {r["key"]: (r["n"], r["total"], r["top"]) for r in table(jobdir, "totals").to_dicts()}
        assert found == {key: (n[key], total[key], top[key]) for key in n}
        sizes = {r["n"]: r["count"] for r in table(jobdir, "sizes").to_dicts()}
        assert sizes == Counter(n.values())
        assert progress.input_rows == sum(n.values())
        assert changes(jobdir, "totals").height > 0


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("sudden", marks=pytest.mark.slow),
        pytest.param("batched", marks=pytest.mark.slow),
        "fluid",
        pytest.param("hot", marks=pytest.mark.slow),
        "stop-start",
        pytest.param("auto", marks=pytest.mark.slow),
    ],
)
def test_out_and_in_and_to_one(tmp_path: Path, spark: SparkContext, strategy: str) -> None:
    live = Live(tmp_path / "job", spark, checkpoint_steps=7)

    def command(job: Job) -> None:
        for workers, hosts in [(4, 4), (3, 3), (1, 1), (2, 2)]:
            done = job.rescale(workers, hosts=hosts, strategy=strategy, timeout=120)
            assert done["state"] == "done"
            assert done["to"]["workers"] == workers
            assert len(done["to"]["hosts"]) == hosts
            assert done["strategy"] == (strategy if strategy != "auto" else "sudden")

    progress = live.run(command)
    assert live.watch.faults == []
    assert set(live.watch.workers) >= {1, 2, 3, 4}
    live.check(progress)
    whys = [record["why"].get("strategy") for record in JobDir(live.where).layouts()[1:]]
    assert len(whys) == 4
    # What shards left behind is gone.
    stores = sorted(str(path.parent.name) for path in (tmp_path / "job" / "state").glob("*/shard-*"))
    assert Counter(stores).total() == 12
    # And what is there can be opened by the next run, without a replay.
    again = Live(tmp_path / "job", spark, workers=None, hosts=None, shards=None)
    more = again.run(lambda job: None)
    assert again.watch.notes == []
    again.check(more)


def test_on_one_host_no_byte_is_copied(tmp_path: Path, spark: SparkContext) -> None:
    live = Live(tmp_path / "job", spark, hosts=1)

    def command(job: Job) -> None:
        for workers, strategy in [(5, "fluid"), (1, "hot"), (12, "sudden"), (2, "auto")]:
            done = job.rescale(workers, strategy=strategy, timeout=60)
            assert (done["state"], done["bytes_moved"], done["shards_total"]) == ("done", 0, 0)
            assert job.status()["workers"] == workers

    live.check(live.run(command))
    assert set(live.watch.workers) == {1, 2, 5, 12}
    assert live.watch.faults == []
    assert list(dict.fromkeys(live.watch.workers)) == [2, 5, 1, 12]


def test_turning_back(tmp_path: Path, spark: SparkContext) -> None:
    live = Live(tmp_path / "job", spark, checkpoint_steps=5)

    def command(job: Job) -> None:
        for strategy in ("fluid", "hot", "batched"):
            begun = job.rescale(
                4, hosts=4, strategy=strategy, budget=2048 if strategy == "fluid" else None, wait=False
            )
            assert begun["state"] != "queued"
            with pytest.raises(UserError, match="was cancelled"):
                raise (
                    UserError("was cancelled")
                    if job.cancel_rescale(timeout=60)["state"] == "cancelled"
                    else None
                )
        with pytest.raises(UserError, match="no rescaling is under way"):
            job.cancel_rescale()

    progress = live.run(command)
    assert live.watch.faults == []
    live.check(progress)
    assert JobDir(live.where).placement(progress.placement).layout.workers == ("host-0", "host-1")


def test_what_cannot_be_had_is_refused_and_what_comes_second_waits(
    tmp_path: Path, spark: SparkContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Live(tmp_path / "job", spark)

    def lost(*_: object) -> None:
        raise WrongHost("a task found no shards")

    def command(job: Job) -> None:
        with pytest.raises(UserError, match=r"--workers 13: the job has 12 shards"):
            job.rescale(13)
        with pytest.raises(UserError, match=r"each of the 3 hosts needs a worker"):
            job.rescale(2, hosts=3)
        with pytest.raises(UserError, match=r"--remove-host nowhere: there is no such host"):
            job.rescale(remove_hosts=["nowhere"])
        job.rescale(3, hosts=3, strategy="fluid", budget=4096, wait=False)
        waiting = job.rescale(4, hosts=4, wait=False)
        assert waiting["state"] == "queued"
        done = job.rescale(2, hosts=2, timeout=120)
        assert done["to"]["workers"] == 2
        done = job.rescale(remove_hosts=["host-0"], timeout=60)
        assert done["to"]["hosts"] == ["host-1"]
        assert [one["host"] for one in job.hosts()] == ["host-1"]
        with monkeypatch.context() as patch:
            patch.setattr(Checkpointer, "_write", lost)
            with pytest.raises(
                EngineError, match="its checkpoint failed: a task found no shards; the layout is"
            ):
                job.rescale(3, strategy="stop-start", timeout=60)
        # The flow goes on, and so do its checkpoints.
        job.checkpoint(timeout=60)

    live.check(live.run(command))
    assert live.watch.faults == []


def test_shards_split_and_merge_as_workers_come_and_go(tmp_path: Path, spark: SparkContext) -> None:
    live = Live(tmp_path / "job", spark, workers=1, hosts=1, shards=None, checkpoint_steps=6)

    def command(job: Job) -> None:
        assert job.status()["shards"] == 16
        shards = []
        for workers, hosts in [(2, 2), (5, 3), (1, 1)]:
            done = job.rescale(workers, hosts=hosts, timeout=120)
            assert (done["state"], done["to"]["workers"]) == ("done", workers)
            shards.append(job.status()["shards"])
        # Two workers make do with 8 shards each; five would have 3; and one would have too many.
        assert shards == [16, 128, 16]

    progress = live.run(command)
    assert live.watch.faults == []
    live.check(progress)
    assert len(list((tmp_path / "job" / "state").glob("*/shard-*"))) == 16
    again = Live(tmp_path / "job", spark, workers=6, hosts=2, shards=None)
    more = again.run(lambda job: None)
    assert again.watch.faults == []
    assert JobDir(live.where).status()["shards"] == 128
    again.check(more)


def test_a_process_that_dies_while_workers_are_prepared(
    tmp_path: Path, spark: SparkContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles, deaths = Dag.handles, []

    def dying(dag: Dag, workers: tuple[HostId, ...], placed: bool) -> Any:
        if len(workers) == 3 and not deaths:
            deaths.append(workers)
            spark.parallelize([0], 1).map(lambda _: os.kill(os.getpid(), signal.SIGKILL)).collect()
        return handles(dag, workers, placed)

    monkeypatch.setattr(Dag, "handles", dying)
    live = Live(tmp_path / "job", spark)
    progress = live.run(lambda job: _done(job.rescale(3, hosts=1, timeout=120)))
    assert len(deaths) == 1
    assert any("is prepared again" in note for note in live.watch.notes)
    live.check(progress)


def _done(migration: dict[str, Any]) -> None:
    assert migration["state"] == "done"
