"""Growing directories of text, CSV and JSON lines: what is offered when, and which records are bad."""

from __future__ import annotations

import datetime as dt
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from anabranch import connect as ab
from anabranch.connect.source import Slice, Source
from anabranch.errors import ConfigError, FlowError, InputChangedError, RecordError
from anabranch.model.ids import PartitionId


def stop(where: str, record: str, reason: str) -> None:
    raise RecordError(where, reason, record)


def whole(source: Source, name: str) -> Slice:
    (found,) = [a for a in source.discover({}) if a.partition == name]
    return source.cut(found, 10**9, 1 << 40)


def read(source: Source, name: str) -> tuple[list[tuple[Any, ...]], list[tuple[str, str, str]]]:
    """Good rows without weight, and dead letters, of a whole file."""
    letters: list[tuple[str, str, str]] = []
    frames = list(source.read(whole(source, name), lambda *letter: letters.append(letter)))
    return [row[:-1] for frame in frames for row in frame.rows()], letters


def names(source: Source) -> list[str]:
    return [a.partition for a in source.discover({})]


def age(path: Path, seconds: float) -> None:
    stat = path.stat()
    os.utime(path, (stat.st_atime, stat.st_mtime - seconds))


# What is offered


def test_new_files_and_appended_lines_are_found(tmp_path: Path) -> None:
    source = ab.files(tmp_path)
    assert source.discover({}) == []
    (tmp_path / "b").write_text("1\n")
    assert names(source) == ["b"]
    (tmp_path / "a").write_text("2\n")
    assert names(source) == ["a", "b"]
    with open(tmp_path / "b", "a") as file:
        file.write("3\n4\n")
    (found,) = source.discover({PartitionId("a"): 2, PartitionId("b"): 2})
    assert (found.partition, found.start, found.end) == ("b", 2, 6)


def test_a_file_created_long_after_an_idle_listing_is_found(tmp_path: Path) -> None:
    os.utime(tmp_path, (0, 0))
    source = ab.files(tmp_path)
    assert source.discover({}) == []
    assert source.discover({}) == []
    (tmp_path / "late").write_text("x\n")
    assert names(source) == ["late"]


