"""The hash is part of the format on disk: golden vectors, a scalar oracle, and its distribution."""

from __future__ import annotations

import datetime as dt
import random
from decimal import Decimal

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.model.batch import WEIGHT
from anabranch.model.hashing import (
    hash_columns,
    hash_text,
    is_key_type,
    row_hashes,
    shard_of,
    zset_hash,
)

MASK = (1 << 64) - 1
GOLDEN, FOLD = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F
BYTES, LONG = 0xD6E8FEB86659FD93, 0xA0761D6478BD642F
NULL, EMPTY = 0x6A09E667F3BCC909, 0xBB67AE8584CAA73B


def scalar_mix(x: int) -> int:
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def scalar_bytes(data: bytes) -> int:
    if len(data) > 1024:
        blocks = [data[i : i + 1024] for i in range(0, len(data), 1024)]
        inner = scalar_bytes(b"".join(scalar_bytes(b).to_bytes(8, "little") for b in blocks))
        return scalar_mix(inner ^ scalar_mix(len(data) + LONG))
    h = scalar_mix(len(data) + BYTES)
    for i in range(0, len(data), 8):
        h = scalar_mix(h ^ int.from_bytes(data[i : i + 8], "little"))
    return h


def scalar_fold(parts: list[int]) -> int:
    if not parts:
        return EMPTY
    h = parts[0]
    for part in parts[1:]:
        h = scalar_mix((h * FOLD & MASK) ^ part)
    return h


def scalar_value(value: object) -> int:
    """Oracle for None, bool, int, str, bytes and unscaled decimals as ("dec", n)."""
    if value is None:
        return NULL
    if isinstance(value, tuple):
        unscaled = value[1] & ((1 << 128) - 1)
        return scalar_fold([scalar_mix((unscaled >> 64) + GOLDEN), scalar_mix((unscaled & MASK) + GOLDEN)])
    if isinstance(value, str):
        return scalar_bytes(value.encode())
    if isinstance(value, bytes):
        return scalar_bytes(value)
    assert isinstance(value, int)
    return scalar_mix(int(value) + GOLDEN)


def one(value: object, dtype: pl.DataType | type[pl.DataType]) -> int:
    frame = pl.DataFrame({"k": pl.Series([value], dtype=dtype)})
    return int(hash_columns(frame, ["k"])[0])


GOLDEN_VECTORS: list[tuple[object, pl.DataType, int]] = [
    (0, pl.Int64(), 0xE220A8397B1DCDAF),
    (1, pl.Int64(), 0x910A2DEC89025CC1),
    (-1, pl.Int64(), 0xE4D971771B652C20),
    (2**63 - 1, pl.Int64(), 0x2A67D7552E039EA7),
    (True, pl.Boolean(), 0x910A2DEC89025CC1),
    (None, pl.Int64(), 0x6A09E667F3BCC909),
    ("", pl.String(), 0xB55A8FA067537A73),
    ("a", pl.String(), 0x0824EF526B21D48E),
    ("anabranch", pl.String(), 0xBB3CB6798644C8A8),
    ("größer als 16 Bytes", pl.String(), 0x357A1504CE34FFB6),
    (b"\x00", pl.Binary(), 0x7082DDBA0B573C3F),
    (b"\x00\x00", pl.Binary(), 0x286FD828569A9094),
    ("x" * 1024, pl.String(), 0x2E4A978BF90F2AE1),
    ("x" * 1025, pl.String(), 0x293D0AE9F94496AB),
    (dt.date(2024, 2, 29), pl.Date(), 0xDB8C04CA25F6E90D),
    (dt.datetime(2024, 2, 29, 12, 30, 1, 250), pl.Datetime("us"), 0x998BDA87B79A1654),
    (Decimal("-1.25"), pl.Decimal(10, 2), 0x25A5826C39BF7C57),
    (Decimal(10) ** 30, pl.Decimal(38, 0), 0xD7F49EFEED1D635C),
]


