"""A job directory in an object store: the lease, and a flow from end to end."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from pyspark import SparkContext

import anabranch as ab
from anabranch.errors import JobDirError
from anabranch.flow.plan import make_plan
from anabranch.log.steplog import StepLog
from anabranch.model.ids import Epoch, Step
from anabranch.runtime import lease
from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.outputs import changes, forget, table
from anabranch.runtime.run import run
from anabranch.storage import open_storage, record

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "the", "end"]


def words_flow(items: list[str], own: str | None = None) -> ab.Flow:
    flow = ab.Flow("words")
    words = flow.input("words", ab.iterable(items, schema={"word": str}, batch=4))
    words.key_by("word").count().output("counts", ab.parquet())
    words.output("copy", ab.jsonl(own))
    return flow


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ANABRANCH_STATE_DIR", raising=False)
    return tmp_path / "cache"


def counted(job: JobDir) -> dict[str, int]:
    return {row["word"]: row["count"] for row in table(job, "counts").to_dicts()}


def test_a_flow_runs_goes_on_and_can_be_read(spark: SparkContext, object_url: str, cache: Path) -> None:
    url, own = f"{object_url}/job", f"{object_url}/copy"
    first = run(
        words_flow(WORDS[:6], own), url, workers=2, shards=4, until_idle=True, max_step_rows=4, context=spark
    )
    job = JobDir(url)
    assert counted(job) == Counter(WORDS[:6])
    assert not job.running()
    last = run(words_flow(WORDS, own), url, workers=2, until_idle=True, max_step_rows=4, context=spark)
    assert last.next_step > first.next_step >= 2
    assert counted(job) == Counter(WORDS)
    assert sorted(table(job, "copy")["word"].to_list()) == sorted(set(WORDS))
    assert all(file.startswith("step-") for file in open_storage(own).list())
    assert StepLog(job.log).load() == last
    assert job.status()["state"] == "stopped"
    # State is on this machine, and nowhere else.
    assert job.state == cache / "anabranch" / job.job()["id"]
    assert list(job.state.glob("*/shard-*/data.mdb"))
    assert "state/" not in job.storage.list()

    # Outputs of steps that are not needed any more go with their records.
    log = StepLog(job.log)
    sinks = {name: node.sink for name, node in make_plan(words_flow(WORDS, own)).outputs.items() if node.sink}
    before = Step(first.next_step)
    forget(job, sinks, log, before)
    kept = [file for commit in log.commits() for file in commit["outputs"]["copy"]["files"]]
    assert set(open_storage(own).list()) == {file["final"].rpartition("/")[2] for file in kept}
    assert changes(job, "counts")["__step"].min() == before


def test_a_directory_that_was_copied_goes_on(spark: SparkContext, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    run(words_flow(WORDS[:6]), old, shards=2, until_idle=True, max_step_rows=4, context=spark)
    shutil.copytree(old, new)
    shutil.rmtree(old)
    for path in new.rglob("*"):
        if path.is_file() and path.suffix != ".mdb":
            assert str(old).encode() not in path.read_bytes(), path
    assert counted(JobDir(new)) == Counter(WORDS[:6])
    run(words_flow(WORDS), new, until_idle=True, context=spark)
    assert counted(JobDir(new)) == Counter(WORDS)


def test_a_second_coordinator_is_refused(object_url: str) -> None:
    with JobDir(object_url).locked() as epoch:
        assert epoch == 1
        assert JobDir(object_url).running()
        with (
            pytest.raises(JobDirError, match=rf"being run by {lease.owner()}; .*anabranch stop s3://"),
            JobDir(object_url).locked(),
        ):
            pass
    assert not JobDir(object_url).running()
    with JobDir(object_url).locked() as epoch:
        assert epoch == 2


def test_of_two_at_the_same_moment_one_gets_the_epoch(object_url: str) -> None:
    barrier = threading.Barrier(4)
    won: list[int] = []
    refused: list[str] = []

    def take() -> None:
        job = JobDir(object_url)
        barrier.wait()
        try:
            won.append(job.next_epoch())
        except JobDirError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == list(range(1, len(won) + 1))
    assert len(won) + len(refused) == 4
    assert all("is being run by process" in message for message in refused)


HOLDER = """
import sys, time
from anabranch.runtime.jobdir import JobDir
with JobDir(sys.argv[1]).locked():
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_dead_ones_lease_is_taken_over(object_url: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, object_url], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(JobDirError, match=f"process {holder.pid} on"), JobDir(object_url).locked():
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    # On the same machine one sees that the process is gone.
    assert not JobDir(object_url).running()
    with JobDir(object_url).locked() as epoch:
        assert epoch == 2


