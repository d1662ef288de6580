"""One suite that every sink must pass: what is committed appears, whole and once, however often the
driver dies."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pyspark import cloudpickle

from anabranch import connect as ab
from anabranch.connect.sink import Sink, Staged
from anabranch.connect.sinks import FileSink
from anabranch.errors import ConfigError, CorruptError

ROWS = [
    {"key": "a", "n": 1, "x": 0.5, "__weight": 1, "__step": 3},
    {"key": None, "n": -7, "x": None, "__weight": -1, "__step": 3},
    {"key": 'é\n"', "n": 2**62, "x": -0.0, "__weight": 5, "__step": 3},
]
FRAME = pl.DataFrame(
    ROWS, schema={"key": pl.String, "n": pl.Int64, "x": pl.Float64, "__weight": pl.Int64, "__step": pl.Int64}
)


@dataclass
class Case:
    make: Callable[[], Sink]
    root: Path
    target: list[dict[str, Any]] = field(default_factory=list)

    def staging(self, sink: Sink) -> list[str]:
        assert isinstance(sink, FileSink)
        directory = sink.directory(self.root) / "_staging"
        return sorted(str(path) for path in directory.iterdir()) if directory.exists() else []


@pytest.fixture(params=["parquet", "parquet-path", "jsonl", "jsonl-path", "console", "memory"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    kind, _, own = request.param.partition("-")
    made = Case(lambda: ab.console(), tmp_path / "job" / "out")
    if kind in ("parquet", "jsonl"):
        make = {"parquet": ab.parquet, "jsonl": ab.jsonl}[kind]
        made.make = lambda: make(tmp_path / "mine" if own else None)
    elif kind == "memory":
        made.make = lambda: ab.memory(made.target)
    return made


def in_worker(sink: Sink) -> Sink:
    return cloudpickle.loads(cloudpickle.dumps(sink))  # type: ignore[no-any-return]


def same(found: pl.DataFrame, rows: list[dict[str, Any]]) -> bool:
    return [{name: row[name] for name in ROWS[0]} for row in found.to_dicts()] == rows


def test_a_committed_file_is_read_back(case: Case) -> None:
    sink = case.make()
    staged = in_worker(sink).stage(FRAME, case.root, "s3-a0-w0")
    assert staged.rows == 3
    assert staged.size == Path(staged.path).stat().st_size
    assert Staged.from_json(json.loads(json.dumps(staged.to_json()))) == staged
    assert not Path(staged.final).exists()
    sink.publish([staged])
    assert Path(staged.final).exists()
    assert same(sink.read(case.root, [staged]), ROWS)


def test_nothing_is_visible_before_it_is_published(case: Case) -> None:
    sink = case.make()
    staged = sink.stage(FRAME, case.root, "s3-a0-w0")
    seen = [p for p in Path(staged.final).parent.iterdir() if not p.name.startswith("_")]
    assert seen == []


def test_publishing_twice_is_publishing_once(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    sink = case.make()
    staged = [sink.stage(FRAME, case.root, f"s3-a0-w{w}") for w in range(2)]
    sink.publish(staged)
    content = [Path(item.final).read_bytes() for item in staged]
    printed, appended = capsys.readouterr().out, list(case.target)
    sink.publish(staged)
    case.make().publish(staged)
    assert [Path(item.final).read_bytes() for item in staged] == content
    assert case.target == appended
    assert capsys.readouterr().out == ""
    assert bool(printed) == (sink.fingerprint()["kind"] == "console")


def test_a_driver_that_died_half_way_through_publishing_is_completed_by_the_next(case: Case) -> None:
    sink = case.make()
    staged = [sink.stage(FRAME, case.root, f"s3-a0-w{w}") for w in range(3)]
    sink.publish(staged[:1])
    successor = case.make()
    successor.discard(case.root, {item.path for item in staged})
    successor.publish(staged)
    assert same(successor.read(case.root, staged), ROWS * 3)
    assert case.staging(successor) == []


def test_discard_removes_what_no_record_names(case: Case) -> None:
    sink = case.make()
    kept = sink.stage(FRAME, case.root, "s3-a1-w0")
    sink.stage(FRAME, case.root, "s3-a0-w0")
    sink.discard(case.root, {kept.path})
    assert case.staging(sink) == [kept.path]
    sink.discard(case.root, set())
    assert case.staging(sink) == []


def test_discard_without_a_directory_is_nothing(case: Case) -> None:
    case.make().discard(case.root, set())


def test_staging_again_replaces(case: Case) -> None:
    sink = case.make()
    sink.stage(FRAME, case.root, "s3-a0-w0")
    staged = sink.stage(FRAME.head(1), case.root, "s3-a0-w0")
    sink.publish([staged])
    assert same(sink.read(case.root, [staged]), ROWS[:1])


def test_a_lost_committed_file_is_named(case: Case) -> None:
    sink = case.make()
    staged = sink.stage(FRAME, case.root, "s3-a0-w0")
    sink.discard(case.root, set())
    with pytest.raises(CorruptError, match=r"s3-a0-w0"):
        sink.publish([staged])
    with pytest.raises(CorruptError, match=r"s3-a0-w0.*missing"):
        sink.read(case.root, [staged])


def test_a_damaged_published_file_is_named(case: Case) -> None:
    sink = case.make()
    staged = sink.stage(FRAME, case.root, "s3-a0-w0")
    sink.publish([staged])
    Path(staged.final).write_bytes(b"{ garbage")
    with pytest.raises(CorruptError, match=r"s3-a0-w0"):
        sink.read(case.root, [staged])


def test_another_jobs_file_is_not_replaced(case: Case) -> None:
    sink = case.make()
    staged = sink.stage(FRAME, case.root, "s3-a0-w0")
    Path(staged.final).write_bytes(b"theirs")
    with pytest.raises(ConfigError, match="not this job's"):
        sink.publish([staged])
    assert Path(staged.final).read_bytes() == b"theirs"


def test_an_empty_frame_is_fine(case: Case) -> None:
    sink = case.make()
    staged = [sink.stage(FRAME.clear(), case.root, "s3-a0-w0"), sink.stage(FRAME, case.root, "s3-a0-w1")]
    sink.publish(staged)
    assert same(sink.read(case.root, staged), ROWS)
    assert sink.read(case.root, staged[:1]).height == 0
    assert sink.read(case.root, []).height == 0


def test_the_fingerprint_is_json(case: Case) -> None:
    assert json.loads(json.dumps(case.make().fingerprint())) == case.make().fingerprint()
