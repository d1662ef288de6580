from __future__ import annotations

import datetime as dt
from collections import Counter

import polars as pl
import pytest

from anabranch import connect as ab
from anabranch.connect.generator import Generator
from anabranch.connect.source import Source
from anabranch.errors import ConfigError, FlowError, RecordError
from anabranch.model.ids import PartitionId


def stop(where: str, record: str, reason: str) -> None:
    raise RecordError(where, reason, record)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def everything(source: Source) -> pl.DataFrame:
    pieces = [source.cut(a, 10**9, 1 << 60) for a in source.discover({})]
    return pl.concat([frame for piece in pieces for frame in source.read(piece, stop)])


def test_values_are_pinned() -> None:
    """What a seed gives is a promise: recorded slices are read again by later releases."""
    frame = everything(ab.generator(rows=4, partitions=1, seed=42))
    assert frame.rows() == [(0, 708, 698, 1), (1, 222, 374, 1), (2, 98, 506, 1), (3, 394, 74, 1)]


def test_partitions_make_up_the_whole() -> None:
    one = everything(ab.generator(rows=103, partitions=1, seed=3)).sort("id")
    many = everything(ab.generator(rows=103, partitions=7, seed=3)).sort("id")
    assert one.equals(many)
    assert one.get_column("id").to_list() == list(range(103))
    assert not one.equals(everything(ab.generator(rows=103, partitions=1, seed=4)))


def test_keys_are_about_even() -> None:
    counts = Counter(everything(ab.generator(rows=100_000, keys=10)).get_column("key"))
    assert set(counts) == set(range(10))
    assert max(counts.values()) < 1.1 * min(counts.values())


def test_a_rate_follows_the_clock_and_goes_on_after_a_restart() -> None:
    clock = Clock()
    source = Generator(None, 100.0, 2, 0, {"id": ab.index()}, clock)
    assert source.discover({}) == []
    clock.now += 0.5
    assert [(a.start, a.end) for a in source.discover({})] == [(0, 25), (0, 25)]
    positions = {PartitionId("0"): 25, PartitionId("1"): 20}
    clock.now += 0.125
    assert [(a.start, a.end) for a in source.discover(positions)] == [(25, 31), (20, 31)]
    assert source.pending()
    clock.now += 1000
    again = Generator(None, 100.0, 2, 0, {"id": ab.index()}, clock)
    assert sum(a.rows for a in again.discover(positions)) <= 3
    clock.now += 1
    assert [(a.start, a.end) for a in again.discover(positions)] == [(25, 73), (20, 72)]


def test_a_limit_ends_it() -> None:
    clock = Clock()
    source = Generator(10, 100.0, 2, 0, {"id": ab.index()}, clock)
    source.discover({})
    assert source.pending()
    clock.now += 60
    assert [a.end for a in source.discover({})] == [5, 5]
    assert source.discover({PartitionId("0"): 5, PartitionId("1"): 5}) == []
    assert not source.pending()


def test_endless_without_a_rate() -> None:
    source = ab.generator(partitions=1)
    (found,) = source.discover({PartitionId("0"): 10**12})
    piece = source.cut(found, 10, 1 << 30)
    (frame,) = source.read(piece, stop)
    assert frame.get_column("id").to_list() == list(range(10**12, 10**12 + 10))
    assert source.pending()


def test_column_makers() -> None:
    start, every = dt.datetime(2024, 1, 1), dt.timedelta(seconds=2)
    source = ab.generator(
        rows=1000,
        partitions=1,
        columns={
            "i": ab.uniform_int(-5, 5),
            "f": ab.uniform_float(-1, 1),
            "w": ab.words(3),
            "c": ab.choice([True, False]),
            "t": ab.timestamps(start, every),
            "n": ab.index(),
        },
    )
    assert list(source.schema.values()) == [
        pl.Int64(),
        pl.Float64(),
        pl.String(),
        pl.Boolean(),
        pl.Datetime("us"),
        pl.Int64(),
    ]
    frame = everything(source)
    assert set(frame.get_column("i")) == set(range(-5, 5))
    assert frame.select(pl.col("f").is_between(-1, 1, closed="left").all()).item()
    assert abs(frame.get_column("f").mean() or 1.0) < 0.1
    assert set(frame.get_column("w")) == {"word0", "word1", "word2"}
    assert set(frame.get_column("c")) == {True, False}
    assert frame.get_column("t").to_list() == [start + n * every for n in range(1000)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ab.generator(partitions=0),
        lambda: ab.generator(rows=-1),
        lambda: ab.generator(rate=0),
        lambda: ab.generator(keys=0),
        lambda: ab.generator(columns={}),
        lambda: ab.generator(columns={"a": 5}),  # type: ignore[dict-item]
        lambda: ab.uniform_int(5, 5),
        lambda: ab.uniform_float(1, 0),
        lambda: ab.words(0),
        lambda: ab.choice([]),
        lambda: ab.timestamps(dt.datetime(2024, 1, 1, tzinfo=dt.UTC), dt.timedelta(1)),
    ],
)
def test_wrong_arguments(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]


def test_wrong_names() -> None:
    with pytest.raises(FlowError, match="'__a'"):
        ab.generator(columns={"__a": ab.index()})
