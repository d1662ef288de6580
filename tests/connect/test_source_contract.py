"""One suite that every source must pass: what was recorded is read again, the same, however it is cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from pyspark import cloudpickle

from anabranch import connect as ab
from anabranch.connect.source import Available, Slice, Source, frame_schema
from anabranch.errors import RecordError
from anabranch.model.ids import PartitionId
from anabranch.model.types import to_schema
from anabranch.storage import open_storage

Row = tuple[object, ...]


def stop(where: str, record: str, reason: str) -> None:
    raise RecordError(where, reason, record)


@dataclass
class Case:
    """A source and, for each partition, the rows (with weight) that an oracle says it holds."""

    source: Source
    expected: dict[str, list[Row]]


LINES = {
    "a.txt": [f"line {i} {'é' * (i % 5)}" for i in range(300)],
    "b.txt": ["", "x" * 5000, "", "end"],
    "c.txt": [str(i) for i in range(2000)],
}


def text_case(path: Path) -> Case:
    for name, lines in LINES.items():
        end = "\r\n" if name == "a.txt" else "\n"
        (path / name).write_bytes("".join(line + end for line in lines).encode())
    return Case(ab.files(path), {n: [(line, 1) for line in lines] for n, lines in LINES.items()})


def table(start: int, count: int) -> list[Row]:
    return [
        (i, f'n{i % 7}, "q"', i / 4, i % 3 == 0, -1 if i % 5 == 0 else 2) for i in range(start, start + count)
    ]


COLUMNS = {"id": int, "name": str, "x": float, "flag": bool, "w": int}


def csv_case(path: Path) -> Case:
    def quote(text: object) -> str:
        return '"' + str(text).replace('"', '""') + '"'

    for name, rows in (("a.csv", table(0, 500)), ("b.csv", table(500, 20))):
        body = "".join(f"{i},{quote(s)},{x},{str(f).lower()},{w}\n" for i, s, x, f, w in rows)
        (path / name).write_text("id,name,x,flag,w\n" + body)
    return Case(
        ab.files(path, format="csv", schema=COLUMNS, weight="w"),
        {"a.csv": table(0, 500), "b.csv": table(500, 20)},
    )


def jsonl_case(path: Path) -> Case:
    for name, rows in (("a.jsonl", table(0, 500)), ("b.jsonl", table(500, 20))):
        (path / name).write_text(
            "".join(json.dumps(dict(zip(COLUMNS, row, strict=True))) + "\n" for row in rows)
        )
    return Case(
        ab.files(path, format="jsonl", schema=COLUMNS, weight="w"),
        {"a.jsonl": table(0, 500), "b.jsonl": table(500, 20)},
    )


def parquet_case(path: Path) -> Case:
    for name, rows, group in (("a.parquet", table(0, 5000), 700), ("b.parquet", table(5000, 30), 1000)):
        frame = pl.DataFrame(rows, schema=to_schema(COLUMNS), orient="row")
        frame.write_parquet(path / name, row_group_size=group)
    return Case(
        ab.files(path, format="parquet", weight="w"),
        {"a.parquet": table(0, 5000), "b.parquet": table(5000, 30)},
    )


def generator_case(path: Path) -> Case:
    mask = 2**64 - 1

    def mix(seed: int, column: str, row: int) -> int:
        import zlib

        salt = seed * 0x9E3779B97F4A7C15 + zlib.crc32(column.encode()) * 0xD1342543DE82EF95
        z = ((row + 1) * 0x9E3779B97F4A7C15 + salt) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    def row(n: int) -> Row:
        return (n, (mix(5, "key", n) >> 32) * 10 >> 32, (mix(5, "value", n) >> 32) * 1000 >> 32, 1)

    source = ab.generator(rows=1001, partitions=3, seed=5, keys=10)
    return Case(source, {str(p): [row(n) for n in range(p, 1001, 3)] for p in range(3)})


def iterable_case(path: Path) -> Case:
    items = [{"n": i, "s": None if i % 4 == 0 else f"s{i}"} for i in range(700)]
    source = ab.iterable(items, {"n": int, "s": str}, batch=64)
    return Case(source, {"0": [(item["n"], item["s"], 1) for item in items]})


CASES: dict[str, Callable[[Path], Case]] = {
    "text": text_case,
    "csv": csv_case,
    "jsonl": jsonl_case,
    "parquet": parquet_case,
    "generator": generator_case,
    "iterable": iterable_case,
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    data = tmp_path / "data"
    data.mkdir()
    made = CASES[request.param](data)
    made.source.start(open_storage(tmp_path / "log"))
    yield made
    made.source.close()


def everything(source: Source) -> list[Available]:
    """What is there once nothing more is pending."""
    while source.pending():
        found = source.discover({})
        if isinstance(source, ab.generator().__class__) or not source.pending():
            return found
    return source.discover({})


def rows_of(source: Source, pieces: Sequence[Slice]) -> list[Row]:
    rows: list[Row] = []
    for piece in pieces:
        for frame in source.read(piece, stop):
            assert dict(frame.schema) == frame_schema(source.schema)
            rows.extend(frame.rows())
    return rows


def drain(source: Source, rows: int, size: int) -> list[Slice]:
    everything(source)
    positions: dict[PartitionId, int] = {}
    slices: list[Slice] = []
    while found := source.discover(positions):
        for available in found:
            assert available.start == positions.get(available.partition, 0) < available.end
            assert available.rows >= 1
            piece = source.cut(available, rows, size)
            assert piece.start == available.start < piece.end <= available.end
            positions[piece.partition] = piece.end
            slices.append(piece)
    return slices


def by_partition(slices: Sequence[Slice]) -> dict[str, list[Slice]]:
    grouped: dict[str, list[Slice]] = {}
    for piece in slices:
        grouped.setdefault(piece.partition, []).append(piece)
    return grouped


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (7, 1 << 30), (100, 600), (10**9, 1 << 40)])
def test_any_cut_reads_every_row_once_and_in_order(case: Case, rows: int, size: int) -> None:
    if rows == 1:
        case.expected = {name: held for name, held in case.expected.items() if len(held) < 400}
    slices = [p for p in drain(case.source, rows if rows > 1 else 40, size) if p.partition in case.expected]
    grouped = by_partition(slices)
    assert set(grouped) == set(case.expected)
    for name, pieces in grouped.items():
        assert all(a.end == b.start for a, b in pairwise(pieces))
        assert rows_of(case.source, pieces) == case.expected[name]


def test_a_cut_of_one_record_holds_one(case: Case) -> None:
    for available in everything(case.source):
        piece = case.source.cut(available, 1, 1)
        assert rows_of(case.source, [piece]) == case.expected[available.partition][:1]


@pytest.mark.parametrize("parts", [1, 2, 3, 16])
def test_split_pieces_make_up_the_slice(case: Case, parts: int) -> None:
    for piece in drain(case.source, 250, 1 << 30):
        pieces = case.source.split(piece, parts)
        assert 1 <= len(pieces) <= parts
        assert pieces[0].start == piece.start
        assert pieces[-1].end == piece.end
        assert all(part.start < part.end for part in pieces)
        assert all(a.end == b.start for a, b in pairwise(pieces))
        assert rows_of(case.source, pieces) == rows_of(case.source, [piece])


def test_a_large_slice_is_split(case: Case) -> None:
    largest = max(drain(case.source, 10**9, 1 << 40), key=lambda piece: piece.rows)
    pieces = case.source.split(largest, 2)
    assert len(pieces) == (2 if case.source.splittable else 1)
    if case.source.splittable:
        low, high = sorted(len(rows_of(case.source, [piece])) for piece in pieces)
        assert low >= 0.5 * high


def test_a_slice_survives_json_and_the_source_pickling(case: Case) -> None:
    slices = drain(case.source, 90, 1 << 30)
    copies = [Slice.from_json(json.loads(json.dumps(piece.to_json()))) for piece in slices]
    assert copies == slices
    far = cloudpickle.loads(cloudpickle.dumps(case.source))
    again = cloudpickle.loads(cloudpickle.dumps(far))
    assert rows_of(far, copies) == rows_of(case.source, slices) == rows_of(again, copies)
    assert dict(far.schema) == dict(case.source.schema)


def test_nothing_is_left_at_the_end(case: Case) -> None:
    drain(case.source, 10**9, 1 << 40)
    positions = {PartitionId(a.partition): a.end for a in case.source.discover({})}
    assert case.source.discover(positions) == []
    assert not case.source.pending()


def test_estimates_are_near(case: Case) -> None:
    for piece in drain(case.source, 10**9, 1 << 40):
        held = len(case.expected[piece.partition])
        assert held / 3 <= piece.rows <= held * 3 or held < 10


def test_append_only_tells_whether_weights_are_one(case: Case) -> None:
    weights = {row[-1] for held in case.expected.values() for row in held}
    assert case.source.append_only == (weights == {1})


def test_the_fingerprint_is_json_and_stable(case: Case) -> None:
    first = json.dumps(case.source.fingerprint(), sort_keys=True)
    drain(case.source, 100, 1 << 30)
    assert json.dumps(case.source.fingerprint(), sort_keys=True) == first


def test_idle_discovery_is_cheap(case: Case) -> None:
    import time

    drain(case.source, 10**9, 1 << 40)
    positions = {PartitionId(a.partition): a.end for a in case.source.discover({})}
    costs = []
    for _ in range(50):
        begun = time.perf_counter()
        case.source.discover(positions)
        costs.append(time.perf_counter() - begun)
    assert np.median(costs) < 0.002
