"""Outputs as a reader finds them."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from written_job import written_job

import anabranch as ab
from anabranch.connect.sink import Sink
from anabranch.errors import CorruptError, JobDirError
from anabranch.log.steplog import StepLog
from anabranch.model.ids import Step
from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.outputs import (
    changes,
    discard_attempts,
    forget,
    json_ready,
    output_names,
    publish,
    table,
)

SCHEMA: dict[str, Any] = {"k": str, "n": int}
STEPS: list[list[tuple[object, ...]]] = [
    [("b", 1, 1), ("a", 1, 1)],
    [],
    [("a", 1, -1), ("a", 2, 1), (None, 7, 2)],
    [("b", 1, -1)],
]


@pytest.mark.parametrize(
    "sink", [ab.parquet(), ab.jsonl(), ab.console(), ab.memory([])], ids=lambda s: s.kind
)
def test_changes_add_up_to_the_table(tmp_path: Path, sink: Sink) -> None:
    job = written_job(tmp_path, STEPS, SCHEMA, sink)
    assert changes(job, "out").rows() == [
        ("b", 1, 1, 0),
        ("a", 1, 1, 0),
        ("a", 1, -1, 2),
        ("a", 2, 1, 2),
        (None, 7, 2, 2),
        ("b", 1, -1, 3),
    ]
    assert changes(job, "out", Step(3)).rows() == [("b", 1, -1, 3)]
    assert table(job, "out").rows() == [("a", 2, 1), (None, 7, 2)]
    assert table(job, "out").columns == ["k", "n", "__weight"]


def test_columns_without_an_order(tmp_path: Path) -> None:
    job = written_job(
        tmp_path, [[([1], 1), ([1], 1), ([2], 1), ([2], -1)]], {"l": pl.List(pl.Int64())}, ab.parquet()
    )
    assert table(job, "out").rows() == [([1], 2)]


@pytest.mark.parametrize("steps", [[], [[]], [[], []]])
def test_no_rows(tmp_path: Path, steps: list[list[tuple[object, ...]]]) -> None:
    job = written_job(tmp_path, steps, {"z": int, "a": str}, ab.parquet())
    assert changes(job, "out").columns == ["z", "a", "__weight", "__step"]
    assert table(job, "out").columns == ["z", "a", "__weight"]
    assert table(job, "out").is_empty()
    assert table(job, "dead_letters").is_empty()


def test_what_is_not_there(tmp_path: Path) -> None:
    job = written_job(tmp_path, STEPS, SCHEMA, ab.parquet())
    assert output_names(job) == ["out", "dead_letters"]
    with pytest.raises(JobDirError, match=r"no output 'in'; it has out, dead_letters"):
        changes(job, "in")
    next((tmp_path / "outputs" / "out").glob("step-*2-try*")).unlink()
    with pytest.raises(CorruptError, match=r"step-0*2-.*missing"):
        table(job, "out")
    with pytest.raises(JobDirError, match=r"does not exist"):
        table(JobDir(tmp_path / "no"), "out")


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "job") if request.param == "local" else request.getfixturevalue("object_url")


def files_of(job: JobDir) -> list[int]:
    """The steps of all files of the output."""
    return [int(name.split("-")[1]) for name in job.outputs.list("out") if not name.endswith("/")]


@pytest.mark.parametrize("sink", [ab.parquet(), ab.console()], ids=lambda s: s.kind)
def test_what_is_forgotten_is_gone_and_the_rest_is_read(place: str, sink: Sink) -> None:
    job = written_job(place, STEPS, SCHEMA, sink)
    log = StepLog(job.log)
    log.snapshot(log.load())
    assert files_of(job) == [0, 2, 3]
    for before, left in ((Step(1), [2, 3]), (Step(1), [2, 3]), (Step(3), [3]), (Step(2), [3])):
        forget(job, {"out": sink}, log, before)
        assert files_of(job) == left
        assert sorted(set(changes(job, "out")["__step"])) == left
    assert log.load().next_step == 4
    forget(job, {"out": sink}, log, Step(4))
    assert changes(job, "out").is_empty()
    assert changes(job, "out").columns == ["k", "n", "__weight", "__step"]


def test_attempts_that_no_record_names_are_discarded(place: str) -> None:
    sink = ab.parquet()
    job = written_job(place, STEPS, SCHEMA, sink)
    before = changes(job, "out")
    root = job.outputs.child("out")
    for step in (3, 4):
        sink.stage(before, root, f"step-{step:012d}-try-2.0")
    discard_attempts(job, {"out": sink}, StepLog(job.log), Step(3))
    assert files_of(job) == [0, 2, 3]
    assert root.list("_staging") == []
    assert changes(job, "out").equals(before)
    publish(job, {"out": sink}, {"outputs": {}})


def test_rows_as_json() -> None:
    frame = pl.DataFrame(
        {"b": [b"\xff\x00", None], "d": [Decimal("1.10"), None], "n": [1, 2]},
        schema={"b": pl.Binary(), "d": pl.Decimal(38, 2), "n": pl.Int64()},
    )
    lines = json_ready(frame).write_ndjson().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"b": "/wA=", "d": "1.10", "n": 1},
        {"b": None, "d": None, "n": 2},
    ]