@pytest.mark.parametrize(("value", "dtype", "expected"), GOLDEN_VECTORS)
def test_golden_vectors(value: object, dtype: pl.DataType, expected: int) -> None:
    assert one(value, dtype) == expected


def test_golden_vector_of_several_columns() -> None:
    frame = pl.DataFrame({"a": [1, None], "b": ["x", "y"]})
    assert hash_columns(frame, ["a", "b"]).tolist() == [0x277D5E6381DD32CE, 0xC6D3FA644C0A18EE]
    assert hash_columns(frame, ["b", "a"]).tolist() == [0x84211705AD6FBB61, 0x83CA43DB6A4D3CA7]


def test_all_integer_widths_dates_and_timestamps_hash_as_int64() -> None:
    widths = [pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64]
    assert {one(77, width) for width in widths} == {scalar_value(77)}
    assert one(-5, pl.Int8) == one(-5, pl.Int64) == scalar_value(-5)
    assert one(dt.date(1970, 1, 4), pl.Date) == scalar_value(3)
    moment = dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=dt.UTC)
    assert one(moment, pl.Datetime("us", "UTC")) == scalar_value(1_000_000)
    assert one(moment.replace(tzinfo=None), pl.Datetime("ms")) == scalar_value(1000)
    assert one(2**64 - 1, pl.UInt64) == scalar_value(2**64 - 1)


def test_precision_of_a_decimal_plays_no_part() -> None:
    assert (
        one(Decimal("1.50"), pl.Decimal(10, 2))
        == one(Decimal("1.50"), pl.Decimal(38, 2))
        == scalar_value(("d", 150))
    )


words = st.one_of(st.none(), st.text(max_size=40), st.text(min_size=300, max_size=600))


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
            words,
            st.one_of(st.none(), st.binary(max_size=30)),
            st.one_of(st.none(), st.booleans()),
            st.one_of(st.none(), st.integers(-(10**30), 10**30)),
        ),
        max_size=30,
    ),
    st.integers(0, 5),
)
def test_vectorised_equals_scalar(rows: list[tuple[object, ...]], skip: int) -> None:
    columns = list(zip(*rows, strict=True)) or [(), (), (), (), ()]
    frame = pl.DataFrame(
        {
            "i": pl.Series(columns[0], dtype=pl.Int64),
            "s": pl.Series(columns[1], dtype=pl.String),
            "b": pl.Series(columns[2], dtype=pl.Binary),
            "o": pl.Series(columns[3], dtype=pl.Boolean),
            "d": pl.Series(
                [None if v is None else Decimal(f"{v}e-3") for v in columns[4]],
                dtype=pl.Decimal(38, 3),
            ),
        }
    )
    # A slice has offsets into larger buffers; two chunks have two of them.
    frame = pl.concat([frame[skip:], frame[:skip]], rechunk=False)
    rows = rows[skip:] + rows[:skip]
    expected = [
        scalar_fold([scalar_value(v) for v in (i, s, b, o)] + [scalar_value(None if d is None else ("d", d))])
        for i, s, b, o, d in rows
    ]
    assert hash_columns(frame, ["i", "s", "b", "o", "d"]).tolist() == expected
    assert hash_columns(frame, ["s"]).tolist() == [scalar_value(row[1]) for row in rows]


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 1023, 1024, 1025, 2048, 131_072, 131_073, 300_001])
def test_long_strings_equal_scalar(length: int) -> None:
    data = random.Random(length).randbytes(length)
    frame = pl.DataFrame({"k": [b"x", data, None, data[:-1]]})
    assert hash_columns(frame, ["k"]).tolist() == [scalar_value(v) for v in (b"x", data, None, data[:-1])]


def test_hash_text_is_the_hash_of_a_string_column() -> None:
    for text in ("", "a", "größer", "x" * 5000):
        assert hash_text(text) == one(text, pl.String)


