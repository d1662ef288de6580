from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from anabranch import connect as ab
from anabranch.connect import inputlog
from anabranch.connect.iterable import PARTITION, IterableSource
from anabranch.errors import ConfigError, CorruptError, FlowError, InputChangedError, JobDirError, RecordError
from anabranch.storage import Storage, open_storage


def wait(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 10
    while not (found := condition()):
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.001)
    return found


def rows(source: IterableSource, start: int = 0) -> tuple[list[tuple[Any, ...]], list[tuple[str, str, str]]]:
    """Rows without weight, and dead letters, once the iterable is exhausted."""
    wait(lambda: not source.pending())
    letters: list[tuple[str, str, str]] = []
    made: list[tuple[Any, ...]] = []
    for found in source.discover({PARTITION: start}):
        piece = source.cut(found, 10**9, 1 << 40)
        for frame in source.read(piece, lambda *letter: letters.append(letter)):
            made.extend(row[:-1] for row in frame.rows())
    return made, letters


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., IterableSource]]:
    started = []

    def start(items: Any, schema: object, **arguments: Any) -> IterableSource:
        source = ab.iterable(items, schema, **arguments)
        source.start(open_storage(tmp_path / "log"))
        started.append(source)
        return source

    yield start
    for source in started:
        source.close()


Run = Callable[..., IterableSource]


def test_dicts_tuples_and_single_values(run: Run) -> None:
    assert rows(run(["a", None, "b"], {"value": str}))[0] == [("a",), (None,), ("b",)]


def test_bad_items_are_reported_at_their_place(run: Run) -> None:
    items = [
        {"n": 1, "s": "a"},
        {"n": "x", "s": "b"},
        (3, "c"),
        {"n": 4},
        (5,),
        None,
        {"n": 1.5, "s": "x"},
        {"n": True, "s": "x"},
        {"n": 2**70, "s": "x"},
        {"n": 2.0, "s": "d"},
        {"n": 1, "s": 7},
        {"n": None, "s": None, "more": 1},
    ]
    made, letters = rows(run(items, {"n": int, "s": str}))
    assert made == [(1, "a"), (3, "c"), (2, "d"), (None, None)]
    assert [where for where, _, _ in letters] == [f"input item {i}" for i in (1, 3, 4, 5, 6, 7, 8, 10)]
    assert letters[0][1] == repr(items[1])
    assert letters[1][2] == "column 's' is missing"
    assert letters[2][2] == "expected 2 values, found 1"


def test_weights(run: Run) -> None:
    source = run([("a", 1), ("b", -2), ("c", None)], {"s": str, "w": int}, weight="w")
    wait(lambda: not source.pending())
    (found,) = source.discover({})
    letters: list[str] = []
    frames = source.read(source.cut(found, 10, 1 << 30), lambda where, record, reason: letters.append(where))
    assert pl.concat(list(frames)).rows() == [("a", 1), ("b", -2)]
    assert letters == ["input item 2"]
    assert not source.append_only


def test_after_a_restart_recorded_items_are_skipped(run: Run) -> None:
    first = run(range(100), {"n": int}, batch=7)
    assert len(rows(first)[0]) == 100
    first.close()
    second = run(range(150), {"n": int}, batch=7)
    assert rows(second)[0] == [(n,) for n in range(150)]
    assert rows(second, 95)[0] == [(n,) for n in range(95, 150)]


def test_a_function_is_told_how_many_are_recorded(run: Run) -> None:
    asked: list[int] = []

    def items(recorded: int) -> Iterator[int]:
        asked.append(recorded)
        return iter(range(recorded, recorded + 10))

    first = run(items, {"n": int})
    rows(first)
    first.close()
    assert rows(run(items, {"n": int}))[0] == [(n,) for n in range(20)]
    assert asked == [0, 10]


def test_a_function_without_arguments(run: Run) -> None:
    first = run(lambda: iter(range(10)), {"n": int})
    rows(first)
    first.close()
    assert len(rows(run(lambda: iter(range(12)), {"n": int}))[0]) == 12


def test_an_iterable_shorter_than_its_record_is_an_error(run: Run) -> None:
    first = run(range(10), {"n": int})
    rows(first)
    first.close()
    second = run(range(5), {"n": int})
    wait(lambda: not second.pending())
    with pytest.raises(InputChangedError, match="holds 10 items, and the iterable has only 5"):
        second.discover({PARTITION: 10})


def test_an_exception_surfaces_after_the_items_before_it(run: Run) -> None:
    def items() -> Iterator[int]:
        yield from range(3)
        raise ValueError("out of milk")

    source = run(items, {"n": int})
    assert rows(source)[0] == [(0,), (1,), (2,)]
    with pytest.raises(RecordError, match="input item 3: the iterable raised ValueError: out of milk"):
        source.discover({PARTITION: 3})


