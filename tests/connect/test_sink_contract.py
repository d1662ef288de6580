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
from anabranch.connect.filesink import FileSink
from anabranch.connect.sink import Sink, Staged
from anabranch.errors import ConfigError, CorruptError
from anabranch.storage import Storage, open_storage

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
    root: Storage
    target: list[dict[str, Any]] = field(default_factory=list)

    @property
    def place(self) -> Storage:
        sink = self.make()
        assert isinstance(sink, FileSink)
        return sink.place(self.root)

    @property
    def moves(self) -> bool:
        sink = self.make()
        assert isinstance(sink, FileSink)
        return sink.moves(self.place)

    def name(self, recorded: str) -> str:
        return recorded.removeprefix(self.place.url + "/")

    def files(self) -> list[str]:
        """All files of the output, staged or not."""
        staged = [f"_staging/{name}" for name in self.place.list("_staging")]
        return sorted(staged + [name for name in self.place.list() if not name.endswith("/")])


KINDS = ["parquet", "parquet-path", "jsonl", "jsonl-path", "console", "memory"]


@pytest.fixture(params=[*KINDS, *(f"{kind}-s3" for kind in KINDS)])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    kind, *more = request.param.split("-")
    base = request.getfixturevalue("object_url") if "s3" in more else str(tmp_path)
    made = Case(lambda: ab.console(), open_storage(f"{base}/job/out"))
    if kind in ("parquet", "jsonl"):
        make = {"parquet": ab.parquet, "jsonl": ab.jsonl}[kind]
        made.make = lambda: make(f"{base}/mine" if "path" in more else None)
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
    assert staged.size == case.place.size(case.name(staged.path))
    assert Staged.from_json(json.loads(json.dumps(staged.to_json()))) == staged
    assert same(sink.read(case.root, [staged]), ROWS)
    sink.publish(case.root, [staged])
    assert case.files() == [case.name(staged.final)]
    assert same(sink.read(case.root, [staged]), ROWS)


def test_nothing_is_visible_before_it_is_published(case: Case) -> None:
    staged = case.make().stage(FRAME, case.root, "s3-a0-w0")
    # Where nothing can be renamed, the commit record alone makes a file visible.
    assert case.place.exists(case.name(staged.final)) == (not case.moves)
    assert case.moves or case.place.local is None


def test_records_hold_no_place_inside_the_job_directory(case: Case) -> None:
    sink = case.make()
    staged = sink.stage(FRAME, case.root, "s3-a0-w0")
    for recorded in (staged.path, staged.final):
        assert (case.place.url in recorded) == (sink.fingerprint()["path"] is not None)
        assert case.root.url not in recorded


