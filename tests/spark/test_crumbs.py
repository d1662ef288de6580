"""Records on which processes die: found, named, and set aside or stopped at; and nobody else is blamed."""

from __future__ import annotations

import os
import re
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from inprocess import InProcess
from pyspark import SparkContext

import anabranch as ab
from anabranch.connect.source import Slice
from anabranch.errors import RecordError, StepAborted
from anabranch.model.ids import Attempt, Epoch, OperatorId, WorkerId
from anabranch.spark import crumbs
from anabranch.spark.crumbs import clear_crumbs, isolation
from anabranch.spark.failure import worker_died
from anabranch.spark.job import StepRunner
from anabranch.spark.spec import Report, StepSpec

NUMBERS = list(range(60))
POISON = {13, 27}
Build = Callable[[Any, Callable[[int], None]], Any]
FlowOf = Callable[..., ab.Flow]


class Died(BaseException):
    """Stands for the end of the process: nothing in the engine catches it."""


class Job(InProcess):
    """Runs its attempts in isolation."""

    isolate = True

    def spec(self, attempt: Attempt, slices: dict[str, list[Slice]]) -> StepSpec:
        return replace(super().spec(attempt, slices), isolate=self.isolate)

    def survive(self, slices: dict[str, list[Slice]], limit: int = 20) -> tuple[list[Report], int]:
        """Attempts until one lives; also how many died."""
        for number in range(limit):
            try:
                return self.attempt(slices, number), number
            except Died:
                continue
        raise AssertionError(f"{limit} attempts died")

    @property
    def folder(self) -> Path:
        return self.root / "state" / "breadcrumbs"


def die_on(poison: set[int]) -> Callable[[int], None]:
    def check(number: int) -> None:
        if number in poison:
            raise Died

    return check


@pytest.fixture
def flow_of(tmp_path: Path) -> FlowOf:
    (tmp_path / "in").mkdir()
    pl.DataFrame({"k": [n % 5 for n in NUMBERS], "n": NUMBERS}).write_parquet(
        tmp_path / "in" / "rows.parquet"
    )

    def make(build: Build, on_error: Any, check: Callable[[int], None] | None = None) -> ab.Flow:
        flow = ab.Flow("poison", on_error=on_error)
        source = ab.files(tmp_path / "in", format="parquet")
        build(flow.input("rows", source), check or die_on(POISON)).output("out")
        return flow

    return make


def die_in_isolation(spec: StepSpec, record: str, worker: int = 0, *, outside: bool = False) -> int:
    """A task that dies on a record, or right behind it; how many died on it before."""
    before = 0
    with suppress(Died), isolation(spec, 0, WorkerId(worker)) as guard:
        assert guard is not None
        before = guard.died(OperatorId("map_1"), record)
        guard.admit(OperatorId("map_1"), record)
        if outside:
            guard.leave()
        raise Died
    return before


def by_map(rows: Any, check: Any) -> Any:
    return rows.map(lambda row: (check(row.n), row.n * 2)[1], schema={"n": int})


def by_filter(rows: Any, check: Any) -> Any:
    return rows.filter(lambda row: (check(row.n), row.n % 2 == 1)[1])


def by_flat_map(rows: Any, check: Any) -> Any:
    def pair(row: Any) -> Any:
        yield row.n
        check(row.n)
        yield row.n

    return rows.flat_map(pair, schema={"n": int})


def by_key(rows: Any, check: Any) -> Any:
    return rows.key_by(lambda row: (check(row.n), row.n % 3)[1], type=int, column="key").count()


def by_stateful_map(rows: Any, check: Any) -> Any:
    def step(state: Any, row: Any) -> Any:
        check(row.n)
        state = (state or 0) + row.n
        return state, [state]

    return rows.key_by("k").stateful_map(step, schema={"total": int})


def by_reduce(rows: Any, check: Any) -> Any:
    return rows.key_by("k").reduce("n", lambda so_far, n: (check(n), so_far + n)[1])


