"""What a step reads: within limits, fairly, evenly, and every row once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import anabranch as ab
from anabranch.connect.source import Slice, Source
from anabranch.model.ids import HostId, PartitionId
from anabranch.model.layout import FixedSharding, Layout, initial_layout
from anabranch.runtime.planner import Planner
from anabranch.spark.spec import Assigned

Positions = dict[str, dict[PartitionId, int]]


def layout(workers: int) -> Layout:
    return initial_layout(workers, [HostId("here")], FixedSharding(32))


def advance(positions: Positions, slices: dict[str, list[Slice]]) -> None:
    for name, pieces in slices.items():
        for piece in pieces:
            assert positions.setdefault(name, {}).get(piece.partition, 0) == piece.start < piece.end
            positions[name][piece.partition] = piece.end


def refuse(where: str, record: str, reason: str) -> None:
    raise AssertionError(f"{where}: {reason}")


def read(planner: Planner, work: tuple[tuple[Assigned, ...], ...], column: str) -> Counter[object]:
    found: Counter[object] = Counter()
    for mine in work:
        for one in mine:
            for frame in planner.sources[one.input].read(one.piece, refuse):
                found.update(frame[column].to_list())
    return found


def run(planner: Planner, rows: int, size: int, workers: int, column: str) -> tuple[Counter[object], int]:
    """Steps until nothing is left: all that was read, and how many steps."""
    positions: Positions = {}
    seen: Counter[object] = Counter()
    steps = 0
    while backlog := planner.backlog(positions):
        slices = planner.cut(backlog, rows, size, workers)
        assert sum(map(len, slices.values())) >= 1
        seen += read(planner, planner.assign(slices, layout(workers)), column)
        advance(positions, slices)
        steps += 1
    return seen, steps


@settings(max_examples=30)
@given(
    st.integers(0, 3000),
    st.integers(1, 15),
    st.integers(1, 4000),
    st.integers(1, 100_000),
    st.integers(1, 5),
)
def test_every_row_of_a_generator_once(
    total: int, partitions: int, rows: int, size: int, workers: int
) -> None:
    rows, size = max(rows, total // 40 + 1), max(size, total)
    planner = Planner({"in": ab.generator(rows=total, partitions=partitions)})
    seen, _ = run(planner, rows, size, workers, "id")
    assert seen == Counter(range(total))


@pytest.mark.parametrize("rows", [50, 100_000])
@pytest.mark.parametrize("workers", [1, 3])
def test_every_line_of_files_once(tmp_path: Path, rows: int, workers: int) -> None:
    expected: Counter[object] = Counter()
    for number, lines in enumerate((0, 1, 7, 6000, 90)):
        text = [f"{number}-{line}" for line in range(lines)]
        (tmp_path / f"{number}.txt").write_text("".join(f"{line}\n" for line in text))
        expected.update(text)
    planner = Planner({"lines": ab.files(tmp_path)})
    seen, steps = run(planner, max(rows, 500), 1 << 30, workers, "value")
    assert seen == expected
    assert steps == 1 or rows == 50


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "c"]), st.tuples(st.integers(0, 10**6), st.integers(1, 12)), min_size=1
    ),
    st.integers(100, 10**6),
    st.integers(1, 8),
)
def test_limits_are_kept(inputs: dict[str, tuple[int, int]], rows: int, workers: int) -> None:
    sources: dict[str, Source] = {
        name: ab.generator(rows=total, partitions=partitions) for name, (total, partitions) in inputs.items()
    }
    planner = Planner(sources)
    backlog = planner.backlog({})
    slices = planner.cut(backlog, rows, 1 << 60, workers)
    taken = sum(piece.rows for many in slices.values() for piece in many)
    # Each input gives at least a row, however small the limit is.
    assert taken <= max(rows, len(inputs))
    assert taken >= min(rows, backlog.rows) - sum(partitions for _, partitions in inputs.values())
    width = max((one.size / one.rows for many in backlog.available.values() for one in many), default=1)
    by_size = planner.cut(backlog, 1 << 60, int(rows * width), workers)
    assert sum(piece.size for many in by_size.values() for piece in many) <= max(rows, len(inputs)) * width


def test_a_small_input_does_not_wait_for_a_large_one() -> None:
    planner = Planner({"large": ab.generator(rows=None), "small": ab.generator(rows=10, partitions=1)})
    slices = planner.cut(planner.backlog({}), 1000, 1 << 40, 2)
    assert sum(piece.rows for piece in slices["small"]) == 10
    # What the small one leaves, the large one gets.
    assert sum(piece.rows for piece in slices["large"]) == 990


@pytest.mark.parametrize("partitions", [1, 5, 12, 101])
@pytest.mark.parametrize("workers", [1, 3])
def test_partitions_take_turns(partitions: int, workers: int) -> None:
    # Endless partitions: each step serves as many as there are workers, and none may wait longer than a round.
    source = ab.generator(rows=None, partitions=partitions)
    source.abreast = False
    planner = Planner({"in": source})
    positions: Positions = {}
    served: Counter[str] = Counter()
    rounds = 3
    for _ in range(rounds * -(-partitions // workers)):
        slices = planner.cut(planner.backlog(positions), 300, 1 << 40, workers)
        served.update(piece.partition for piece in slices["in"])
        advance(positions, slices)
    assert len(served) == partitions
    assert min(served.values()) >= rounds
    assert max(served.values()) <= rounds + 1


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_partitions_abreast_keep_pace(workers: int) -> None:
    planner = Planner({"in": ab.generator(rows=80_000, partitions=4)})
    positions: Positions = {"in": {PartitionId("2"): 10_000}}
    slices = planner.cut(planner.backlog(positions), 7_000, 1 << 40, workers)
    # Of each partition a tenth of what waits there.
    assert {piece.partition: piece.rows for piece in slices["in"]} == {
        "0": 2000,
        "1": 2000,
        "2": 1000,
        "3": 2000,
    }


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 50_000), min_size=1, max_size=20),
    st.integers(1, 8),
)
def test_work_is_balanced(pieces: list[int], workers: int) -> None:
    source = ab.generator(rows=None, partitions=len(pieces))
    slices = [Slice(PartitionId(str(number)), 0, rows, rows, rows * 24) for number, rows in enumerate(pieces)]
    work = Planner({"in": source}).assign({"in": slices}, layout(workers))
    assert len(work) == workers
    loads = [sum(one.piece.rows for one in mine) for mine in work]
    assert sum(loads) == sum(pieces)
    if sum(pieces) > 2000:
        # No worker has more than its share and the largest part that is not worth splitting.
        assert max(loads) <= 2.6 * sum(pieces) / workers
    # Ordinals are the order of the plan, whoever reads.
    flat = sorted((one for mine in work for one in mine), key=lambda one: one.ordinal)
    assert [one.ordinal for one in flat] == list(range(len(flat)))
    assert [(one.piece.partition, one.piece.start) for one in flat] == [
        (one.piece.partition, one.piece.start)
        for one in sorted(flat, key=lambda one: (int(one.piece.partition), one.piece.start))
    ]


def test_one_large_slice_is_shared_evenly() -> None:
    source = ab.generator(rows=100_000, partitions=1)
    planner = Planner({"in": source})
    slices = planner.cut(planner.backlog({}), 100_000, 1 << 40, 4)
    loads = [sum(one.piece.rows for one in mine) for mine in planner.assign(slices, layout(4))]
    assert loads == [25_000] * 4


def test_a_small_step_is_left_whole() -> None:
    planner = Planner({"in": ab.generator(rows=1000, partitions=1)})
    slices = planner.cut(planner.backlog({}), 1000, 1 << 40, 4)
    assert sorted(map(len, planner.assign(slices, layout(4)))) == [0, 0, 0, 1]


def test_pending_and_empty() -> None:
    planner = Planner({"in": ab.generator(rows=0)})
    backlog = planner.backlog({})
    assert not backlog
    assert (backlog.rows, backlog.size) == (0, 0)
    assert not planner.pending()
    assert planner.cut(backlog, 10, 10, 1) == {}
    assert Planner({"in": ab.generator(rows=None)}).pending()
