from __future__ import annotations

import datetime as dt
import os
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anabranch import connect as ab
from anabranch.connect import parquetfiles
from anabranch.connect.source import Available, Slice, Source
from anabranch.errors import FlowError, InputChangedError, RecordError
from anabranch.model.ids import PartitionId


def stop(where: str, record: str, reason: str) -> None:
    raise RecordError(where, reason, record)


def write(path: Path, rows: range, group: int = 100) -> None:
    pl.DataFrame({"n": rows}).write_parquet(path, row_group_size=group)


def available(source: Source) -> Available:
    (found,) = source.discover({})
    return found


def numbers(source: Source, piece: Slice) -> list[int]:
    return [n for frame in source.read(piece, stop) for n in frame.get_column("n")]


def test_cuts_prefer_row_groups_when_they_fit(tmp_path: Path) -> None:
    write(tmp_path / "a", range(1000))
    source = ab.files(tmp_path, format="parquet")
    found = available(source)
    assert source.cut(found, 250, 1 << 30).end == 200
    assert source.cut(found, 199, 1 << 30).end == 100
    assert source.cut(found, 50, 1 << 30).end == 50
    assert source.cut(found, 10**9, 1 << 30).end == 1000
    tail = Available(found.partition, 950, 1000, 50, 400)
    assert source.cut(tail, 30, 1 << 30).end == 980
    assert source.cut(found, 10**9, 1).end == 1


def test_splits_prefer_row_groups_when_they_are_near(tmp_path: Path) -> None:
    write(tmp_path / "a", range(1000), 90)
    source = ab.files(tmp_path, format="parquet")
    piece = source.cut(available(source), 10**9, 1 << 30)
    assert [p.end for p in source.split(piece, 2)] == [540, 1000]
    assert [p.end for p in source.split(piece, 3)] == [360, 630, 1000]
    small = Slice(piece.partition, 0, 80, 80, 640, piece.extra)
    assert [p.end for p in source.split(small, 2)] == [40, 80]


@pytest.mark.parametrize(
    ("start", "end"), [(0, 1000), (0, 1), (999, 1000), (95, 105), (100, 200), (150, 950), (410, 415)]
)
@pytest.mark.parametrize("group", [100, 10_000])
def test_any_range_is_read_exactly(tmp_path: Path, start: int, end: int, group: int) -> None:
    write(tmp_path / "a", range(1000), group)
    source = ab.files(tmp_path, format="parquet")
    extra = source.cut(available(source), 10**9, 1 << 30).extra
    assert numbers(source, Slice(PartitionId("a"), start, end, 0, 0, extra)) == list(range(start, end))


def test_the_footer_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", range(1000))
    source = ab.files(tmp_path, format="parquet")
    piece = source.cut(available(source), 10**9, 1 << 30)
    calls = []
    monkeypatch.setattr(parquetfiles.pq, "read_metadata", lambda path: calls.append(path))
    for part in source.split(piece, 10):
        numbers(source, part)
    assert calls == []


def test_new_files_are_found_and_old_ones_may_go(tmp_path: Path) -> None:
    write(tmp_path / "b", range(10))
    source = ab.files(tmp_path, format="parquet")
    assert [a.partition for a in source.discover({})] == ["b"]
    write(tmp_path / "a", range(5))
    assert [(a.partition, a.rows) for a in source.discover({})] == [("a", 5), ("b", 10)]
    (tmp_path / "b").unlink()
    assert [a.partition for a in source.discover({PartitionId("b"): 10})] == ["a"]


def test_an_unread_file_that_goes_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "b", range(10))
    source = ab.files(tmp_path, format="parquet")
    piece = source.cut(available(source), 5, 1 << 30)
    (tmp_path / "b").unlink()
    with pytest.raises(InputChangedError, match="b vanished"):
        source.discover({PartitionId("b"): 5})
    with pytest.raises(InputChangedError, match="b vanished"):
        numbers(source, piece)


def test_another_file_of_the_same_name_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / "a", range(10))
    source = ab.files(tmp_path, format="parquet")
    piece = source.cut(available(source), 5, 1 << 30)
    write(tmp_path / "a", range(1, 11))
    with pytest.raises(InputChangedError, match="a changed: its footer"):
        numbers(source, piece)
    write(tmp_path / "a", range(3))
    fresh = ab.files(tmp_path, format="parquet")
    with pytest.raises(InputChangedError, match="10 rows were read of it, and now it has 3"):
        fresh.discover({PartitionId("a"): 10})


