"""The step log: gapless, by epoch, and the same whether it is added up from a snapshot or from the beginning."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from anabranch.errors import CorruptError, Fenced, JobDirError
from anabranch.log.steplog import Progress, StepLog
from anabranch.model.ids import Epoch, Step
from anabranch.storage import Storage, open_storage, record


def step_log(path: Path) -> StepLog:
    log = StepLog(open_storage(path))
    log.create()
    return log


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
    assert step_log(tmp_path).load() == Progress()
    assert list(step_log(tmp_path).commits()) == []


def test_loading_adds_up_what_was_written(tmp_path: Path) -> None:
    progress = write(step_log(tmp_path), 25)
    loaded = step_log(tmp_path).load()
    assert loaded == progress
    assert loaded.next_step == 25
    commits = list(step_log(tmp_path).commits())
    assert loaded.input_rows == sum(one["input_rows"] for one in commits)
    assert loaded.output_rows == sum(one["outputs"]["out"]["rows"] for one in commits)
    for shard, step in loaded.markers["r"].items():  # type: ignore[index]
        assert step == max(one["step"] for one in commits if shard in one["touched"]["r"])


@pytest.mark.parametrize("at", [1, 7, 24, 25])
def test_a_snapshot_and_its_tail_are_the_whole(tmp_path: Path, at: int) -> None:
    log = step_log(tmp_path)
    progress = write(log, at, seed=1)
    log.snapshot(progress)
    progress = write(log, 25 - at, seed=2, progress=progress)
    assert step_log(tmp_path).load() == progress
    next(tmp_path.glob("snapshot-*")).unlink()
    assert step_log(tmp_path).load() == progress


def test_progress_survives_json() -> None:
    progress = Progress()
    progress.advance(
        {"slices": {"in": [{"partition": "p", "end": 3}]}},
        {"step": 0, "touched": {"r": [1]}, "input_rows": 2, "outputs": {"o": {"rows": 4}}},
    )
    assert Progress.from_json(progress.to_json()) == progress


def test_the_two_newest_snapshots_are_kept(tmp_path: Path) -> None:
    log = step_log(tmp_path)
    progress = Progress()
    for _ in range(4):
        progress = write(log, 3, progress=progress)
        log.snapshot(progress)
    names = sorted(path.name for path in tmp_path.glob("snapshot-*"))
    assert names == ["snapshot-000000000009.json", "snapshot-000000000012.json"]
    # Behind a damaged one stands the other.
    (tmp_path / names[1]).write_bytes(b"damage")
    assert step_log(tmp_path).load() == progress
    # And behind both all records, as long as none was trimmed.
    (tmp_path / names[0]).write_bytes(b"damage")
    assert step_log(tmp_path).load() == progress
    record.replace(open_storage(tmp_path), "first.json", {"first": 5})
    with pytest.raises(CorruptError, match=names[0]):
        step_log(tmp_path).load()


def test_plans_are_found_by_epoch(tmp_path: Path) -> None:
    log = step_log(tmp_path)
    log.write_plan(Step(0), Epoch(1), {"in": [{"partition": "p", "end": 5}]}, layout=0)
    # The first coordinator died; the second plans anew, over a mended file.
    log.write_plan(Step(0), Epoch(2), {"in": [{"partition": "p", "end": 9}]}, layout=1)
    log.write_commit(Step(0), commit(0, 2, random.Random(0)))
    assert step_log(tmp_path).load().positions == {"in": {"p": 9}}
    first, second = log.plan(Step(0), Epoch(1)), log.plan(Step(0), Epoch(2))
    assert first is not None
    assert second is not None
    assert (first["slices"]["in"][0]["end"], second["slices"]["in"][0]["end"]) == (5, 9)
    assert log.plan(Step(0), Epoch(3)) is None
    assert log.commit(Step(1)) is None


def test_a_plan_is_never_changed(tmp_path: Path) -> None:
    log = step_log(tmp_path)
    log.write_plan(Step(0), Epoch(1), {}, layout=0)
    with pytest.raises(FileExistsError):
        log.write_plan(Step(0), Epoch(1), {"in": []}, layout=0)


def test_the_second_commit_of_a_step_is_fenced(tmp_path: Path) -> None:
    write(step_log(tmp_path), 1)
    with pytest.raises(Fenced, match=r"step 0: another coordinator.*epoch 7"):
        step_log(tmp_path).write_commit(Step(0), commit(0, 7, random.Random(0)))


def test_commits_from_a_step_on(tmp_path: Path) -> None:
    write(step_log(tmp_path), 5)
    assert [one["step"] for one in step_log(tmp_path).commits(Step(3))] == [3, 4]


def test_a_log_spans_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.log.steplog._PER_FOLDER", 4)
    progress = write(step_log(tmp_path), 13)
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 4
    assert step_log(tmp_path).load() == progress


@pytest.mark.parametrize("step", [0, 3, 8])
def test_a_missing_commit_is_told(tmp_path: Path, step: int) -> None:
    write(step_log(tmp_path), 10)
    next(tmp_path.rglob(f"{step:012d}.commit")).unlink()
    with pytest.raises(CorruptError, match=rf"commit record of step {step} is missing"):
        step_log(tmp_path).load()


def test_a_log_that_lost_its_end_is_told(tmp_path: Path) -> None:
    log = step_log(tmp_path)
    log.snapshot(write(log, 10))
    for step in (8, 9):
        next(tmp_path.rglob(f"{step:012d}.commit")).unlink()
    with pytest.raises(CorruptError, match=r"commit record of step 9 is missing"):
        step_log(tmp_path).load()


def test_a_missing_plan_is_told(tmp_path: Path) -> None:
    write(step_log(tmp_path), 4)
    next(tmp_path.rglob("000000000002.*.plan")).unlink()
    with pytest.raises(CorruptError, match=r"step 2 is committed but its plan is missing"):
        step_log(tmp_path).load()


def test_a_missing_log_is_told(tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match=r"nothing is missing"):
        StepLog(open_storage(tmp_path / "nothing")).load()


def test_a_damaged_commit_is_told(tmp_path: Path) -> None:
    write(step_log(tmp_path), 4)
    path = next(tmp_path.rglob("000000000002.commit"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptError, match=r"000000000002.commit"):
        step_log(tmp_path).load()


def test_steps_are_added_in_order() -> None:
    with pytest.raises(CorruptError, match=r"expected the commit record of step 0, found 1"):
        Progress().advance({"slices": {}}, commit(1, 1, random.Random(0)))


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return open_storage(tmp_path if request.param == "local" else request.getfixturevalue("object_url"))


def trimmable(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> tuple[StepLog, Progress]:
    """Ten steps in folders of four, and a snapshot of the first eight."""
    monkeypatch.setattr("anabranch.log.steplog._PER_FOLDER", 4)
    log = StepLog(storage)
    log.create()
    progress = write(log, 8)
    log.snapshot(progress)
    return log, write(log, 2, seed=1, progress=progress)


def records(storage: Storage) -> set[int]:
    """The steps of which there is any record."""
    folders = [name for name in storage.list() if name.endswith("/")]
    return {int(name.partition(".")[0]) for folder in folders for name in storage.list(folder[:-1])}


@pytest.mark.parametrize("before", [0, 1, 4, 7, 8])
def test_trimming_keeps_the_sums(storage: Storage, monkeypatch: pytest.MonkeyPatch, before: int) -> None:
    log, progress = trimmable(storage, monkeypatch)
    expired: list[int] = []
    log.trim(Step(before), lambda commit: expired.append(commit["step"]))
    assert expired == list(range(before))
    assert records(storage) == set(range(before, 10))
    for one in (log, StepLog(storage)):
        assert one.first == before
        assert one.load() == progress
        assert [commit["step"] for commit in one.commits()] == list(range(before, 10))
        assert [commit["step"] for commit in one.commits(Step(9))] == [9]
    log.trim(Step(max(0, before - 2)))
    log.trim(Step(before))
    assert (StepLog(storage).first, StepLog(storage).load()) == (before, progress)
    progress = write(log, 3, seed=2, progress=progress)
    assert StepLog(storage).load() == progress


def test_nothing_is_trimmed_that_no_snapshot_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, progress = trimmable(open_storage(tmp_path), monkeypatch)
    log.trim(Step(9))
    assert (log.first, log.load()) == (0, progress)
    next(tmp_path.glob("snapshot-*")).write_bytes(b"damage")
    log.trim(Step(2))
    assert log.first == 0
    assert records(open_storage(tmp_path)) == set(range(10))


def test_a_trim_that_was_killed_is_completed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, progress = trimmable(open_storage(tmp_path), monkeypatch)

    class Killed(Exception):
        pass

    def kill(commit: dict[str, Any]) -> None:
        if commit["step"] == 5:
            raise Killed

    with pytest.raises(Killed):
        log.trim(Step(7), kill)
    # What was to go and is still there is not seen.
    assert records(open_storage(tmp_path)) == set(range(4, 10))
    log = StepLog(open_storage(tmp_path))
    assert (log.first, log.load()) == (7, progress)
    expired: list[int] = []
    log.trim(Step(7), lambda commit: expired.append(commit["step"]))
    assert expired == [4, 5, 6]
    assert records(open_storage(tmp_path)) == set(range(7, 10))


def test_a_trimmed_log_without_its_snapshot_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, _ = trimmable(open_storage(tmp_path), monkeypatch)
    log.trim(Step(6))
    next(tmp_path.glob("snapshot-*")).unlink()
    with pytest.raises(CorruptError, match=r"steps before 6 were trimmed, and the snapshot"):
        step_log(tmp_path).load()


def test_a_reader_notices_that_the_log_is_trimmed_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, _ = trimmable(open_storage(tmp_path), monkeypatch)
    late, early = step_log(tmp_path), step_log(tmp_path).commits()
    assert late.first == 0
    assert next(early)["step"] == 0
    log.trim(Step(6))
    assert [commit["step"] for commit in late.commits()] == [6, 7, 8, 9]
    with pytest.raises(JobDirError, match=r"step 1 was trimmed while"):
        next(early)
