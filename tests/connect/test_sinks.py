from __future__ import annotations

import datetime as dt
import errno
import json
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from anabranch import connect as ab
from anabranch.errors import ConfigError, StorageFullError
from anabranch.storage import open_storage

FRAME = pl.DataFrame({"key": ["a", "b", "c"], "__weight": [1, -1, 2], "__step": [7, 7, 8]})


def test_memory_appends_rows_of_the_driver_only(tmp_path: Path) -> None:
    target: list[dict[str, Any]] = []
    sink = ab.memory(target)
    staged = sink.stage(FRAME, open_storage(tmp_path), "s7")
    assert target == []
    sink.publish(open_storage(tmp_path), [staged])
    assert target == FRAME.to_dicts()


def test_memory_needs_a_list() -> None:
    with pytest.raises(ConfigError, match="a list is needed"):
        ab.memory(())  # type: ignore[arg-type]


def test_console_prints_step_weight_and_row_up_to_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = ab.console(limit=1)
    sink.publish(open_storage(tmp_path), [sink.stage(FRAME, open_storage(tmp_path), "s7")])
    assert capsys.readouterr().out == "step 7  +1  key='a'\nstep 7  … and 1 more\nstep 8  +2  key='c'\n"


def test_jsonl_is_plain_json(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {
            "d": [dt.date(2024, 1, 2)],
            "m": [Decimal("1.50")],
            "b": [b"\x00\xff"],
            "__weight": [1],
            "__step": [0],
        }
    )
    sink = ab.jsonl(tmp_path)
    staged = sink.stage(frame, open_storage("unused"), "s0")
    sink.publish(open_storage(tmp_path), [staged])
    assert json.loads((tmp_path / "s0.jsonl").read_text()) == {
        "d": "2024-01-02",
        "m": "1.50",
        "b": "AP8=",
        "__weight": 1,
        "__step": 0,
    }


def test_parquet_keeps_every_type(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {
            "i": pl.Series([1, None], dtype=pl.UInt8),
            "t": pl.Series([dt.datetime(2024, 1, 2, 3, 4, 5, 6), None], dtype=pl.Datetime("us", "UTC")),
            "m": pl.Series([Decimal("1.50"), None], dtype=pl.Decimal(10, 2)),
            "b": [b"\x00\xff", None],
            "l": [[1, 2], None],
            "s": [{"a": "x"}, None],
            "__weight": [1, 1],
            "__step": [0, 0],
        }
    )
    sink = ab.parquet()
    staged = sink.stage(frame, open_storage(tmp_path), "s0")
    sink.publish(open_storage(tmp_path), [staged])
    assert sink.read(open_storage(tmp_path), [staged]).equals(frame)
    assert sink.read(open_storage(tmp_path), [staged]).schema == frame.schema
    # A path like key=value must not be taken for a partition column.
    other = open_storage(tmp_path / "year=2024")
    staged = sink.stage(frame, other, "s0")
    sink.publish(other, [staged])
    assert sink.read(other, [staged]).columns == frame.columns


def test_published_files_are_an_input_for_files(tmp_path: Path) -> None:
    sink = ab.parquet(tmp_path)
    sink.publish(open_storage(tmp_path), [sink.stage(FRAME, open_storage(tmp_path), "s7")])
    sink.stage(FRAME, open_storage(tmp_path), "s8")
    source = ab.files(tmp_path, format="parquet", schema={"key": str})
    assert [a.partition for a in source.discover({})] == ["s7.parquet"]


def test_a_full_disk_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFullError, match=r"s7\.parquet"):
        ab.parquet(tmp_path).stage(FRAME, open_storage(tmp_path), "s7")
