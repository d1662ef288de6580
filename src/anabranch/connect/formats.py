"""The three formats of lines: what a file begins with, and which decoder reads it.

Must not know: steps, workers, flows.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from typing import IO, Any

import polars as pl

from anabranch.connect.decode import CsvDecoder, Decoder, JsonDecoder, Missing, TextDecoder
from anabranch.connect.linefiles import LineFiles, skip_bom
from anabranch.connect.listing import Listing
from anabranch.errors import RecordError
from anabranch.model.ids import PartitionId

_LONGEST_HEADER = 1 << 20


class TextFiles(LineFiles):
    """Every line is a row; its one column is a String."""

    format_name = "text"

    def _decoder(self, file: IO[bytes], partition: PartitionId) -> tuple[Decoder, int]:
        return TextDecoder(next(iter(self.schema))), skip_bom(file)


class JsonFiles(LineFiles):
    """Every line is a JSON object."""

    format_name = "jsonl"

    def __init__(
        self,
        listing: Listing,
        schema: Mapping[str, pl.DataType],
        weight: str | None,
        settle: float,
        missing: Missing,
    ) -> None:
        super().__init__(listing, schema, weight, settle)
        self._missing = missing

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "missing": self._missing}

    def _decoder(self, file: IO[bytes], partition: PartitionId) -> tuple[Decoder, int]:
        return JsonDecoder(self._read_schema, self._missing, self._weight), skip_bom(file)


class CsvFiles(LineFiles):
    """Every line is a record of delimited cells; with a header, each file's first line says in which
    order."""

    format_name = "csv"

    def __init__(
        self,
        listing: Listing,
        schema: Mapping[str, pl.DataType],
        weight: str | None,
        settle: float,
        header: bool,
        delimiter: str,
    ) -> None:
        super().__init__(listing, schema, weight, settle)
        self._given = list(schema)
        """The order of cells where no header says it."""
        if weight is not None and weight not in schema:
            self._given.append(weight)
        self._header = self._preamble = header
        self._delimiter = delimiter

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "header": self._header, "delimiter": self._delimiter}

    def _decoder(self, file: IO[bytes], partition: PartitionId) -> tuple[Decoder, int]:
        names, first = self._given, skip_bom(file)
        if self._header:
            names, first = read_header(file, self._delimiter)
            where = f"input file {self.path_of(partition)} line 1"
            for name in self._read_schema:
                if names.count(name) != 1:
                    what = f"column {name!r} is {'there twice' if name in names else 'missing'}"
                    raise RecordError(where, f"{what}; the header has {', '.join(names)}")
        return CsvDecoder(self._read_schema, names, self._delimiter, self._weight), first


def read_header(file: IO[bytes], delimiter: str) -> tuple[list[str], int]:
    """The names in a CSV file's first line, and where the next line begins."""
    begin = skip_bom(file)
    file.seek(begin)
    line = file.readline(_LONGEST_HEADER)
    text = line.decode(errors="replace").rstrip("\r\n")
    rows = list(csv.reader([text], delimiter=delimiter))
    return (rows[0] if rows else []), begin + len(line)