def test_no_column_and_no_row() -> None:
    assert row_hashes(pl.DataFrame({"a": [1, 2]}), []).tolist() == [EMPTY, EMPTY]
    for dtype in (
        pl.Int64,
        pl.String,
        pl.Decimal(9, 2),
        pl.List(pl.String),
        pl.Struct({"a": pl.Int8}),
        pl.Null,
    ):
        assert row_hashes(pl.DataFrame({"a": pl.Series([], dtype=dtype)}), ["a"]).tolist() == []


def test_key_types() -> None:
    good = [pl.Int8(), pl.UInt64(), pl.String(), pl.Binary(), pl.Boolean(), pl.Date(), pl.Decimal(10, 2)]
    good += [pl.Datetime("ns"), pl.Datetime("ms", "Europe/Berlin")]
    bad = [pl.Float32(), pl.Float64(), pl.List(pl.Int8()), pl.Struct({"a": pl.Int8()}), pl.Categorical()]
    bad += [pl.Int128(), pl.Array(pl.Int8(), 2), pl.Null(), pl.Object()]
    assert all(is_key_type(dtype) for dtype in good)
    assert not any(is_key_type(dtype) for dtype in bad)
    with pytest.raises(TypeError, match="column 'x' of type Float64"):
        hash_columns(pl.DataFrame({"x": [1.0]}), ["x"])
    with pytest.raises(TypeError, match="Int128"):
        row_hashes(pl.DataFrame({"x": pl.Series([1], dtype=pl.Int128)}), ["x"])


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1), st.integers(1, 65536))
def test_shard_of_is_exact(hashes: list[int], shards: int) -> None:
    edges = [-(-i * 2**64 // shards) for i in (shards // 2, shards - 1)]
    hashes = [*hashes, 0, 2**64 - 1, *edges, *(max(0, e - 1) for e in edges)]
    expected = [h * shards // 2**64 for h in hashes]
    assert shard_of(np.array(hashes, dtype=np.uint64), shards).tolist() == expected


@pytest.mark.parametrize("shards", [0, -1, 65537])
def test_shard_of_refuses(shards: int) -> None:
    with pytest.raises(ValueError, match="65536"):
        shard_of(np.zeros(1, dtype=np.uint64), shards)


@pytest.mark.parametrize("shards", [2, 16, 48, 256])
@pytest.mark.parametrize(
    "keys",
    [
        pl.Series(range(200_000)),
        pl.Series(range(0, 200_000 << 20, 1 << 20)),
        pl.Series(range(0, 200_000 << 40, 1 << 40)),
        pl.Series([f"user-{i:07d}" for i in range(200_000)]),
        pl.Series([f"{i:05d}@customers.example.com" for i in range(200_000)]),
        pl.Series(range(200_000)).cast(pl.Decimal(20, 2)),
    ],
    ids=["sequential", "by 2^20", "by 2^40", "string tails", "string heads", "decimals"],
)
def test_shards_are_balanced(keys: pl.Series, shards: int) -> None:
    hashes = hash_columns(pl.DataFrame({"k": keys}), ["k"])
    assert len(np.unique(hashes)) == 200_000
    counts = np.bincount(shard_of(hashes, shards), minlength=shards)
    chi_square = float(((counts - 200_000 / shards) ** 2 / (200_000 / shards)).sum())
    # Mean S−1, deviation √(2(S−1)); the inputs are fixed, so that this never flickers.
    assert chi_square < (shards - 1) + 5 * (2 * (shards - 1)) ** 0.5


def test_every_input_bit_flips_every_output_bit() -> None:
    rng = np.random.default_rng(7)
    base = rng.integers(0, 256, (2000, 13), dtype=np.uint8)
    before = row_hashes(pl.DataFrame({"k": [row.tobytes() for row in base]}), ["k"])
    for bit in range(13 * 8):
        flipped = base.copy()
        flipped[:, bit // 8] ^= 1 << (bit % 8)
        after = row_hashes(pl.DataFrame({"k": [row.tobytes() for row in flipped]}), ["k"])
        rates = np.unpackbits((before ^ after).view(np.uint8).reshape(-1, 8), axis=1).mean(axis=0)
        assert rates.min() > 0.43
        assert rates.max() < 0.57


def test_floats_hash_by_value() -> None:
    nan = np.array([0x7FF8000000000001, 0xFFF8000000000000], dtype=np.uint64).view(np.float64)
    frame = pl.DataFrame({"x": [0.0, -0.0, *nan, 1.5, None]})
    hashes = row_hashes(frame, ["x"]).tolist()
    assert hashes[0] == hashes[1]
    assert hashes[2] == hashes[3]
    assert len(set(hashes)) == 4
    assert row_hashes(frame.cast(pl.Float32), ["x"]).tolist() == hashes


def test_nested_values_hash_by_value() -> None:
    lists = pl.Series([[1, 2], [2, 1], [1], [], None, [None], [1, 2]], dtype=pl.List(pl.Int64))
    structs = pl.Series([{"a": 1, "b": [0.0]}, {"a": 1, "b": [-0.0]}, {"a": None, "b": None}, None])
    nested = pl.Series([[["x"], []], [["x"]], [["x", ""]], [[], ["x"]]])
    hashes = row_hashes(pl.DataFrame({"v": lists}), ["v"]).tolist()
    assert hashes[0] == hashes[6]
    assert len(set(hashes)) == 6
    assert row_hashes(pl.DataFrame({"v": lists[2:6]}), ["v"]).tolist() == hashes[2:6]
    assert row_hashes(pl.DataFrame({"v": lists.cast(pl.List(pl.Int8))}), ["v"]).tolist() == hashes
    hashes = row_hashes(pl.DataFrame({"v": structs}), ["v"]).tolist()
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3
    assert len(set(row_hashes(pl.DataFrame({"v": nested}), ["v"]).tolist())) == 4
    pairs = pl.Series([[1, 2], [2, 1]], dtype=pl.Array(pl.Int64, 2))
    as_lists = row_hashes(pl.DataFrame({"v": lists[:2]}), ["v"]).tolist()
    assert row_hashes(pl.DataFrame({"v": pairs}), ["v"]).tolist() == as_lists
    flavours = pl.DataFrame({"v": pl.Series(["a", None, "b"], dtype=pl.Categorical)})
    assert row_hashes(flavours, ["v"]).tolist() == [scalar_value(v) for v in ("a", None, "b")]


def test_a_single_nested_value_has_literal_hash() -> None:
    frame = pl.DataFrame({"v": [[1, None]], "s": [{"a": 7}]})
    inner = scalar_bytes(scalar_value(1).to_bytes(8, "little") + NULL.to_bytes(8, "little"))
    assert row_hashes(frame, ["v"]).tolist() == [scalar_mix(inner + GOLDEN)]
    assert row_hashes(frame, ["s"]).tolist() == [scalar_mix(scalar_value(7) + GOLDEN)]


def test_zset_hash_is_the_weighted_sum() -> None:
    frame = pl.DataFrame({"a": [1, 2, None], "b": ["x", "y", "z"], WEIGHT: [2, -3, 1], "__hash": [0, 0, 0]})
    rows = [scalar_fold([scalar_value(a), scalar_value(b)]) for a, b, _, _ in frame.rows()]
    assert zset_hash(frame) == (2 * rows[0] - 3 * rows[1] + rows[2]) & MASK
    assert zset_hash(frame.reverse().rename({"a": "c"})) == zset_hash(frame)
    assert zset_hash(frame.select("b", "a", WEIGHT)) != zset_hash(frame)
    assert zset_hash(pl.concat([frame, frame.with_columns(-pl.col(WEIGHT))])) == 0
    assert zset_hash(frame.select(WEIGHT)) == 0
    assert zset_hash(frame.clear()) == 0