def by_map_batches(rows: Any, check: Any) -> Any:
    def double(table: pa.Table) -> pa.Table:
        numbers = table.column("n").to_pylist()
        for number in numbers:
            check(number)
        return pa.table({"n": [number * 2 for number in numbers]})

    return rows.map_batches(double, schema={"n": int})


def by_expression(rows: Any, check: Any) -> Any:
    def double(number: int) -> int:
        check(number)
        return number * 2

    return rows.select(n=pl.col("n").map_elements(double, return_dtype=pl.Int64))


def by_stateful_batches(rows: Any, check: Any) -> Any:
    def step(table: pa.Table, state: pa.Table) -> tuple[pa.Table, pa.Table]:
        numbers = table.column("n").to_pylist()
        for number in numbers:
            check(number)
        kept = {"n": numbers, "seen": [1] * len(numbers)}
        return table.select(["n"]).append_column("m", table.column("n")), pa.table(kept)

    return rows.key_by("n").stateful_map_batches(step, schema={"m": int}, state={"seen": int})


BUILDS = {
    "map": by_map,
    "filter": by_filter,
    "flat_map": by_flat_map,
    "key_by": by_key,
    "stateful_map": by_stateful_map,
    "reduce": by_reduce,
    "map_batches": by_map_batches,
    "stateful_map_batches": by_stateful_batches,
}


def outcome(job: InProcess, slices: dict[str, list[Slice]], reports: list[Report]) -> dict[str, Counter[Any]]:
    changes = job.changes(job.commit(slices, reports))
    return {
        name: Counter({row[:-1]: row[-1] for row in frame.drop("__step").group_by(pl.exclude("__weight"))
                       .agg(pl.col("__weight").sum()).rows()})
        for name, frame in changes.items()
    }  # fmt: skip


def without_poison(flow_of: FlowOf, build: Build, root: Path) -> Counter[Any]:
    """What the flow gives when the poisoned records are not there; functions that raise set them aside alike."""

    def fail(number: int) -> None:
        if number in POISON:
            raise ValueError

    job = InProcess(flow_of(build, "dead_letter", fail), root, 1, 4)
    slices = job.cut(1000)
    return outcome(job, slices, job.attempt(slices))["out"]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("kind", list(BUILDS))
def test_poisoned_records_become_dead_letters(
    flow_of: FlowOf, tmp_path: Path, kind: str, workers: int
) -> None:
    build = BUILDS[kind]
    job = Job(flow_of(build, "dead_letter"), tmp_path / "job", workers, 4)
    slices = job.cut(1000)
    reports, deaths = job.survive(slices)
    found = outcome(job, slices, reports)
    assert found["out"] == without_poison(flow_of, build, tmp_path / "other")
    letters = sorted(found["dead_letters"], key=lambda letter: int(re.findall(r"\d+", letter[2])[-1]))
    assert list(found["dead_letters"].values()) == [1, 1]
    for number, (operator, where, record, reason) in zip(sorted(POISON), letters, strict=True):
        assert f"n={number}" in record or f"'n': {number}" in record
        assert operator.startswith(kind.split("_")[0])
        assert reason == "the worker process died on this record 2 times"
        assert where == "step 0"
    # Each record twice, and a batch once more before its rows are tried alone.
    assert 4 <= deaths <= 6


@pytest.mark.parametrize("kind", list(BUILDS))
def test_or_the_flow_stops_and_names_the_record(flow_of: FlowOf, tmp_path: Path, kind: str) -> None:
    job = Job(flow_of(BUILDS[kind], "stop"), tmp_path / "job", 2, 4)
    slices = job.cut(1000)
    with pytest.raises(
        RecordError, match=r"step 0: the worker process died on this record 2 times"
    ) as stopped:
        job.survive(slices)
    assert any(f"n={n}" in stopped.value.record or f"'n': {n}" in stopped.value.record for n in POISON)


