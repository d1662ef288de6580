"""`files(...)`: a directory of files as an input.

Must not know: steps, workers, flows.
"""

from __future__ import annotations

import os
from typing import Literal, get_args

import polars as pl

from anabranch.connect.cells import check_cell_type
from anabranch.connect.decode import Missing
from anabranch.connect.filesource import FileSource
from anabranch.connect.formats import CsvFiles, JsonFiles, TextFiles, read_header
from anabranch.connect.linefiles import skip_bom
from anabranch.connect.listing import Listing
from anabranch.connect.parquetfiles import ParquetFiles, parquet_schema
from anabranch.errors import ConfigError
from anabranch.model.types import check_name, to_dtype, to_schema

FileFormat = Literal["text", "csv", "jsonl", "parquet"]

_SAMPLE_BYTES = 1 << 20
_SAMPLE_ROWS = 1000


def files(
    path: str | os.PathLike[str],
    format: FileFormat = "text",  # noqa: A002  the word that users of Spark and Polars expect
    schema: object = None,
    pattern: str = "*",
    weight: str | None = None,
    settle: float = 1.0,
    header: bool = True,
    delimiter: str = ",",
    missing: Missing = "bad",
) -> FileSource:
    """An input of files: a directory, one file, or a path with wildcards.

    Every file is a partition.  The input grows by new files and, except for Parquet, by lines appended to
    files; files never shrink or change.  Names that begin with `.` or `_` or end in `.tmp` are ignored.
    A record of a text format is a line; quoted CSV fields may not contain line ends.

    Args:
        path: a directory, a file, or a path with `*`, `?`, `[…]` or `**/`.
        format: `text` (one String column, `value`), `csv`, `jsonl` or `parquet`.
        schema: names and types of the columns, in any form that `anabranch.model.types.to_schema` takes.
        Where it is
            left out it is taken from the first file: a Parquet footer, or the first 1,000 records.
        pattern: which files of the directory.
        weight: an integer column that holds the rows' weights; it is not part of the schema then.
        settle: seconds after the last change at which a last line without a line end counts as complete.
        header: whether each CSV file's first line names its columns; otherwise they are in the schema's
        order. delimiter: what separates CSV cells; one ASCII character. missing: whether a field that a
        JSON object lacks makes the record bad, or is null.

    Raises:
        ConfigError: nothing to take the schema from, or an argument that makes no sense.
        FlowError: the schema is wrong.
    """
    if format not in get_args(FileFormat):
        raise ConfigError(f"files: format is one of {', '.join(get_args(FileFormat))}; found {format!r}")
    if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n':
        raise ConfigError(
            f"files: delimiter is one ASCII character, not a quote or line end; found {delimiter!r}"
        )
    if missing not in get_args(Missing):
        raise ConfigError(f"files: missing is 'bad' or 'null'; found {missing!r}")
    if settle < 0:
        raise ConfigError(f"files: settle is a number of seconds, 0 or more; found {settle!r}")
    listing = Listing.of(path, pattern)
    if schema is not None:
        columns = to_schema(schema)
    elif format == "text":
        columns = {"value": pl.String()}
    else:
        columns = _infer(listing, format, header, delimiter)
    _check(columns, format, weight)
    if format == "text":
        return TextFiles(listing, columns, weight, settle)
    if format == "csv":
        return CsvFiles(listing, columns, weight, settle, header, delimiter)
    if format == "jsonl":
        return JsonFiles(listing, columns, weight, settle, missing)
    return ParquetFiles(listing, columns, weight, settle)


def _check(columns: dict[str, pl.DataType], format_name: str, weight: str | None) -> None:
    if format_name == "text":
        if weight is not None:
            raise ConfigError(
                "files: text has no columns, so it cannot have a weight column; use csv or jsonl"
            )
        if list(columns.values()) != [pl.String()]:
            raise ConfigError("files: the schema of format 'text' is one String column")
    for name, dtype in columns.items():
        if format_name in ("csv", "jsonl"):
            check_cell_type(name, dtype, format_name)
    if weight is not None:
        check_name(weight)
        if weight in columns and not columns[weight].is_integer():
            raise ConfigError(f"files: weight column {weight!r} must be an integer; it is {columns[weight]}")


def _infer(listing: Listing, format_name: str, header: bool, delimiter: str) -> dict[str, pl.DataType]:
    # A listing tells its one reader when it changed, and that reader is the source.
    listing = Listing(listing.base, listing.pattern)
    listing.refresh()
    for name in listing.names:
        file = listing.base / name
        if format_name == "parquet":
            return to_schema(parquet_schema(file))
        if found := _infer_lines(listing, name, format_name, header, delimiter):
            return found
    raise ConfigError(
        f"input {listing.base / listing.pattern}: no file to take the schema from; add a first file, or say "
        "files(..., schema={'column': type, ...})"
    )


def _infer_lines(
    listing: Listing, name: str, format_name: str, header: bool, delimiter: str
) -> dict[str, pl.DataType] | None:
    path = listing.base / name
    with open(path, "rb") as file:
        file.seek(skip_bom(file))
        sample = file.read(_SAMPLE_BYTES)
        names = read_header(file, delimiter)[0]
    if len(sample) == _SAMPLE_BYTES:
        sample = sample[: sample.rfind(b"\n") + 1]
    if not sample.strip():
        return None
    if format_name == "csv" and header and len(set(names)) < len(names):
        raise ConfigError(f"input file {path}: a column is in the header twice: {', '.join(names)}")
    try:
        if format_name == "jsonl":
            frame = pl.read_ndjson(sample, infer_schema_length=_SAMPLE_ROWS)
        else:
            frame = pl.read_csv(
                sample,
                has_header=header,
                separator=delimiter,
                infer_schema_length=_SAMPLE_ROWS,
                n_rows=_SAMPLE_ROWS,
                truncate_ragged_lines=True,
                ignore_errors=True,
            )
    except pl.exceptions.PolarsError as error:
        raise ConfigError(
            f"input file {path}: cannot infer a schema ({str(error).splitlines()[0]}); "
            "say files(..., schema=...)"
        ) from None
    if not frame.height:
        return None
    return to_schema({column: _plain(dtype) for column, dtype in frame.schema.items()})


def _plain(dtype: pl.DataType) -> pl.DataType:
    """What is null throughout the sample is taken for strings."""
    return pl.String() if isinstance(dtype, pl.Null) else to_dtype(dtype)
