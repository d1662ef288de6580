"""Round trips, canonicity and injectivity of encoded rows over random schemas, and bytes on disk."""

from __future__ import annotations

import datetime as dt
import pickle
import struct
from decimal import Decimal
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import CorruptError
from anabranch.model.hashing import row_hashes
from anabranch.model.rowcodec import RowCodec

FIXED: list[tuple[pl.DataType, st.SearchStrategy[Any]]] = [
    (pl.Int8(), st.integers(-128, 127)),
    (pl.UInt16(), st.integers(0, 2**16 - 1)),
    (pl.Int32(), st.integers(-(2**31), 2**31 - 1)),
    (pl.Int64(), st.integers(-(2**63), 2**63 - 1)),
    (pl.UInt64(), st.integers(0, 2**64 - 1)),
    (pl.Float32(), st.floats(width=32, allow_nan=False)),
    (pl.Float64(), st.floats(allow_nan=False)),
    (pl.Boolean(), st.booleans()),
    (pl.Date(), st.dates()),
    (pl.Time(), st.times()),
    (pl.Datetime("us"), st.datetimes()),
    (pl.Datetime("ms"), st.datetimes().map(lambda d: d.replace(microsecond=1000))),
    (
        pl.Datetime("ns", "Europe/Berlin"),
        st.datetimes(dt.datetime(1971, 1, 1), dt.datetime(2200, 1, 1)).map(
            lambda d: d.replace(tzinfo=dt.UTC)
        ),
    ),
    (pl.Duration("us"), st.timedeltas(dt.timedelta(-1000), dt.timedelta(1000))),
    (pl.Decimal(38, 4), st.integers(-(10**34), 10**34).map(lambda n: Decimal(f"{n}e-4"))),
    (pl.Decimal(9, 0), st.integers(-(10**8), 10**8).map(Decimal)),
]
VARIABLE: list[tuple[pl.DataType, st.SearchStrategy[Any]]] = [
    (pl.String(), st.text(max_size=20)),
    (pl.Binary(), st.binary(max_size=20)),
    (pl.Enum(["red", "green", ""]), st.sampled_from(["red", "green", ""])),
    (pl.List(pl.String()), st.lists(st.one_of(st.none(), st.text(max_size=3)), max_size=3)),
    (pl.List(pl.List(pl.Int16())), st.lists(st.lists(st.integers(-9, 9), max_size=2), max_size=3)),
    (pl.Array(pl.Int32(), 2), st.lists(st.integers(-9, 9), min_size=2, max_size=2)),
    (
        pl.Struct({"x": pl.Int64(), "y": pl.String(), "z": pl.List(pl.Date())}),
        st.fixed_dictionaries(
            {
                "x": st.one_of(st.none(), st.integers(-9, 9)),
                "y": st.one_of(st.none(), st.text(max_size=3)),
                "z": st.one_of(st.none(), st.lists(st.dates(), max_size=2)),
            }
        ),
    ),
    (pl.Null(), st.none()),
]


@st.composite
def frames(draw: st.DrawFn, types: list[tuple[pl.DataType, st.SearchStrategy[Any]]]) -> pl.DataFrame:
    chosen = draw(st.lists(st.sampled_from(types), min_size=1, max_size=10))
    height = draw(st.integers(0, 8))
    columns = []
    for place, (dtype, values) in enumerate(chosen):
        cells = draw(st.lists(st.one_of(values, st.none()), min_size=height, max_size=height))
        columns.append(pl.Series(f"c{place}", cells, dtype=dtype))
    return pl.DataFrame(columns)


def check(frame: pl.DataFrame) -> None:
    codec = RowCodec(frame.schema)
    rows = codec.encode(frame)
    assert all(type(row) is bytes for row in rows)
    back = codec.decode(rows)
    assert back.schema == frame.schema
    assert back.rows() == frame.rows()
    # Canonical and injective: bytes are equal exactly where rows are, wherever the row stands.
    shown = [repr(row) for row in frame.rows()]
    for i, row in enumerate(rows):
        for j, other in enumerate(rows):
            assert (row == other) == (shown[i] == shown[j])
    half = frame.height // 2
    shuffled = pl.concat([frame[half:], frame[:half]], rechunk=False)
    assert codec.encode(shuffled) == rows[half:] + rows[:half]


@settings(max_examples=60)
@given(frames(FIXED))
def test_fixed_width_rows_round_trip(frame: pl.DataFrame) -> None:
    check(frame)


@settings(max_examples=120)
@given(frames(FIXED + VARIABLE))
def test_rows_round_trip(frame: pl.DataFrame) -> None:
    check(frame)


