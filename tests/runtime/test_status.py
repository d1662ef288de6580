"""What a coordinator says of itself."""

from __future__ import annotations

from pathlib import Path

from anabranch.errors import EngineError
from anabranch.log.steplog import Progress
from anabranch.model.ids import Epoch, HostId, Step
from anabranch.model.layout import FixedSharding, initial_layout
from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.observe import StepDone
from anabranch.runtime.status import StatusBoard


def done(step: int) -> StepDone:
    return StepDone(Step(step), 1000, 10, 0, 0.5, 7, 70, 2)


def test_a_life(tmp_path: Path) -> None:
    job = JobDir(tmp_path)
    board = StatusBoard(job, "f", Epoch(3))
    assert job.status()["state"] == "starting"
    assert job.status()["epoch"] == 3
    board.started(initial_layout(2, [HostId("a"), HostId("b")], FixedSharding(8)), Progress())
    status = job.status()
    assert (status["state"], status["workers"], status["hosts"], status["shards"]) == (
        "running",
        2,
        ["a", "b"],
        8,
    )
    board.idle(Progress())
    assert job.status()["state"] == "idle"
    board.step(done(0), Progress(next_step=Step(1), input_rows=1000, output_rows=10))
    board.stopped(Progress(next_step=Step(1), input_rows=1000, output_rows=10))
    status = job.status()
    assert (status["state"], status["steps"], status["input_rows"], status["output_rows"]) == (
        "stopped",
        1,
        1000,
        10,
    )
    assert (status["rows_per_second"], status["backlog_rows"], status["backlog_bytes"]) == (2000.0, 7, 70)


def test_not_every_step_is_written(tmp_path: Path) -> None:
    job = JobDir(tmp_path)
    board = StatusBoard(job, "f", Epoch(1))
    for step in range(100):
        board.step(done(step), Progress(next_step=Step(step + 1)))
    assert job.status().get("steps", 0) < 100
    board.stopped(Progress(next_step=Step(100)))
    assert job.status()["steps"] == 100


def test_the_newest_faults_are_kept(tmp_path: Path) -> None:
    job = JobDir(tmp_path)
    board = StatusBoard(job, "f", Epoch(1))
    for attempt in range(30):
        board.fault(Step(5), attempt, EngineError("lost"))
    faults = job.status()["faults"]
    assert [fault["attempt"] for fault in faults] == list(range(10, 30))
    assert faults[0]["error"] == "EngineError: lost"
    board.failed(EngineError("gone"))
    assert (job.status()["state"], job.status()["error"]) == ("failed", "EngineError: gone")


def test_a_torn_status_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("half")
    assert JobDir(tmp_path).status() == {"state": "new"}