def test_an_expression_that_kills(flow_of: FlowOf, tmp_path: Path) -> None:
    armed: list[int] = []

    def check(number: int) -> None:
        if number in armed:
            raise Died

    job = Job(flow_of(by_expression, "dead_letter", check), tmp_path / "job", 1, 4)
    armed.extend(POISON)
    slices = job.cut(1000)
    reports, _ = job.survive(slices)
    found = outcome(job, slices, reports)
    assert found["out"] == Counter((n * 2,) for n in NUMBERS if n not in POISON)
    assert len(found["dead_letters"]) == 2


def test_a_batch_that_is_too_large_succeeds_in_pieces(flow_of: FlowOf, tmp_path: Path) -> None:
    def only_small(table: pa.Table) -> pa.Table:
        if table.num_rows > 10:
            raise Died
        return table.select(["n"])

    def build(rows: Any, check: Any) -> Any:
        return rows.map_batches(only_small, schema={"n": int})

    job = Job(flow_of(build, "stop"), tmp_path / "job", 1, 4)
    slices = job.cut(1000)
    reports, deaths = job.survive(slices)
    assert deaths == 1
    assert outcome(job, slices, reports)["out"] == Counter((n,) for n in NUMBERS)


def test_one_death_blames_nobody(flow_of: FlowOf, tmp_path: Path) -> None:
    left = [1]

    def once(number: int) -> None:
        if number == 13 and left:
            left.pop()
            raise Died

    job = Job(flow_of(by_map, "stop", once), tmp_path / "job", 2, 4)
    slices = job.cut(1000)
    reports, deaths = job.survive(slices)
    assert deaths == 1
    assert outcome(job, slices, reports)["out"] == Counter((n * 2,) for n in NUMBERS)


def test_deaths_outside_of_functions_and_of_other_epochs_blame_nobody(
    flow_of: FlowOf, tmp_path: Path
) -> None:
    job = Job(flow_of(by_map, "stop", die_on(set())), tmp_path / "job", 1, 4)
    slices = job.cut(1000)
    spec = job.spec(Attempt(0), slices)
    die_in_isolation(spec, "x", outside=True)
    for attempt in (1, 2):
        assert die_in_isolation(replace(spec, attempt=Attempt(attempt)), "x") == attempt - 1
    with isolation(replace(spec, attempt=Attempt(3)), 0, WorkerId(0)) as guard:
        assert guard is not None
        assert guard.admit(OperatorId("map_1"), "x") == "the worker process died on this record 2 times"
        assert guard.admit(OperatorId("map_2"), "x") is None
    with isolation(replace(spec, epoch=Epoch(spec.epoch + 1)), 0, WorkerId(0)) as guard:
        assert guard is not None
        assert guard.died(OperatorId("map_1"), "x") == 0
    assert not list(job.folder.rglob("*worker*"))


def test_a_task_that_raises_or_lives_on_blames_nobody(flow_of: FlowOf, tmp_path: Path) -> None:
    job = Job(flow_of(by_map, "stop", die_on(set())), tmp_path / "job", 2, 4)
    spec = job.spec(Attempt(0), {})
    next_one = replace(spec, attempt=Attempt(1))
    with suppress(StepAborted), isolation(spec, 0, WorkerId(0)) as guard:
        assert guard is not None
        guard.admit(OperatorId("map_1"), "x")
        raise StepAborted("a shuffle file was lost")
    with isolation(spec, 0, WorkerId(1)) as zombie:
        assert zombie is not None
        zombie.admit(OperatorId("map_1"), "x")
        with isolation(next_one, 0, WorkerId(1)) as guard:
            assert guard is not None
            assert guard.died(OperatorId("map_1"), "x") == 0


def test_of_an_attempt_only_the_first_to_fall_silent_counts(flow_of: FlowOf, tmp_path: Path) -> None:
    job = Job(flow_of(by_map, "stop", die_on(set())), tmp_path / "job", 2, 4)
    spec = job.spec(Attempt(0), {})
    for worker, record in ((0, "guilty"), (1, "killed along")):
        die_in_isolation(spec, record, worker)
    late = next(job.folder.rglob("*worker-1"))
    data = bytearray(late.read_bytes())
    struct.pack_into("<d", data, 8, struct.unpack_from("<d", data, 8)[0] + 2.0)
    late.write_bytes(data)
    with isolation(replace(spec, attempt=Attempt(1)), 0, WorkerId(0)) as guard:
        assert guard is not None
        assert guard.died(OperatorId("map_1"), "guilty") == 1
        assert guard.died(OperatorId("map_1"), "killed along") == 0