def test_a_lease_of_another_machine_is_taken_over_when_it_is_stale(
    object_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobDir(object_url)
    lease._Lease(job.storage, Epoch(1)).beat()
    elsewhere = {
        **record.read(job.storage, "lock"),
        "machine": "other",
        "process": 1,
        "owner": "process 1 on other",
    }
    record.replace(job.storage, "lock", elsewhere)
    with pytest.raises(JobDirError, match="being run by process 1 on other"), job.locked():
        pass
    record.replace(job.storage, "lock", {**elsewhere, "beat": elsewhere["beat"] - 2 * lease.STALE})
    with job.locked():
        assert record.read(job.storage, "lock")["owner"] == lease.owner()


def test_a_lease_is_renewed_until_another_has_it(object_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW", 0.01)
    job = JobDir(object_url)
    renewing = threading.Event()
    with job.locked():
        begun = record.read(job.storage, "lock")["beat"]
        while record.read(job.storage, "lock")["beat"] == begun:
            renewing.wait(0.01)
        later = {**record.read(job.storage, "lock"), "epoch": 2, "owner": "the next"}
        holder = next(thread for thread in threading.enumerate() if thread.name == "anabranch-lease")
        while holder.is_alive():
            # A renewal that was under way may have replaced it.
            record.replace(job.storage, "lock", later)
            holder.join(0.1)
    # Whoever has lost the lease leaves it alone.
    assert record.read(job.storage, "lock") == later


def test_nothing_but_an_empty_place_becomes_a_job(object_url: str) -> None:
    plan = make_plan(words_flow([]))
    foreign = JobDir(f"{object_url}/foreign")
    foreign.storage.create("thesis.tex", b"precious")
    with pytest.raises(JobDirError, match=r"not a job directory.*'thesis.tex'"), foreign.locked():
        pass
    assert foreign.storage.list() == ["thesis.tex"]
    with pytest.raises(JobDirError, match=r"is not a job directory"):
        foreign.job()
    job = JobDir(f"{object_url}/job")
    with pytest.raises(JobDirError, match=r"s3://.*/job does not exist"):
        job.job()
    # A coordinator that died at once.
    with job.locked():
        StepLog(job.log).create()
    with job.locked():
        job.create(plan)
    with job.locked():
        job.check_same_flow(plan)
    job.storage.delete("job.json")
    record.create(job.storage, "layouts/000000000.json", {})
    with pytest.raises(JobDirError, match=r"no job.json, and has 'layouts'"), job.locked():
        pass


def test_wishes(object_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.runtime.jobdir._LOOK_EVERY", 0.0)
    job = JobDir(object_url)
    assert not job.asked("stop")
    JobDir(object_url).ask_to_stop()
    JobDir(object_url).ask("checkpoint")
    assert job.stop_asked()
    assert job.asked("checkpoint")
    job.clear("checkpoint")
    assert job.stop_asked()
    assert not job.asked("checkpoint")
    job.clear_wishes()
    assert not job.stop_asked()


def test_state_goes_where_the_machine_keeps_it(object_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = JobDir(object_url)
    with job.locked():
        job.create(make_plan(words_flow([])))
    monkeypatch.setenv("ANABRANCH_STATE_DIR", "/fast")
    assert job.state == Path("/fast") / job.job()["id"]
    assert job.spark_log == job.state / "spark.log"