def test_publishing_twice_is_publishing_once(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    sink = case.make()
    staged = [sink.stage(FRAME, case.root, f"s3-a0-w{w}") for w in range(2)]
    sink.publish(case.root, staged)
    content = [case.place.read(case.name(item.final)) for item in staged]
    printed, appended = capsys.readouterr().out, list(case.target)
    sink.publish(case.root, staged)
    case.make().publish(case.root, staged)
    assert [case.place.read(case.name(item.final)) for item in staged] == content
    assert case.target == appended
    assert capsys.readouterr().out == ""
    assert bool(printed) == (sink.fingerprint()["kind"] == "console")


def test_a_driver_that_died_half_way_through_publishing_is_completed_by_the_next(case: Case) -> None:
    sink = case.make()
    staged = [sink.stage(FRAME, case.root, f"s3-a0-w{w}") for w in range(3)]
    sink.publish(case.root, staged[:1])
    successor = case.make()
    successor.discard(case.root, {item.path for item in staged}, "s3")
    successor.publish(case.root, staged)
    assert same(successor.read(case.root, staged), ROWS * 3)
    assert case.files() == sorted(case.name(item.final) for item in staged)


def test_discard_removes_what_no_record_names(case: Case) -> None:
    sink = case.make()
    before = sink.stage(FRAME, case.root, "s2-a0-w0")
    sink.publish(case.root, [before])
    kept = sink.stage(FRAME, case.root, "s3-a1-w0")
    sink.stage(FRAME, case.root, "s3-a0-w0")
    sink.stage(FRAME, case.root, "s4-a0-w0")
    sink.discard(case.root, {kept.path}, "s3")
    assert case.files() == sorted(case.name(name) for name in (kept.path, before.final))
    sink.discard(case.root, set(), "s3")
    assert case.files() == [case.name(before.final)]


def test_discard_without_a_directory_is_nothing(case: Case) -> None:
    case.make().discard(case.root, set())


def test_what_is_not_of_this_job_is_not_discarded(case: Case) -> None:
    sink = case.make()
    sink.stage(FRAME, case.root, "s3-a0-w0")
    case.place.create("s3-a0-w0.parquet", b"theirs")
    sink.discard(case.root, set())
    assert case.files() == ["s3-a0-w0.parquet"]


def test_expired_files_are_gone(case: Case) -> None:
    sink = case.make()
    staged = [sink.stage(FRAME, case.root, f"s{s}-a0-w0") for s in (3, 4)]
    sink.publish(case.root, staged)
    sink.expire(case.root, staged[:1])
    sink.expire(case.root, staged[:1])
    assert case.files() == [case.name(staged[1].final)]
    assert same(sink.read(case.root, staged[1:]), ROWS)


def test_staging_again_replaces(case: Case) -> None:
    sink = case.make()
    sink.stage(FRAME, case.root, "s3-a0-w0")
    staged = sink.stage(FRAME.head(1), case.root, "s3-a0-w0")
    sink.publish(case.root, [staged])
    assert same(sink.read(case.root, [staged]), ROWS[:1])


def test_a_lost_committed_file_is_named(case: Case) -> None:
    sink = case.make()
    staged = sink.stage(FRAME, case.root, "s3-a0-w0")
    sink.discard(case.root, set())
    if case.moves:
        with pytest.raises(CorruptError, match=r"s3-a0-w0"):
            sink.publish(case.root, [staged])
    with pytest.raises(CorruptError, match=r"s3-a0-w0.*missing"):
        sink.read(case.root, [staged])


def test_a_damaged_published_file_is_named(case: Case) -> None:
    sink = case.make()
    staged = sink.stage(FRAME, case.root, "s3-a0-w0")
    sink.publish(case.root, [staged])
    case.place.replace(case.name(staged.final), b"{ garbage")
    with pytest.raises(CorruptError, match=r"s3-a0-w0"):
        sink.read(case.root, [staged])


def test_another_jobs_file_is_not_replaced(case: Case) -> None:
    sink = case.make()
    if case.moves:
        staged = sink.stage(FRAME, case.root, "s3-a0-w0")
        case.place.create(case.name(staged.final), b"theirs")
        with pytest.raises(ConfigError, match="not this job's"):
            sink.publish(case.root, [staged])
        assert case.place.read(case.name(staged.final)) == b"theirs"
    else:
        other = open_storage(case.root.url + "-other")
        names = {sink.stage(FRAME, root, "s3-a0-w0").final.rpartition("/")[2] for root in (case.root, other)}
        assert len(names) == 2


def test_an_empty_frame_is_fine(case: Case) -> None:
    sink = case.make()
    staged = [sink.stage(FRAME.clear(), case.root, "s3-a0-w0"), sink.stage(FRAME, case.root, "s3-a0-w1")]
    sink.publish(case.root, staged)
    assert same(sink.read(case.root, staged), ROWS)
    assert sink.read(case.root, staged[:1]).height == 0
    assert sink.read(case.root, []).height == 0


def test_the_fingerprint_is_json(case: Case) -> None:
    assert json.loads(json.dumps(case.make().fingerprint())) == case.make().fingerprint()