def test_long_records_are_told_apart(flow_of: FlowOf, tmp_path: Path) -> None:
    job = Job(flow_of(by_map, "stop", die_on(set())), tmp_path / "job", 1, 4)
    spec = job.spec(Attempt(0), {})
    one, other = "ä" * 100_000 + "1", "ä" * 100_000 + "2"
    die_in_isolation(spec, one)
    with isolation(replace(spec, attempt=Attempt(1)), 0, WorkerId(0)) as guard:
        assert guard is not None
        assert (guard.died(OperatorId("map_1"), one), guard.died(OperatorId("map_1"), other)) == (1, 0)


@pytest.mark.parametrize("on_error", ["stop", "dead_letter"])
def test_a_slice_on_which_the_decoder_dies(
    tmp_path: Path, on_error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name}\n")
    flow = ab.Flow("f", on_error=on_error)
    source = ab.files(tmp_path, pattern="*.txt", format="text")
    flow.input("lines", source).output("out")
    job = Job(flow, tmp_path / "job", 1, 2)
    slices = job.cut(1000)
    real = type(source).read

    def read(self: Any, piece: Slice, on_bad: Any) -> Any:
        if piece.partition == "b.txt":
            raise Died
        return real(self, piece, on_bad)

    monkeypatch.setattr(type(source), "read", read)
    if on_error == "stop":
        with pytest.raises(
            RecordError, match=r"input 'lines', step 0: .*died.*2 times; record: b\.txt from 0 to 2"
        ):
            job.survive(slices)
        return
    reports, deaths = job.survive(slices)
    assert deaths == 2
    found = outcome(job, slices, reports)
    assert found["out"] == Counter({("a",): 1})
    (letter,) = found["dead_letters"]
    assert letter[1:3] == ("partition b.txt", "b.txt from 0 to 2")


def test_clearing_and_other_steps(flow_of: FlowOf, tmp_path: Path) -> None:
    job = Job(flow_of(by_map, "dead_letter"), tmp_path / "job", 1, 4)
    (job.folder / "step-000000000099").mkdir(parents=True)
    slices = job.cut(1000)
    job.survive(slices)
    assert [path.name for path in job.folder.iterdir()] == ["step-000000000000"]
    clear_crumbs(job.spec(Attempt(0), slices), WorkerId(0))
    assert not job.folder.exists()


def test_without_isolation_nothing_is_noted(flow_of: FlowOf, tmp_path: Path) -> None:
    job = Job(flow_of(by_map, "stop", die_on(set())), tmp_path / "job", 1, 4)
    job.isolate = False
    slices = job.cut(1000)
    job.attempt(slices)
    assert not job.folder.exists()


def test_real_processes_that_exit(flow_of: FlowOf, spark: SparkContext, tmp_path: Path) -> None:
    def check(number: int) -> None:
        if number == 13:
            os._exit(1)

    job = InProcess(flow_of(by_map, "dead_letter", check), tmp_path / "job", 2, 4)
    slices = job.cut(1000)
    runner = StepRunner(spark, job.plan, placed=False)
    try:
        for number in range(crumbs.FATAL):
            with pytest.raises(StepAborted) as died:
                runner.run(replace(job.spec(Attempt(number), slices), isolate=True))
            assert worker_died(died.value)
            runner.forget_handles()
        reports = runner.run(replace(job.spec(Attempt(crumbs.FATAL), slices), isolate=True))
    finally:
        runner.close()
    found = outcome(job, slices, reports)
    assert found["out"] == Counter((n * 2,) for n in NUMBERS if n != 13)
    assert [letter[2] for letter in found["dead_letters"]] == ["Row(k=3, n=13)"]