def test_hidden_and_temporary_names_are_ignored(tmp_path: Path) -> None:
    for name in (".a", "_b", "c.tmp", "d"):
        (tmp_path / name).write_text("x\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "e").write_text("x\n")
    assert names(ab.files(tmp_path)) == ["d"]
    assert names(ab.files(tmp_path, pattern="**/*")) == ["d", "sub/e"]
    assert names(ab.files(tmp_path, pattern="*/[a-e]")) == ["sub/e"]
    assert names(ab.files(tmp_path / "sub" / "?")) == ["e"]
    assert names(ab.files(tmp_path / "d")) == ["d"]


def test_a_new_subdirectory_is_entered(tmp_path: Path) -> None:
    source = ab.files(tmp_path, pattern="**/*.txt")
    assert names(source) == []
    (tmp_path / "2024").mkdir()
    assert names(source) == []
    (tmp_path / "2024" / "x.txt").write_text("x\n")
    assert names(source) == ["2024/x.txt"]


def test_a_last_line_without_an_end_waits_until_it_has_settled(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("one\ntw")
    source = ab.files(tmp_path, settle=60)
    (found,) = source.discover({})
    assert found.end == 4
    assert source.pending()
    with open(file, "a") as more:
        more.write("o\nthree")
    (found,) = source.discover({})
    assert found.end == 8
    age(file, 61)
    (found,) = source.discover({})
    assert found.end == 13
    assert not source.pending()
    assert read(source, "a")[0] == [("one",), ("two",), ("three",)]


def test_many_quiet_files_take_turns_and_none_is_forgotten(tmp_path: Path) -> None:
    for number in range(1100):
        file = tmp_path / f"{number:04d}"
        file.write_text("x\n")
        age(file, 1000)
    source = ab.files(tmp_path)
    ends: dict[PartitionId, int] = {}
    for _ in range(3):
        for found in source.discover(ends):
            ends[found.partition] = found.end
    assert len(ends) == 1100
    file = tmp_path / "0700"
    with open(file, "a") as more:
        more.write("y\n")
    age(file, 900)
    polls = [source.discover(ends) for _ in range(3)]
    assert any([a.partition for a in poll] == ["0700"] for poll in polls)


def test_a_truncated_file_is_noticed_by_the_driver(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\ntwo\n")
    source = ab.files(tmp_path)
    source.discover({})
    (tmp_path / "a").write_text("one\n")
    with pytest.raises(InputChangedError, match=r"a: 8 bytes were read of it, and now it has 4"):
        source.discover({PartitionId("a"): 8})


def test_a_file_that_vanishes_is_an_error_unless_it_was_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\ntwo\n")
    source = ab.files(tmp_path)
    source.discover({})
    (tmp_path / "a").unlink()
    assert source.discover({PartitionId("a"): 8}) == []
    (tmp_path / "b").write_text("one\ntwo\n")
    piece = whole(source, "b")
    (tmp_path / "b").unlink()
    with pytest.raises(InputChangedError, match="b vanished"):
        source.discover({PartitionId("a"): 8})
    with pytest.raises(InputChangedError, match="b vanished"):
        list(source.read(piece, stop))


@pytest.mark.parametrize("content", ["one\n", "One\ntwo\nthree\n", "one\ntwo\nthreE\n"])
def test_a_changed_file_is_noticed_by_the_worker(tmp_path: Path, content: str) -> None:
    (tmp_path / "a").write_text("one\ntwo\nthree\n")
    source = ab.files(tmp_path)
    piece = whole(source, "a")
    (tmp_path / "a").write_text(content)
    with pytest.raises(InputChangedError, match=r"a changed"):
        list(source.read(piece, stop))


def test_growth_is_no_change(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\n")
    source = ab.files(tmp_path)
    piece = whole(source, "a")
    with open(tmp_path / "a", "a") as file:
        file.write("two\n")
    assert [frame.rows() for frame in source.read(piece, stop)] == [[("one", 1)]]


def test_a_file_larger_than_a_block_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.connect.linefiles._BLOCK", 10)
    lines = ["x" * (i % 37) for i in range(200)]
    (tmp_path / "a").write_text("\n".join(lines))
    age(tmp_path / "a", 10)
    assert read(ab.files(tmp_path), "a")[0] == [(line,) for line in lines]


# Text


def test_text_line_ends_bom_and_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfone\r\n\r\n\ntwo\rhalf\r\n\xc3\xa9\n")
    assert read(ab.files(tmp_path), "a") == ([("one",), ("",), ("",), ("two\rhalf",), ("é",)], [])


def test_invalid_utf8_is_a_bad_record_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one\n\xff\xfe\nthr\xc3\xa9\xc3\xa9\n\xc3\nfive\n")
    rows, letters = read(ab.files(tmp_path), "a")
    assert rows == [("one",), ("thréé",), ("five",)]
    assert [where.rpartition("/")[2] for where, _, _ in letters] == ["a line 2", "a line 4"]
    assert {reason for _, _, reason in letters} == {"not valid UTF-8"}
    with pytest.raises(RecordError, match=r"a line 2: not valid UTF-8"):
        list(ab.files(tmp_path).read(whole(ab.files(tmp_path), "a"), stop))


# CSV

CSV = {"id": int, "name": str, "day": dt.date}


@pytest.mark.parametrize("quote", ["", '"'])
def test_bad_csv_lines_are_named_and_the_rest_is_read(tmp_path: Path, quote: str) -> None:
    (tmp_path / "a").write_text(
        f"id,name,day\n1,{quote}a{quote},2024-01-31\nx,b,2024-01-31\n3,c\n\n4,d,2024-02-30\n5,,\n6,f,,\n,g,2024-01-01\n"
    )
    rows, letters = read(ab.files(tmp_path, format="csv", schema=CSV), "a")
    assert rows == [(1, "a", dt.date(2024, 1, 31)), (5, "", None), (None, "g", dt.date(2024, 1, 1))]
    assert [(where.rpartition(" ")[2], record, reason) for where, record, reason in letters] == [
        ("3", "x,b,2024-01-31", "column 'id': 'x' is not an Int64"),
        ("4", "3,c", "expected 3 fields separated by ',', found 2"),
        ("6", "4,d,2024-02-30", "column 'day': '2024-02-30' is not a Date"),
        ("8", "6,f,,", "expected 3 fields separated by ',', found 4"),
    ]


def test_line_numbers_hold_in_later_slices(tmp_path: Path) -> None:
    body = "".join(f"{i}\n" for i in range(500)) + "bad\n" + "".join(f"{i}\n" for i in range(500))
    (tmp_path / "a").write_text("id\n" + body)
    source = ab.files(tmp_path, format="csv", schema={"id": int})
    letters: list[str] = []
    for piece in source.split(whole(source, "a"), 7):
        for _ in source.read(piece, lambda where, record, reason: letters.append(where)):
            pass
    assert letters == [f"input file {tmp_path / 'a'} line 502"]


def test_csv_quotes_stand_within_a_line(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('id,name\n1,"a,""b"""\n2,"open\n3,x"y\n4,"c"d\n5,\'e\'\n')
    rows, letters = read(ab.files(tmp_path, format="csv", schema={"id": int, "name": str}), "a")
    assert rows == [(1, 'a,"b"'), (3, 'x"y'), (5, "'e'")]
    assert [where.rpartition(" ")[2] for where, _, _ in letters] == ["3", "5"]


def test_csv_columns_are_found_by_header(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("name;extra;id\nx;-;1\n")
    (tmp_path / "b").write_text("id;name\n2;y\n")
    (tmp_path / "c").write_text("id;nome\n2;y\n")
    source = ab.files(tmp_path, format="csv", schema={"id": int, "name": str}, delimiter=";")
    assert read(source, "a")[0] == [(1, "x")]
    assert read(source, "b")[0] == [(2, "y")]
    with pytest.raises(RecordError, match=r"c line 1: column 'name' is missing; the header has id, nome"):
        read(source, "c")


def test_csv_without_header(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1,x\n2,y\n")
    source = ab.files(tmp_path, format="csv", schema={"id": int, "name": str}, header=False)
    assert read(source, "a")[0] == [(1, "x"), (2, "y")]


def test_csv_types(tmp_path: Path) -> None:
    schema = {
        "f": float,
        "b": bool,
        "t": pl.Datetime("us"),
        "z": pl.Datetime("ms", "UTC"),
        "c": pl.Time,
        "m": pl.Decimal(10, 2),
        "u": pl.UInt8,
        "y": bytes,
    }
    (tmp_path / "a").write_text(
        "f,b,t,z,c,m,u,y\n"
        "1e3,TRUE,2024-01-02T03:04:05.5,2024-01-02T03:04:05Z,03:04:05,1.50,255,abc\n"
        "nan,0,2024-01-02 03:04:05,2024-01-02 03:04:05+02:00,23:59:59.25,-7,0,\n"
        "1,yes,2024-01-02,2024-01-02T00:00:00Z,00:00:00,1,1,a\n"
        "1,1,2024-01-02,2024-01-02T00:00:00Z,00:00:00,1,256,a\n"
    )
    rows, letters = read(ab.files(tmp_path, format="csv", schema=schema), "a")
    utc = dt.UTC
    assert rows[0] == (
        1000.0,
        True,
        dt.datetime(2024, 1, 2, 3, 4, 5, 500000),
        dt.datetime(2024, 1, 2, 3, 4, 5, tzinfo=utc),
        dt.time(3, 4, 5),
        Decimal("1.50"),
        255,
        b"abc",
    )
    assert rows[1][1:5] == (
        False,
        dt.datetime(2024, 1, 2, 3, 4, 5),
        dt.datetime(2024, 1, 2, 1, 4, 5, tzinfo=utc),
        dt.time(23, 59, 59, 250000),
    )
    assert [reason for _, _, reason in letters] == [
        "column 'b': 'yes' is not a Boolean",
        "column 'u': '256' is not a UInt8",
    ]


def test_a_null_weight_is_bad(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("id,op\n1,1\n2,\n3,-1\n")
    source = ab.files(tmp_path, format="csv", schema={"id": int}, weight="op")
    letters: list[str] = []
    frames = list(source.read(whole(source, "a"), lambda where, record, reason: letters.append(where)))
    assert [row for frame in frames for row in frame.rows()] == [(1, 1), (3, -1)]
    assert [where.rpartition(" ")[2] for where in letters] == ["3"]
    assert not source.append_only


# JSON lines


def test_bad_json_lines_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    lines = [
        '{"id": 1, "name": "a"}',
        "{nonsense",
        "",
        '{"name": "c", "id": 3, "extra": [1]}',
        '{"id": "4", "name": "d"}',
        "[5]",
        '{"id": 6}',
        "   ",
        '{"id": 7, "name": null}',
        '{"id": 8.5, "name": "x"}',
        '{"id": 9, "n\\u0061me": null}',
        '{"id": 10, "x": "\\"name\\":"}',
        '{"id": 11, "x": {"name": 1}}',
    ]
    (tmp_path / "a").write_text("\n".join(lines) + "\n")
    rows, letters = read(ab.files(tmp_path, format="jsonl", schema={"id": int, "name": str}), "a")
    assert rows == [(1, "a"), (3, "c"), (7, None), (9, None)]
    assert [int(where.rpartition(" ")[2]) for where, _, _ in letters] == [2, 5, 6, 7, 10, 12, 13]
    assert [record for _, record, _ in letters] == [lines[i - 1] for i in (2, 5, 6, 7, 10, 12, 13)]
    assert letters[3][2].startswith("field 'name' is missing")
    assert letters[2][2] == "expected a JSON object, found list"


def test_an_absent_field_may_be_null(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"id": 1}\n{"id": 2, "name": "b"}\n')
    source = ab.files(tmp_path, format="jsonl", schema={"id": int, "name": str}, missing="null")
    assert read(source, "a") == ([(1, None), (2, "b")], [])


def test_json_types(tmp_path: Path) -> None:
    schema = {
        "d": dt.date,
        "t": dt.datetime,
        "m": pl.Decimal(10, 2),
        "u": pl.UInt8,
        "f": pl.Float32,
        "l": pl.List(pl.Int64),
    }
    (tmp_path / "a").write_text(
        '{"d": "2024-01-31", "t": "2024-01-31T01:02:03", "m": "1.50", "u": 200, "f": 1, "l": [1, null]}\n'
        '{"d": "2024-01-32", "t": null, "m": 1.5, "u": 1, "f": 1.5, "l": null}\n'
        '{"d": null, "t": null, "m": 1.5, "u": 300, "f": 1.5, "l": null}\n'
        '{"d": null, "t": null, "m": 1.5, "u": 3, "f": 1.5, "l": null}\n'
    )
    rows, letters = read(ab.files(tmp_path, format="jsonl", schema=schema), "a")
    assert rows == [
        (dt.date(2024, 1, 31), dt.datetime(2024, 1, 31, 1, 2, 3), Decimal("1.50"), 200, 1.0, [1, None]),
        (None, None, Decimal("1.50"), 3, 1.5, None),
    ]
    assert [reason for _, _, reason in letters] == [
        "field 'd': '2024-01-32' is not a Date",
        "field 'u': 300 is not a UInt8",
    ]


# Building


def test_schemas_are_inferred(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,name,x\n1,a,0.5\n2,b,\n")
    (tmp_path / "a.jsonl").write_text('{"id": 1, "tags": ["x"], "none": null}\n')
    pl.DataFrame({"id": [1], "op": [1]}).write_parquet(tmp_path / "a.parquet")
    csv = ab.files(tmp_path, format="csv", pattern="*.csv")
    assert csv.schema == {"id": pl.Int64(), "name": pl.String(), "x": pl.Float64()}
    jsonl = ab.files(tmp_path / "*.jsonl", format="jsonl")
    assert jsonl.schema == {"id": pl.Int64(), "tags": pl.List(pl.String()), "none": pl.String()}
    parquet = ab.files(tmp_path / "a.parquet", format="parquet", weight="op")
    assert parquet.schema == {"id": pl.Int64()}


@pytest.mark.parametrize("format_name", ["csv", "jsonl", "parquet"])
def test_files_that_gave_the_schema_are_read_though_nothing_changed_since(
    tmp_path: Path, format_name: str
) -> None:
    frame = pl.DataFrame({"id": [1]})
    file = tmp_path / "a"
    {"csv": frame.write_csv, "jsonl": frame.write_ndjson, "parquet": frame.write_parquet}[format_name](file)
    os.utime(tmp_path, (0, 0))
    source = ab.files(tmp_path, format=format_name)  # type: ignore[arg-type]
    assert read(source, "a") == ([(1,)], [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "nowhere"}, "does not exist; create the directory"),
        ({"format": "csv"}, r"no file to take the schema from.*schema="),
        ({"format": "xml"}, "format is one of text, csv, jsonl, parquet"),
        ({"format": "csv", "delimiter": "||", "schema": {"a": int}}, "one ASCII character"),
        ({"format": "csv", "schema": {"a": pl.List(pl.Int64)}}, "'a': type List.* cannot be read from csv"),
        (
            {"format": "jsonl", "schema": {"a": pl.Array(pl.Int64, 2)}},
            "'a': type Array.* cannot be read from jsonl",
        ),
        (
            {"format": "jsonl", "schema": {"a": pl.List(pl.Time)}},
            "'a': type List.* cannot be read from jsonl",
        ),
        ({"schema": {"a": int}}, "one String column"),
        ({"weight": "op"}, "cannot have a weight column"),
        ({"format": "csv", "schema": {"op": str, "a": int}, "weight": "op"}, "must be an integer"),
        ({"format": "csv", "schema": {"op": int}, "weight": "op"}, "no column is left"),
        ({"format": "jsonl", "schema": {"a": int}, "missing": "skip"}, "'bad' or 'null'"),
        ({"settle": -1}, "0 or more"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    path = tmp_path / arguments.pop("path", "")
    with pytest.raises(ConfigError, match=message):
        ab.files(path, **arguments)


def test_wrong_schemas(tmp_path: Path) -> None:
    with pytest.raises(FlowError, match="'__x'"):
        ab.files(tmp_path, format="csv", schema={"__x": int})


def test_a_directory_that_goes_away_while_running(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    source = ab.files(data)
    source.discover({})
    data.rmdir()
    with pytest.raises(ConfigError, match="is gone"):
        source.discover({})
