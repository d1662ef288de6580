"""The vectorised decoders against plain Python, one line at a time."""

from __future__ import annotations

import csv
import json
from typing import Any

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.connect.decode import CsvDecoder, JsonDecoder
from anabranch.connect.lines import Lines, drop

SCHEMA = {"n": pl.Int64(), "s": pl.String()}

CELLS = st.sampled_from(["1", "-20", "x", "", '"q"', '"a,b"', '"', 'a"b', "1.5", "é", " 2"])
CSV_LINES = st.lists(st.lists(CELLS, min_size=0, max_size=4).map(",".join), max_size=12)


def csv_oracle(line: str) -> list[Any] | None:
    """The row, or None for a bad line."""
    try:
        rows = list(csv.reader([line], strict=True))
    except csv.Error:
        return None
    if len(rows[0]) != 2:
        return None
    number, text = rows[0]
    if number and not number.lstrip("-").isdigit():
        return None
    return [int(number) if number else None, text]


@settings(max_examples=60)
@given(CSV_LINES, st.sampled_from(["\n", "\r\n"]))
def test_csv(lines: list[str], end: str) -> None:
    data = "".join(line + end for line in lines).encode()
    frame, bad = CsvDecoder(SCHEMA, ["n", "s"], ",").decode(Lines.split(data))
    wanted = [csv_oracle(line) for line in lines if line]
    assert frame.rows() == [tuple(row) for row in wanted if row is not None]
    assert dict(frame.schema) == SCHEMA
    assert [line for line, _ in bad] == [
        i for i, line in enumerate(lines) if line and csv_oracle(line) is None
    ]


OBJECTS = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            "n": st.sampled_from([1, -5, None, "x", 1.5, True]),
            "s": st.sampled_from(["a", None, '"n":']),
        },
    ).map(json.dumps),
    st.sampled_from(
        [
            "",
            "  ",
            "{",
            "[1]",
            "5",
            '{"n": 1, "s": "b"} x',
            '{"s": {"n": 1}, "n": 2}',
            '{"x": {"n": 1}, "s": ""}',
        ]
    ),
)


def json_oracle(line: str) -> tuple[Any, ...] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    if not isinstance(value, dict) or "n" not in value or "s" not in value:
        return None
    n, s = value["n"], value["s"]
    if n is not None and type(n) is not int:
        return None
    return n, s if s is None or isinstance(s, str) else json.dumps(s)


@settings(max_examples=60)
@given(st.lists(OBJECTS, max_size=12))
def test_json(lines: list[str]) -> None:
    data = "".join(line + "\n" for line in lines).encode()
    frame, bad = JsonDecoder(SCHEMA, "bad").decode(Lines.split(data))
    wanted = [json_oracle(line) for line in lines if line.strip()]
    assert frame.rows() == [row for row in wanted if row is not None]
    assert dict(frame.schema) == SCHEMA
    assert [line for line, _ in bad] == [
        i for i, line in enumerate(lines) if line.strip() and json_oracle(line) is None
    ]


@settings(max_examples=50)
@given(st.lists(st.text(st.sampled_from("aé\r,x "), max_size=6), max_size=10), st.booleans(), st.data())
def test_lines(texts: list[str], ended: bool, data: st.DataObject) -> None:
    block = "\n".join(texts).encode() + (b"\n" if ended and texts else b"")
    lines = Lines.split(block)
    wanted = block.split(b"\n")
    if wanted[-1] == b"":
        wanted.pop()
    wanted = [line.removesuffix(b"\r") for line in wanted]
    assert [lines.line(i) for i in range(len(lines))] == wanted
    assert lines.strings().to_list() == [line.decode() for line in wanted]
    gone = data.draw(st.sets(st.integers(0, max(0, len(wanted) - 1)), max_size=3)) if wanted else set()
    left = [line.decode() for i, line in enumerate(wanted) if i not in gone]
    kept = drop(lines, sorted(gone))
    assert kept.strings().to_list() == left
    assert kept.compact().strings().to_list() == left
    assert kept.compact().offsets.tolist() == kept.offsets.tolist()
