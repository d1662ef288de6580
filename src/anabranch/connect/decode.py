"""Lines to frames: text, CSV and JSON lines, and which lines are bad.

A decoder is a pure function of the lines.  While all lines are good no Python code runs per line; a bad
line is found by what the vectorised pass reports, and only then looked at by itself.  A record is a line:
a CSV field in quotes may hold delimiters and doubled quotes, but no line end.

Must not know: files.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
import polars as pl

from anabranch.connect.cells import failed, parse_cells
from anabranch.connect.lines import Lines, Mask, spans

Missing = Literal["bad", "null"]

_PYTHON: dict[pl.DataType, tuple[type, ...]] = {
    pl.Int64(): (int, type(None)),
    pl.UInt64(): (int, type(None)),
    pl.Float64(): (int, float, type(None)),
    pl.Boolean(): (bool, type(None)),
}
"""What `json.loads` gives for values that fit."""


class Bad(NamedTuple):
    """A line that is no record, and why; `line` counts within the lines that were given."""

    line: int
    reason: str


class Decoder(Protocol):
    """Turns lines (valid UTF-8) into a frame of exactly its schema, leaving bad lines out.

    `required` names a column that must not be null.
    """

    def decode(self, lines: Lines) -> tuple[pl.DataFrame, list[Bad]]: ...


class TextDecoder:
    """Every line is a row with one String column, blank ones too."""

    def __init__(self, column: str) -> None:
        self._column = column

    def decode(self, lines: Lines) -> tuple[pl.DataFrame, list[Bad]]:
        return lines.strings().alias(self._column).to_frame(), []


class CsvDecoder:
    """Lines of delimited cells; `header` names the cells, of which the schema's are picked.

    An empty cell is null, but in a String column it is the empty string.  Blank lines are skipped.  Without a
    quote in the block, columns are spans of the bytes themselves (11 million cells/s); with one, C code
    of the standard library parses the lines.
    """

    def __init__(
        self,
        schema: Mapping[str, pl.DataType],
        header: Sequence[str],
        delimiter: str,
        required: str | None = None,
    ) -> None:
        self._schema = dict(schema)
        self._required = required
        self._places = [list(header).index(name) for name in schema]
        self._width = len(header)
        self._delimiter = delimiter

    def decode(self, lines: Lines) -> tuple[pl.DataFrame, list[Bad]]:
        places = np.flatnonzero(lines.ends > lines.starts)
        if len(places) < len(lines):
            lines = lines.keep(lines.ends > lines.starts)
        bad: list[Bad] = []
        if b'"' in lines.data:
            columns, kept = self._quoted(lines, bad)
        else:
            columns, kept = self._plain(lines, bad)
        frame, failures = self._typed(columns)
        for row in np.flatnonzero(failures):
            bad.append(Bad(int(kept[row]), self._why(columns, int(row))))
        if failures.any():
            frame = frame.filter(pl.Series(~failures))
        return frame, sorted(Bad(int(places[line]), reason) for line, reason in bad)

    def _plain(self, lines: Lines, bad: list[Bad]) -> tuple[list[pl.Series], np.ndarray]:
        array = np.frombuffer(lines.data, np.uint8)
        cuts = np.flatnonzero(array == ord(self._delimiter)).astype(np.int64, copy=False)
        first = np.searchsorted(cuts, lines.starts)
        counts = np.searchsorted(cuts, lines.ends) - first
        good = counts == self._width - 1
        for index in np.flatnonzero(~good):
            bad.append(Bad(int(index), self._width_reason(int(counts[index]) + 1)))
        starts, ends, first = lines.starts[good], lines.ends[good], first[good]
        columns = []
        for place in self._places:
            left = starts if place == 0 else cuts[first + (place - 1)] + 1
            right = ends if place == self._width - 1 else cuts[first + place]
            columns.append(spans(lines.data, left, right))
        return columns, np.flatnonzero(good)

    def _quoted(self, lines: Lines, bad: list[Bad]) -> tuple[list[pl.Series], np.ndarray]:
        texts = lines.strings().to_list()
        rows = self._all_rows(texts)
        kept = range(len(texts))
        if rows is None:
            rows, good = [], []
            for index, text in enumerate(texts):
                row = self._one_row(text)
                if isinstance(row, str):
                    bad.append(Bad(index, row))
                else:
                    rows.append(row)
                    good.append(index)
            return self._pick(rows), np.array(good, np.int64)
        return self._pick(rows), np.array(kept, np.int64)

    def _all_rows(self, texts: list[str]) -> list[list[str]] | None:
        """All lines in one pass, or None when some line does not stand for itself."""
        try:
            rows = list(csv.reader(texts, delimiter=self._delimiter, strict=True))
        except csv.Error:
            return None
        if len(rows) != len(texts) or any(len(row) != self._width for row in rows):
            return None
        return rows

    def _one_row(self, text: str) -> list[str] | str:
        try:
            rows = list(csv.reader([text], delimiter=self._delimiter, strict=True))
        except csv.Error as error:
            return f"not a CSV line: {error}"
        row = rows[0] if rows else []
        return row if len(row) == self._width else self._width_reason(len(row))

    def _pick(self, rows: list[list[str]]) -> list[pl.Series]:
        return [pl.Series([row[place] for row in rows], dtype=pl.String) for place in self._places]

    def _width_reason(self, found: int) -> str:
        return f"expected {self._width} fields separated by {self._delimiter!r}, found {found}"

    def _typed(self, columns: list[pl.Series]) -> tuple[pl.DataFrame, np.ndarray]:
        made: list[pl.Series] = []
        failures = np.zeros(len(columns[0]), np.bool_)
        for (name, dtype), cells in zip(self._schema.items(), columns, strict=True):
            parsed = parse_cells(cells, dtype)
            if not isinstance(dtype, pl.String) and parsed.null_count():
                failures |= failed(cells, parsed, empty_is_null=name != self._required).to_numpy()
            made.append(parsed.alias(name))
        return pl.DataFrame(made), failures

    def _why(self, columns: list[pl.Series], row: int) -> str:
        for (name, dtype), cells in zip(self._schema.items(), columns, strict=True):
            cell = cells.slice(row, 1)
            if (cell[0] or name == self._required) and parse_cells(cell, dtype)[0] is None:
                return f"column {name!r}: {cell[0]!r} is not {_a(dtype)}"
        return "a cell has the wrong type"


class JsonDecoder:
    """One JSON object a line.  Fields that the schema does not name are ignored, blank lines skipped.

    With `missing="bad"` an object must have every field (null is a value); with `missing="null"` an
    absent one is null.  Timestamps, dates, times, binary and exact decimals are JSON strings.  A block
    with a bad line costs a Python call per line; a block without, none.
    """

    def __init__(
        self, schema: Mapping[str, pl.DataType], missing: Missing, required: str | None = None
    ) -> None:
        self._schema = dict(schema)
        self._required = required
        self._raw = {name: _json_type(dtype) for name, dtype in schema.items()}
        self._missing = missing

    def decode(self, lines: Lines) -> tuple[pl.DataFrame, list[Bad]]:
        places = np.flatnonzero(lines.ends > lines.starts)
        if len(places) < len(lines):
            lines = lines.keep(lines.ends > lines.starts)
        bad: list[Bad] = []
        raw = self._parse(lines.data, len(lines))
        if isinstance(raw, str):
            raw, kept, unread = self._salvage(lines)
            bad = [Bad(int(places[line]), reason) for line, reason in unread]
            places, lines = places[kept], lines.keep(kept)
        frame, reasons = self._typed(raw)
        if self._missing == "bad":
            self._absent(raw, lines, reasons)
        if reasons:
            mask = np.ones(frame.height, np.bool_)
            mask[list(reasons)] = False
            frame = frame.filter(pl.Series(mask))
        bad.extend(Bad(int(places[row]), reason) for row, reason in reasons.items())
        return frame, sorted(bad)

    def _parse(self, data: bytes, count: int) -> pl.DataFrame | str:
        """The objects as they are, or why they are not `count` of them."""
        try:
            frame = pl.read_ndjson(data, schema=self._raw)
        except pl.exceptions.PolarsError as error:
            return str(error).split("\n", 1)[0]
        return frame if frame.height == count else f"{frame.height} objects in {count} lines"

    def _salvage(self, lines: Lines) -> tuple[pl.DataFrame, Mask, list[Bad]]:
        """The objects in those lines that hold one, which lines those are, and what is wrong with others."""
        likely: list[int] = []
        doubtful: list[int] = []
        for index in range(len(lines)):
            (likely if self._plausible(lines.line(index)) else doubtful).append(index)
        frames: list[pl.DataFrame] = [pl.DataFrame(schema=self._raw)]
        order: list[int] = []
        bad: list[Bad] = []
        for indices in (likely, *([index] for index in doubtful)):
            self._halve(lines, indices, frames, order, bad)
        kept = np.zeros(len(lines), np.bool_)
        kept[order] = True
        return pl.concat(frames)[np.argsort(np.array(order, np.int64))], kept, bad

    def _plausible(self, line: bytes) -> bool:
        """A guess that only decides how soon a bad line is found; Polars has the last word."""
        try:
            value = json.loads(line)
        except ValueError:
            return False
        if not isinstance(value, dict):
            return False
        return all(
            isinstance(value.get(name), _PYTHON.get(dtype, object)) for name, dtype in self._raw.items()
        )

    def _halve(
        self, lines: Lines, indices: list[int], frames: list[pl.DataFrame], order: list[int], bad: list[Bad]
    ) -> None:
        data = b"\n".join([lines.line(index) for index in indices])
        if not data.strip():
            return
        found = self._parse(data, len(indices))
        if isinstance(found, pl.DataFrame):
            frames.append(found)
            order.extend(indices)
        elif len(indices) == 1:
            bad.append(Bad(indices[0], _json_reason(data, found)))
        else:
            middle = len(indices) // 2
            self._halve(lines, indices[:middle], frames, order, bad)
            self._halve(lines, indices[middle:], frames, order, bad)

    def _typed(self, raw: pl.DataFrame) -> tuple[pl.DataFrame, dict[int, str]]:
        made: list[pl.Series] = []
        reasons: dict[int, str] = {}
        for name, dtype in self._schema.items():
            column = raw.get_column(name)
            if name == self._required:
                for row in column.is_null().arg_true():
                    reasons[row] = f"field {name!r} must not be null"
            if column.dtype == dtype:
                made.append(column)
                continue
            text = isinstance(column.dtype, pl.String)
            parsed = parse_cells(column, dtype) if text else column.cast(dtype, strict=False)
            for row in failed(column, parsed, empty_is_null=False).arg_true() if parsed.null_count() else ():
                reasons.setdefault(row, f"field {name!r}: {column[row]!r} is not {_a(dtype)}")
            made.append(parsed.alias(name))
        return pl.DataFrame(made), reasons

    def _absent(self, raw: pl.DataFrame, lines: Lines, reasons: dict[int, str]) -> None:
        for name in self._schema:
            column = raw.get_column(name)
            if not column.null_count():
                continue
            rows = column.is_null().arg_true()
            texts = lines.strings().gather(rows)
            # In a flat object a name that is written out before a colon is there.  The rest are absent,
            # spelled with escapes, or hidden in nested objects; they are few or bad, and are looked at
            # one by one.
            written = texts.str.contains(re.escape(json.dumps(name, ensure_ascii=False)) + r"\s*:")
            nested = texts.str.count_matches("{", literal=True) > 1
            suspects = rows.filter(~written | nested)
            for row in suspects:
                if name not in json.loads(lines.line(row)):
                    reasons.setdefault(
                        row, f"field {name!r} is missing; with missing='null' it would be null"
                    )


def _json_type(dtype: pl.DataType) -> pl.DataType:
    # Polars reads only these from JSON lines with a check of the value; others panic or wrap around.
    if isinstance(dtype, pl.UInt64 | pl.Float64 | pl.Boolean | pl.String) or dtype.is_nested():
        return dtype
    if dtype.is_integer():
        return pl.Int64()
    return pl.Float64() if dtype.is_float() else pl.String()


def _json_reason(data: bytes, fallback: str) -> str:
    try:
        value = json.loads(data)
    except ValueError as error:
        return f"not JSON: {error}"
    if not isinstance(value, dict):
        return f"expected a JSON object, found {type(value).__name__}"
    return fallback or "not one JSON object on a line"


def _a(dtype: pl.DataType) -> str:
    name = str(dtype)
    return f"an {name}" if name[0] in "AEIO" else f"a {name}"