def test_bytes_on_disk() -> None:
    frame = pl.DataFrame(
        {"id": [1, None], "name": ["é", None], "on": [True, False], "raw": [b"", b"\x00\x01"]},
        schema={"id": pl.Int32, "name": pl.String, "on": pl.Boolean, "raw": pl.Binary},
    )
    assert RowCodec(frame.schema).encode(frame) == [
        b"\x00" + struct.pack("<i?II", 1, True, 2, 0) + "é".encode(),
        b"\x03" + struct.pack("<i?II", 0, False, 0, 2) + b"\x00\x01",
    ]
    assert RowCodec({"a": pl.List(pl.Int8())}).encode(
        pl.DataFrame({"a": [[5, None]]}, schema={"a": pl.List(pl.Int8)})
    ) == [b"\x00" + struct.pack("<I", 12) + b"\x02\x00\x00\x00\x00\x05" + b"\x02\x00\x00\x00\x01\x00"]
    assert RowCodec({"d": pl.Decimal(5, 2)}).encode(
        pl.DataFrame({"d": [Decimal("-0.01")]}, schema={"d": pl.Decimal(5, 2)})
    ) == [b"\x00" + b"\xff" * 16]


def test_more_than_eight_columns_and_nulls_in_each() -> None:
    frame = pl.DataFrame({f"c{i}": [None if i == j else j for j in range(20)] for i in range(20)})
    check(frame)


def test_floats_keep_their_bits() -> None:
    bits = np.array([0x7FF8000000000001, 0xFFF8000000000000, 1 << 63, 0], dtype=np.uint64)
    frame = pl.DataFrame({"x": bits.view(np.float64)})
    codec = RowCodec(frame.schema)
    rows = codec.encode(frame)
    assert len(set(rows)) == 4
    assert codec.decode(rows)["x"].to_numpy().view(np.uint64).tolist() == bits.tolist()


def test_garbage_under_nulls_does_not_show() -> None:
    second_is_null = pa.py_buffer(b"\x01")
    mask = pa.array([False, True])
    decimals = pa.array([Decimal("7.5"), Decimal("8.5")], pa.decimal128(10, 1))
    integers, floats = pa.array([3, 4]), pa.array([0.5, 1.5])
    texts = pa.array(["abc", "defghijklmnopqrstuvwxyz"], pa.large_string())
    columns = [
        pa.Array.from_buffers(array.type, 2, [second_is_null, *array.buffers()[1:]])
        for array in (decimals, integers, floats, texts)
    ]
    ends = pa.array([0, 1, 2], pa.int64())
    columns.append(pa.LargeListArray.from_arrays(ends, integers, mask=mask))
    columns.append(pa.StructArray.from_arrays([integers, texts], ["x", "y"], mask=mask))
    frame = pl.DataFrame({f"c{i}": pl.Series(column) for i, column in enumerate(columns)})
    codec = RowCodec(frame.schema)
    clean = pl.DataFrame({name: [None] for name in frame.columns}, schema=frame.schema)
    assert codec.encode(frame)[1:] == codec.encode(clean)
    assert row_hashes(frame, frame.columns)[1:].tolist() == row_hashes(clean, clean.columns).tolist()
    assert codec.decode(codec.encode(frame)).equals(frame)


def test_no_columns() -> None:
    codec = RowCodec({})
    assert codec.encode(pl.DataFrame({"other": [1, 2]})) == [b"", b""]
    assert codec.decode([b"", b"", b""]).shape == (3, 0)
    with pytest.raises(CorruptError):
        codec.decode([b"x"])


def test_only_the_columns_of_the_schema_in_its_order() -> None:
    frame = pl.DataFrame({"b": [2], "x": [0], "a": ["one"]})
    codec = pickle.loads(pickle.dumps(RowCodec({"a": pl.String(), "b": pl.Int64()})))
    assert codec.decode(codec.encode(frame)).to_dict(as_series=False) == {"a": ["one"], "b": [2]}


def test_wrong_types_are_refused() -> None:
    with pytest.raises(TypeError, match="column 'a' must be of type Int64, not String"):
        RowCodec({"a": pl.Int64()}).encode(pl.DataFrame({"a": ["x"]}))
    with pytest.raises(TypeError, match="column 'a' of type Object"):
        RowCodec({"a": pl.Object()})


@pytest.mark.parametrize(
    ("schema", "rows"),
    [
        ({"a": pl.Int64()}, [bytes(9), bytes(8)]),
        ({"a": pl.Int64()}, [bytes(8), bytes(10)]),
        ({"a": pl.String()}, [bytes(4)]),
        ({"a": pl.String()}, [b"\x00\x02\x00\x00\x00x"]),
        ({"a": pl.String()}, [b"\x00\x00\x00\x00\x00x"]),
        ({"a": pl.String()}, [b"\x00\x01\x00\x00\x00\xff"]),
        ({"a": pl.Enum(["x"])}, [b"\x00\x01\x00\x00\x00y"]),
        ({"a": pl.List(pl.Int8())}, [b"\x00\x05\x00\x00\x00\x02\x00\x00\x00\x00"]),
        ({"a": pl.Struct({"x": pl.Int8()})}, [b"\x00\x01\x00\x00\x00\x00"]),
    ],
)
def test_damaged_rows_are_refused(schema: dict[str, pl.DataType], rows: list[bytes]) -> None:
    with pytest.raises(CorruptError):
        RowCodec(schema).decode(rows)