def test_a_file_that_is_not_parquet_yet_is_waited_for(tmp_path: Path) -> None:
    source = ab.files(tmp_path, format="parquet", schema={"n": int}, settle=60)
    whole = tmp_path / "whole.tmp"
    write(whole, range(10))
    data = whole.read_bytes()
    (tmp_path / "a").write_bytes(data[:100])
    assert source.discover({}) == []
    assert source.pending()
    (tmp_path / "a").write_bytes(data)
    assert available(source).rows == 10
    assert not source.pending()


def test_a_file_that_is_not_parquet_is_an_error(tmp_path: Path) -> None:
    source = ab.files(tmp_path, format="parquet", schema={"n": int}, settle=1)
    (tmp_path / "a").write_bytes(b"hello, world")
    os.utime(tmp_path / "a", (0, 0))
    with pytest.raises(RecordError, match="a: not a readable Parquet file"):
        source.discover({})


def test_a_missing_column_and_a_wrong_type_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a", range(10))
    source = ab.files(tmp_path, format="parquet", schema={"n": int, "m": int})
    with pytest.raises(RecordError, match="a: column 'm' is missing; the file has n"):
        numbers(source, source.cut(available(source), 5, 1 << 30))
    source = ab.files(tmp_path, format="parquet", schema={"n": str})
    with pytest.raises(RecordError, match="a: column 'n' is Int64, and the input's schema says String"):
        numbers(source, source.cut(available(source), 5, 1 << 30))


def test_narrower_numbers_are_widened_and_too_large_ones_refused(tmp_path: Path) -> None:
    pl.DataFrame({"n": pl.Series([1, 2], dtype=pl.Int16)}).write_parquet(tmp_path / "a")
    source = ab.files(tmp_path, format="parquet", schema={"n": int})
    assert numbers(source, source.cut(available(source), 5, 1 << 30)) == [1, 2]
    pl.DataFrame({"n": [1, 300]}).write_parquet(tmp_path / "a")
    source = ab.files(tmp_path, format="parquet", schema={"n": pl.UInt8})
    with pytest.raises(RecordError, match=r"a: "):
        numbers(source, source.cut(available(source), 5, 1 << 30))


def test_types_of_other_writers(tmp_path: Path) -> None:
    table = pa.table(
        {
            "d": pa.array(["x", "y", "x"]).dictionary_encode(),
            "t": pa.array([dt.datetime(2024, 1, 2)] * 3, pa.timestamp("ns")),
            "s": pa.array(["a", None, "c"], pa.string()),
            "l": pa.array([[1], [], None], pa.list_(pa.int32())),
        }
    )
    pq.write_table(table, tmp_path / "a")
    source = ab.files(tmp_path, format="parquet")
    assert source.schema == {
        "d": pl.String(),
        "t": pl.Datetime("ns"),
        "s": pl.String(),
        "l": pl.List(pl.Int32()),
    }
    piece = source.cut(available(source), 10, 1 << 30)
    (frame,) = source.read(piece, stop)
    assert frame.get_column("d").to_list() == ["x", "y", "x"]
    assert frame.get_column("l").to_list() == [[1], [], None]


def test_an_unsupported_type_is_refused_when_the_flow_is_built(tmp_path: Path) -> None:
    pq.write_table(pa.table({"m": pa.array([], pa.map_(pa.string(), pa.int64()))}), tmp_path / "a")
    with pytest.raises(FlowError, match=r"a: column 'm': unsupported type map"):
        ab.files(tmp_path, format="parquet")


def test_null_weights_are_bad_rows(tmp_path: Path) -> None:
    pl.DataFrame({"n": [1, 2, 3], "op": [1, None, -1]}).write_parquet(tmp_path / "a")
    source = ab.files(tmp_path, format="parquet", weight="op")
    letters: list[str] = []
    piece = source.cut(available(source), 10, 1 << 30)
    (frame,) = source.read(piece, lambda where, record, reason: letters.append(where))
    assert frame.rows() == [(1, 1), (3, -1)]
    assert letters == [f"input file {tmp_path / 'a'} row 1"]


def test_an_empty_file_offers_nothing(tmp_path: Path) -> None:
    write(tmp_path / "a", range(0))
    source = ab.files(tmp_path, format="parquet")
    assert source.discover({}) == []
    assert not source.pending()
