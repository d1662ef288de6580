"""The step log: gapless, by epoch, and the same whether it is added up from a snapshot or from the beginning."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from anabranch.errors import CorruptError, Fenced
from anabranch.log.steplog import Progress, StepLog
from anabranch.model.ids import Epoch, Step


def slices(rng: random.Random, progress: Progress) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("lines", "orders"):
        for partition in rng.sample("abc", rng.randrange(3)):
            start = progress.positions.get(name, {}).get(partition, 0)  # type: ignore[call-overload]
            piece = {"partition": partition, "start": start, "end": start + rng.randrange(1, 9)}
            found.setdefault(name, []).append(piece)
    return found


def commit(step: int, epoch: int, rng: random.Random) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": epoch,
        "input_rows": rng.randrange(10),
        "outputs": {"out": {"rows": rng.randrange(10)}},
        "touched": {"r": sorted(rng.sample(range(8), rng.randrange(4)))},
    }


def write(log: StepLog, steps: int, seed: int = 0, progress: Progress | None = None) -> Progress:
    rng = random.Random(seed)
    progress = progress or Progress()
    for _ in range(steps):
        step = progress.next_step
        epoch = Epoch(1 + step // 3)
        planned = slices(rng, progress)
        log.write_plan(step, epoch, planned, layout=0)
        done = commit(step, epoch, rng)
        log.write_commit(step, done)
        progress.advance({"slices": planned}, done)
    return progress


def test_a_new_log_is_empty(tmp_path: Path) -> None:
    assert StepLog(tmp_path).load() == Progress()
    assert list(StepLog(tmp_path).commits()) == []


def test_loading_adds_up_what_was_written(tmp_path: Path) -> None:
    progress = write(StepLog(tmp_path), 25)
    loaded = StepLog(tmp_path).load()
    assert loaded == progress
    assert loaded.next_step == 25
    commits = list(StepLog(tmp_path).commits())
    assert loaded.input_rows == sum(one["input_rows"] for one in commits)
    assert loaded.output_rows == sum(one["outputs"]["out"]["rows"] for one in commits)
    for shard, step in loaded.markers["r"].items():  # type: ignore[index]
        assert step == max(one["step"] for one in commits if shard in one["touched"]["r"])


@pytest.mark.parametrize("at", [1, 7, 24, 25])
def test_a_snapshot_and_its_tail_are_the_whole(tmp_path: Path, at: int) -> None:
    log = StepLog(tmp_path)
    progress = write(log, at, seed=1)
    log.snapshot(progress)
    progress = write(log, 25 - at, seed=2, progress=progress)
    assert StepLog(tmp_path).load() == progress
    next(tmp_path.glob("snapshot-*")).unlink()
    assert StepLog(tmp_path).load() == progress


def test_progress_survives_json() -> None:
    progress = Progress()
    progress.advance(
        {"slices": {"in": [{"partition": "p", "end": 3}]}},
        {"step": 0, "touched": {"r": [1]}, "input_rows": 2, "outputs": {"o": {"rows": 4}}},
    )
    assert Progress.from_json(progress.to_json()) == progress


def test_the_two_newest_snapshots_are_kept(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    progress = Progress()
    for _ in range(4):
        progress = write(log, 3, progress=progress)
        log.snapshot(progress)
    names = sorted(path.name for path in tmp_path.glob("snapshot-*"))
    assert names == ["snapshot-000000000009.json", "snapshot-000000000012.json"]
    # Behind a damaged one stands the other.
    (tmp_path / names[1]).write_bytes(b"damage")
    assert StepLog(tmp_path).load() == progress
    (tmp_path / names[0]).write_bytes(b"damage")
    with pytest.raises(CorruptError, match=names[0]):
        StepLog(tmp_path).load()


def test_plans_are_found_by_epoch(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    log.write_plan(Step(0), Epoch(1), {"in": [{"partition": "p", "end": 5}]}, layout=0)
    # The first coordinator died; the second plans anew, over a mended file.
    log.write_plan(Step(0), Epoch(2), {"in": [{"partition": "p", "end": 9}]}, layout=1)
    log.write_commit(Step(0), commit(0, 2, random.Random(0)))
    assert StepLog(tmp_path).load().positions == {"in": {"p": 9}}
    first, second = log.plan(Step(0), Epoch(1)), log.plan(Step(0), Epoch(2))
    assert first is not None
    assert second is not None
    assert (first["slices"]["in"][0]["end"], second["slices"]["in"][0]["end"]) == (5, 9)
    assert log.plan(Step(0), Epoch(3)) is None
    assert log.commit(Step(1)) is None


def test_a_plan_is_never_changed(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    log.write_plan(Step(0), Epoch(1), {}, layout=0)
    with pytest.raises(FileExistsError):
        log.write_plan(Step(0), Epoch(1), {"in": []}, layout=0)


def test_the_second_commit_of_a_step_is_fenced(tmp_path: Path) -> None:
    write(StepLog(tmp_path), 1)
    with pytest.raises(Fenced, match=r"step 0: another coordinator.*epoch 7"):
        StepLog(tmp_path).write_commit(Step(0), commit(0, 7, random.Random(0)))


def test_commits_from_a_step_on(tmp_path: Path) -> None:
    write(StepLog(tmp_path), 5)
    assert [one["step"] for one in StepLog(tmp_path).commits(Step(3))] == [3, 4]


def test_a_log_spans_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.log.steplog._PER_FOLDER", 4)
    progress = write(StepLog(tmp_path), 13)
    assert len(list(tmp_path.iterdir())) == 4
    assert StepLog(tmp_path).load() == progress


@pytest.mark.parametrize("step", [0, 3, 8])
def test_a_missing_commit_is_told(tmp_path: Path, step: int) -> None:
    write(StepLog(tmp_path), 10)
    next(tmp_path.rglob(f"{step:012d}.commit")).unlink()
    with pytest.raises(CorruptError, match=rf"commit record of step {step} is missing"):
        StepLog(tmp_path).load()


def test_a_log_that_lost_its_end_is_told(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    log.snapshot(write(log, 10))
    for step in (8, 9):
        next(tmp_path.rglob(f"{step:012d}.commit")).unlink()
    with pytest.raises(CorruptError, match=r"commit record of step 9 is missing"):
        StepLog(tmp_path).load()


def test_a_missing_plan_is_told(tmp_path: Path) -> None:
    write(StepLog(tmp_path), 4)
    next(tmp_path.rglob("000000000002.*.plan")).unlink()
    with pytest.raises(CorruptError, match=r"step 2 is committed but its plan is missing"):
        StepLog(tmp_path).load()


def test_a_missing_log_is_told(tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match=r"nothing is missing"):
        StepLog(tmp_path / "nothing").load()


def test_a_damaged_commit_is_told(tmp_path: Path) -> None:
    write(StepLog(tmp_path), 4)
    path = next(tmp_path.rglob("000000000002.commit"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptError, match=r"000000000002.commit"):
        StepLog(tmp_path).load()


def test_steps_are_added_in_order() -> None:
    with pytest.raises(CorruptError, match=r"expected the commit record of step 0, found 1"):
        Progress().advance({"slices": {}}, commit(1, 1, random.Random(0)))
