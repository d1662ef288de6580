"""What a step read is recorded, the same at any scale, and a replay that reads otherwise is noticed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from inprocess import InProcess
from richflow import build, write_input

import anabranch as ab
from anabranch.connect.source import Slice
from anabranch.errors import InputChangedError
from anabranch.model.ids import Attempt, PartitionId, Step
from anabranch.spark.reads import check_reads, sum_lost, sum_reads, without_lost
from anabranch.spark.spec import Lost, Report, StepSpec


def rerun(job: InProcess, slices: dict[str, list[Slice]], **changes: Any) -> list[Report]:
    """The step once more, before it is committed, with another spec."""
    plain = job.spec

    def changed(attempt: Attempt, given: dict[str, list[Slice]]) -> StepSpec:
        return replace(plain(attempt, given), **changes)

    job.spec = changed  # type: ignore[method-assign]
    try:
        return job.attempt(slices, 1)
    finally:
        job.spec = plain  # type: ignore[method-assign]


def outputs(reports: list[Report]) -> dict[str, tuple[int, int]]:
    sums = {}
    for name in sorted({name for report in reports for name in report.outputs}):
        parts = [part for report in reports for part in report.outputs.get(name, ())]
        sums[name] = (sum(part["rows"] for part in parts), sum(part["hash"] for part in parts) % (1 << 64))
    return sums


def numbers(folder: Path, on_error: Any = "stop") -> ab.Flow:
    flow = ab.Flow("numbers", on_error=on_error)
    rows = flow.input("numbers", ab.files(folder, format="parquet"))
    rows.key_by("key").sum("value").output("sums")
    return flow


def write_numbers(folder: Path, name: str, rows: int, base: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    values = list(range(base, base + rows))
    path = folder / name
    pl.DataFrame({"key": [v % 7 for v in values], "value": values}).write_parquet(path, row_group_size=1000)
    return path


def test_reads_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    write_numbers(tmp_path / "in", "a.parquet", 6000)
    write_numbers(tmp_path / "in", "b.parquet", 500)
    flow = numbers(tmp_path / "in")
    jobs = [InProcess(flow, tmp_path / f"job{w}", w, 8) for w in (1, 2, 5)]
    slices = jobs[0].cut(10_000)
    all_reports = [job.attempt(slices) for job in jobs]
    assert [sum(len(report.reads) for report in reports) for reports in all_reports] == [2, 3, 6]
    first, *others = [sum_reads(reports) for reports in all_reports]
    assert all(found == first for found in others)
    assert {name: found["rows"] for name, found in first["numbers"].items()} == {
        "a.parquet": 6000,
        "b.parquet": 500,
    }
    assert json.loads(json.dumps(first)) == first


def test_records_that_are_set_aside_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("n\n1\nx\n3\n")
    flow = ab.Flow("f", on_error="dead_letter")
    flow.input("rows", ab.files(tmp_path / "in", format="csv", schema={"n": int})).output("out")
    job = InProcess(flow, tmp_path / "job", 1, 2)
    found = sum_reads(job.attempt(job.cut(100)))
    assert found["rows"]["a.csv"]["rows"] == 2


def test_a_replay_writes_no_file_and_gives_the_same(tmp_path: Path) -> None:
    write_input(tmp_path / "in", seed=3)
    job = InProcess(build(tmp_path / "in"), tmp_path / "job", 2, 4)
    slices = job.cut(150)
    first = job.attempt(slices)

    def files() -> list[Path]:
        return sorted(path for path in (tmp_path / "job" / "outputs").rglob("*") if path.is_file())

    staged = files()
    assert staged
    again = rerun(job, slices, replay=True)
    assert files() == staged
    assert outputs(again) == outputs(first)
    check_reads(sum_reads(first), sum_reads(again), Step(0))


def test_a_file_that_changed_where_the_source_does_not_look_is_named(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.csv"
    lines = [f"{n},{n % 9}" for n in range(10_000, 30_000)]
    path.write_text("\n".join(["k,v", *lines, ""]))
    flow = ab.Flow("f")
    flow.input("rows", ab.files(tmp_path / "in", format="csv", schema={"k": int, "v": int})).output("out")
    job = InProcess(flow, tmp_path / "job", 1, 2)
    slices = job.cut(100_000)
    before = sum_reads(job.attempt(slices))
    lines[9000] = "19000,7"
    path.write_text("\n".join(["k,v", *lines, ""]))
    now = sum_reads(rerun(job, slices, replay=True))
    with pytest.raises(
        InputChangedError, match=r"input 'rows', partition a\.csv: step 0 read 20000 rows.*restore"
    ):
        check_reads(before, now, Step(0))


@pytest.mark.parametrize(
    ("recorded", "found"),
    [
        ({"a": {"p": {"rows": 1, "hash": 5}}}, {"a": {"p": {"rows": 2, "hash": 5}}}),
        ({"a": {"p": {"rows": 1, "hash": 5}}}, {}),
        ({}, {"a": {"p": {"rows": 1, "hash": 5}}}),
    ],
)
def test_what_differs(recorded: Any, found: Any) -> None:
    with pytest.raises(InputChangedError, match="input 'a', partition p: step 7"):
        check_reads(recorded, found, Step(7))


def test_partitions_without_rows_need_not_be_named() -> None:
    check_reads({"a": {"p": {"rows": 0, "hash": 0}}}, {}, Step(0))


def test_a_file_that_vanished_is_a_dead_letter_once_and_an_error_on_replay(tmp_path: Path) -> None:
    path = write_numbers(tmp_path / "in", "a.parquet", 100)
    write_numbers(tmp_path / "in", "b.parquet", 50)
    job = InProcess(numbers(tmp_path / "in", "dead_letter"), tmp_path / "job", 2, 4)
    slices = job.cut(1000)
    kept = path.read_bytes()
    path.unlink()
    with pytest.raises(InputChangedError, match=r"input 'numbers', step 0: .*a\.parquet"):
        rerun(job, slices, replay=True)
    reports = job.attempt(slices, 2)
    lost = sum_lost(reports)
    assert [(one["partition"], one["start"], one["end"]) for one in lost] == [("a.parquet", 0, 100)]
    assert sum_reads(reports)["numbers"]["a.parquet"] == {"rows": 0, "hash": 0}
    # A replay sets the same aside, whether the file is there again or not.
    for back in (False, True):
        if back:
            path.write_bytes(kept)
        again = rerun(
            job, slices, replay=True, lost=tuple(map(Lost.from_json, lost)), attempt=Attempt(3 + back)
        )
        assert outputs(again) == outputs(reports)
        check_reads(sum_reads(reports), sum_reads(again), Step(0))


def test_what_remains_of_a_piece_around_its_losses() -> None:
    def lose(start: int, end: int) -> Lost:
        return Lost("in", "p", start, end, "gone")

    piece = Slice(PartitionId("p"), 10, 20, 10, 100)

    def of(*lost: Lost) -> tuple[list[tuple[int, int]], list[Lost]]:
        rest, told = without_lost(piece, lost)
        return [(part.start, part.end) for part in rest], told

    assert of() == ([(10, 20)], [])
    assert of(lose(10, 20)) == ([], [lose(10, 20)])
    assert of(lose(0, 12), lose(18, 30)) == ([(12, 18)], [lose(18, 30)])
    assert of(lose(12, 14), lose(15, 16)) == ([(10, 12), (14, 15), (16, 20)], [lose(12, 14), lose(15, 16)])
    assert of(lose(0, 10), lose(20, 30)) == ([(10, 20)], [])
    assert of(Lost("in", "other", 0, 100, "gone")) == ([(10, 20)], [])
