"""State that is lost, damaged or doubtful is brought back exactly, or the flow says why not."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext

import anabranch as ab
from anabranch.errors import InputChangedError, JobDirError, ReplayError
from anabranch.log.steplog import Progress
from anabranch.model.ids import Step
from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.observe import Silent, StepDone
from anabranch.runtime.outputs import changes, table
from anabranch.runtime.recovery import fitting_markers
from anabranch.runtime.run import run
from anabranch.state.manifest import Manifest
from anabranch.state.versions import Versions
from anabranch.storage import record

STEPS = 6


class Watch(Silent):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.replayed: list[int] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def replaying(self, step: Step, first: Step, end: Step) -> None:
        self.replayed.append(step)


class Job:
    """Six files, a step each; the first four steps are in checkpoints, the last two only in the log and in shards."""

    def __init__(self, root: Path, spark: SparkContext, salted: bool = False) -> None:
        self.root = root
        self.data = root / "data"
        self.data.mkdir()
        self.where = root / "job"
        self.spark = spark
        self.salted = salted
        self.words: Counter[str] = Counter()
        self.files = 0
        self.add(2)
        self.run(hosts=2, workers=2, shards=4)
        self.add(2)
        self.run()
        self.add(2)
        self.run(checkpoint_seconds=None)

    def add(self, files: int) -> None:
        for _ in range(files):
            words = [f"w{n % (7 + self.files)}" for n in range(50)]
            (self.data / f"{self.files:03d}.txt").write_text("\n".join(words) + "\n")
            self.words.update(words)
            self.files += 1

    def flow(self) -> ab.Flow:
        flow = ab.Flow("recovery")
        lines = flow.input("lines", ab.files(self.data, format="text"))
        if self.salted:
            file = self.root / "salt"
            lines = lines.map(lambda line: line + file.read_text(), schema={"value": str})
        lines.key_by("value").count().output("counts", ab.parquet())
        return flow

    def run(self, **settings: Any) -> Watch:
        watch = Watch()
        settings = {"until_idle": True, "max_step_rows": 50, "first_step_rows": 50, **settings}
        run(self.flow(), self.where, listener=watch, context=self.spark, **settings)
        return watch

    def check(self) -> None:
        found = table(JobDir(self.where), "counts").drop("__weight")
        assert dict(found.rows()) == dict(self.words)
        steps = changes(JobDir(self.where), "counts").get_column("__step").unique().sort().to_list()
        assert steps == list(range(self.files))


@pytest.fixture
def job(tmp_path: Path, spark: SparkContext) -> Job:
    return Job(tmp_path, spark)


def test_surviving_shards_need_no_replay(job: Job) -> None:
    job.add(1)
    assert job.run(workers=3).replayed == []
    job.check()


@pytest.mark.parametrize("lost", [["host-0", "host-1"], ["host-1"]])
def test_lost_state_is_rebuilt_and_the_rest_replayed(job: Job, lost: list[str]) -> None:
    for host in lost:
        shutil.rmtree(job.where / "state" / host)
    job.add(1)
    watch = job.run(workers=3)
    assert watch.replayed == [4, 5]
    assert any("recovering from checkpoint 2, before step 4" in note for note in watch.notes)
    job.check()
    assert job.run().replayed == []


def test_other_hosts_get_their_shards_from_the_checkpoint(job: Job) -> None:
    job.add(1)
    job.run(hosts=3, workers=4)
    job.check()
    job.add(1)
    assert job.run(hosts=1, workers=2).replayed == []
    job.check()


def test_a_damaged_checkpoint_gives_way_to_the_one_before(job: Job) -> None:
    piece = max((job.where / "checkpoints").glob("*2/*.parquet"), key=lambda path: path.stat().st_size)
    piece.write_bytes(piece.read_bytes()[:-9] + b"\0" * 9)
    shutil.rmtree(job.where / "state")
    watch = job.run()
    assert watch.replayed == [2, 3, 4, 5]
    # The damaged one does not count among those that are kept.
    versions = Versions(JobDir(job.where).checkpoints)
    assert [versions.manifest(number).step for number in versions.list()] == [2, STEPS]
    assert any("checkpoint 2 cannot be used: " in note and piece.name in note for note in watch.notes)
    job.check()


def test_without_any_checkpoint_all_is_replayed(job: Job) -> None:
    shutil.rmtree(job.where / "checkpoints")
    (job.where / "checkpoints").mkdir()
    shutil.rmtree(job.where / "state")
    assert job.run().replayed == [0, 1, 2, 3, 4, 5]
    job.check()


def test_a_shard_that_another_coordinator_wrote_is_not_trusted(job: Job) -> None:
    # The last step's commit record says that another epoch committed it than the one that wrote the shards.
    log = JobDir(job.where).log
    name = f"000000000/{STEPS - 1:012d}"
    commit = record.read(log, f"{name}.commit")
    plan = record.read(log, f"{name}.{commit['epoch']}.plan")
    record.create(log, f"{name}.99.plan", plan | {"epoch": 99})
    record.replace(log, f"{name}.commit", commit | {"epoch": 99})
    for number in range(len(list((job.where / "epochs").iterdir())) + 1, 100):
        record.create(JobDir(job.where).storage, f"epochs/{number:09d}.json", {"epoch": number})
    assert job.run().replayed == [4, 5]
    job.check()


@pytest.mark.parametrize("gone", [True, False])
def test_a_changed_input_is_named(job: Job, gone: bool) -> None:
    shutil.rmtree(job.where / "state")
    file = job.data / "004.txt"
    before = file.read_text()
    if gone:
        file.unlink()
    else:
        file.write_text(before.replace("w1\n", "w2\n"))
    with pytest.raises(InputChangedError, match=r"004\.txt"):
        job.run()
    file.write_text(before)
    shutil.rmtree(job.where / "state", ignore_errors=True)
    job.run()
    job.check()


def test_a_function_that_answers_differently_stops_the_flow(tmp_path: Path, spark: SparkContext) -> None:
    (tmp_path / "salt").write_text("")
    job = Job(tmp_path, spark, salted=True)
    shutil.rmtree(job.where / "state")
    (tmp_path / "salt").write_text("!")
    with pytest.raises(ReplayError, match=r"step 4, output 'counts': a replay gave .* rows .* recorded are"):
        job.run()
    (tmp_path / "salt").write_text("")
    job.run()
    job.check()


def test_a_job_that_cannot_be_brought_back_says_why(job: Job) -> None:
    shutil.rmtree(job.where / "checkpoints")
    shutil.rmtree(job.where / "state")
    first = job.where / "log" / "first.json"
    # As if `--retain-steps` had trimmed the beginning.
    record.replace(JobDir(job.where).log, first.name, {"first": 2})
    with pytest.raises(JobDirError, match=r"shard"):
        job.run()


def test_two_checkpoints_are_kept(job: Job) -> None:
    versions = Versions(JobDir(job.where).checkpoints)
    assert [versions.manifest(number).step for number in versions.list()] == [2, 4]
    job.add(2)
    job.run(checkpoint_steps=1)
    assert [versions.manifest(number).step for number in versions.list()][-1] == STEPS + 2
    assert len(versions.list()) == 2
    assert all(0 < one.own <= one.total for one in versions.usage())


def test_a_checkpoint_on_demand_is_made_while_steps_go_on(tmp_path: Path, spark: SparkContext) -> None:
    flow = ab.Flow("busy")
    flow.input("rows", ab.generator(keys=50)).key_by("key").count().output("counts")
    where = JobDir(tmp_path / "job")

    class Asks(Watch):
        asked_at: int | None = None
        served_at: int | None = None

        def step(self, done: StepDone, progress: Progress) -> None:
            if done.step == 2:
                where.ask("checkpoint")
                self.asked_at = progress.next_step
            elif self.asked_at is not None and (not where.asked("checkpoint") or done.step == 200):
                self.served_at = progress.next_step
                where.ask("stop")

    asks = Asks()
    run(
        flow,
        where.path,
        listener=asks,
        context=spark,
        workers=2,
        shards=4,
        max_step_rows=100,
        checkpoint_seconds=None,
    )
    assert asks.asked_at is not None
    assert asks.served_at is not None
    assert not where.asked("checkpoint")
    versions = Versions(where.checkpoints)
    assert versions.manifest(versions.list()[0]).step >= asks.asked_at
    assert asks.served_at < 200


def test_a_checkpoint_that_was_found_damaged_is_never_built_upon(job: Job) -> None:
    versions = Versions(JobDir(job.where).checkpoints)
    newest = versions.list()[-1]
    piece = max(
        (job.where / "checkpoints").glob(f"*{newest}/*.parquet"), key=lambda path: path.stat().st_size
    )
    piece.write_bytes(piece.read_bytes()[:-9] + b"\0" * 9)
    shutil.rmtree(job.where / "state")
    # It makes no checkpoint, and so trims nothing; the next one has no reason to read that piece.
    job.run(checkpoint_seconds=None)
    assert newest not in versions.list()
    job.add(1)
    job.run()
    shutil.rmtree(job.where / "state")
    job.run()
    job.check()


def test_what_cannot_be_replayed_is_not_begun(tmp_path: Path, spark: SparkContext) -> None:
    def flow() -> ab.Flow:
        made = ab.Flow("trimmed")
        words = made.input("words", ab.iterable([f"w{n % 7}" for n in range(60)], {"word": str}, batch=5))
        words.key_by("word").count().output("counts")
        return made

    where = tmp_path / "job"
    settings: dict[str, Any] = {"max_step_rows": 5, "first_step_rows": 5, "checkpoint_steps": 1, "workers": 1}
    run(flow(), where, context=spark, until_idle=True, **settings)
    first = record.read(JobDir(where).input_log("words"), "first.json")["first"]
    assert first > 0
    for path in (where / "checkpoints").glob("*/manifest"):
        path.write_bytes(b"no manifest")
    shutil.rmtree(where / "state")
    with pytest.raises(JobDirError, match="the first rows of the log of input 'words' were trimmed"):
        run(flow(), where, context=spark, until_idle=True)


@pytest.mark.parametrize(
    ("then", "markers", "fitting"),
    [
        (0, {}, {}),
        (2, {"q": {0: 3, 1: 5}, "r": {}}, {"q": {0: 3, 1: 5}, "r": {}}),
        # Slots 2 and 3 are the arriving copies of cut shards.
        (2, {"q": {0: 10, 2: 15}, "r": {3: 13}}, {"q": {0: 15}, "r": {1: 13}}),
        (2, {"q": {2: 13, 0: 14, 1: 5, 3: 5}}, {"q": {0: 14, 1: 5}}),
        (4, {"q": {0: 3, 3: 7}, "r": {}}, {"q": {0: 7, 1: 7}}),
    ],
    ids=["empty", "whole", "cut", "cut, both written", "another number of shards"],
)
def test_a_shard_is_rebuilt_as_of_the_last_step_that_wrote_any_of_it(
    then: int, markers: dict, fitting: dict
) -> None:
    progress = Progress(Step(20), markers=markers).to_json()
    layout = {"shards": [0] * then} if then else {}
    manifest = Manifest(2, Step(20), progress, layout, 4, "f", "0", 0.0, ())
    assert fitting_markers(manifest, 2) == fitting