def test_a_slow_iterable_is_not_held_back_by_its_batch(run: Run) -> None:
    more = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        more.wait(10)
        yield 2

    source = run(items, {"n": int}, batch=1000)
    (found,) = wait(lambda: source.discover({}))
    assert found.end == 1
    assert source.pending()
    more.set()
    (found,) = wait(lambda: source.discover({PARTITION: 1}))
    assert (found.start, found.end) == (1, 2)


def test_an_endless_iterable_waits_to_be_read(run: Run) -> None:
    pulled = itertools.count()
    source = run(pulled, {"n": int}, batch=10)
    wait(lambda: (found := source.discover({})) and found[0].end >= 500)
    first = source.discover({})[0].end
    assert first <= 500 + 10
    wait(
        lambda: source.discover({PARTITION: first})[:1] and source.discover({PARTITION: first})[0].end > first
    )
    assert source.pending()


def test_close_does_not_wait_for_a_blocked_iterable(run: Run) -> None:
    never = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        never.wait(30)

    source = run(items, {"n": int})
    wait(lambda: source.discover({}))
    begun = time.monotonic()
    source.close()
    assert time.monotonic() - begun < 5
    never.set()


def test_a_damaged_or_missing_segment_is_named(run: Run, tmp_path: Path) -> None:
    source = run(range(100), {"n": int}, batch=10)
    rows(source)
    source.close()
    files = sorted((tmp_path / "log").iterdir())
    data = bytearray(files[1].read_bytes())
    data[-3] ^= 1
    files[1].write_bytes(data)
    again = run(range(100), {"n": int})
    with pytest.raises(CorruptError, match=files[1].name):
        rows(again)
    again.close()
    files[1].unlink()
    with pytest.raises(CorruptError, match=r"expected a segment that begins at row \d+"):
        ab.iterable(range(100), {"n": int}).start(open_storage(tmp_path / "log"))


def test_leftovers_of_a_crash_are_removed(run: Run, tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    leftover = tmp_path / "log" / ".00000000000000000000.segment.99.tmp"
    leftover.write_bytes(b"half")
    assert len(rows(run(range(5), {"n": int}))[0]) == 5
    assert not leftover.exists()


def test_two_writers_of_one_log_collide(tmp_path: Path) -> None:
    frame = pl.DataFrame({"n": [1]})
    inputlog.write_segment(open_storage(tmp_path), 0, frame)
    with pytest.raises(JobDirError, match="another process"):
        inputlog.write_segment(open_storage(tmp_path), 0, frame)
    assert [path.name for path in tmp_path.iterdir()] == ["00000000000000000000.segment"]


def test_misuse(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a directory for its log"):
        ab.iterable([1], {"n": int}).start(None)
    with pytest.raises(ConfigError, match="was not started"):
        ab.iterable([1], {"n": int}).discover({})
    with pytest.raises(ConfigError, match="an iterable or a function"):
        ab.iterable(5, {"n": int})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least 1"):
        ab.iterable([1], {"n": int}, batch=0)
    with pytest.raises(ConfigError, match="no column is left"):
        ab.iterable([1], {"n": int}, weight="n")
    with pytest.raises(FlowError, match="unsupported type"):
        ab.iterable([1], {"n": object})


@pytest.fixture(params=["local", "s3"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return open_storage(tmp_path if request.param == "local" else request.getfixturevalue("object_url"))


def test_segments_wholly_below_a_position_are_trimmed(log: Storage) -> None:
    source = ab.iterable(range(100), {"n": int}, batch=10)
    source.start(log)
    wait(lambda: not source.pending())
    segments = inputlog.list_segments(log)
    assert sum(rows for _, rows, _ in segments) == 100
    done = 0
    for before in (0, 25, 25, 60, 3, 100):
        source.trim({PARTITION: before})
        done = max(done, before)
        # The last one stays, it tells how many items there were.
        due = [one for one in segments if one[0] + one[1] > done] or segments[-1:]
        assert inputlog.list_segments(log) == due
    source.close()
    # How many items there were is known still, and what is left can be read.
    again = ab.iterable(range(103), {"n": int})
    again.start(log)
    assert rows(again, 100)[0] == [(100,), (101,), (102,)]
    with pytest.raises(InputChangedError, match=r"items before \d+ were trimmed; asked for item 0"):
        rows(again, 0)
    again.close()


def test_a_trim_that_was_killed_is_completed(log: Storage) -> None:
    for first in (0, 2, 4, 6):
        inputlog.write_segment(log, first, pl.DataFrame({"n": [first, first + 1]}))
    zero, two = (log.read(inputlog.segment_name(first)) for first in (0, 2))
    inputlog.trim_segments(log, 4)
    assert [first for first, _, _ in inputlog.list_segments(log)] == [4, 6]
    # A power failure brings back any of what was deleted.
    log.create(inputlog.segment_name(0), zero)
    assert [first for first, _, _ in inputlog.list_segments(log)] == [4, 6]
    assert not log.exists(inputlog.segment_name(0))
    log.create(inputlog.segment_name(2), two)
    log.delete(inputlog.segment_name(4))
    with pytest.raises(CorruptError, match=r"expected a segment that begins at row 4, found .*6\.segment"):
        inputlog.list_segments(log)
