"""Numbering words that come again, against Python's dictionaries; and that results are those without."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest
from dictstate import DictState
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.model.batch import HASH, U64, WEIGHT
from anabranch.model.hashing import hash_columns
from anabranch.model.ids import OperatorId, Step
from anabranch.operators import aggregates as ab
from anabranch.operators import known as module
from anabranch.operators.aggregate import AggregateKernel
from anabranch.operators.kernel import Context
from anabranch.operators.known import Known

EXTREMES = [0, 1, -1, 2**63 - 1, -(2**63)]


@pytest.fixture(autouse=True)
def _small_batches_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FEWEST", 1)


def words_of(values: Any) -> U64:
    return np.asarray(values, dtype=np.int64).view(np.uint64)


def check(known: Known, words: U64) -> bool:
    """Number a batch as `grouping` does; tells whether it was found among what is known."""
    found = known.number(words)
    if found is None:
        assert len(known) == 0
        known.learn(np.unique(words), len(words))
        return False
    index, every = found
    assert len(np.unique(every)) == len(every)
    assert np.array_equal(every[index], words)
    return True


def test_words_are_found_again_and_new_ones_are_added() -> None:
    known = Known()
    words = words_of(EXTREMES * 8)
    assert not check(known, words)
    assert check(known, words)
    assert check(known, words_of([*EXTREMES, 7, 8]))
    assert len(known) == 7
    assert check(known, words_of([8, 7]))
    assert len(known) == 7


def test_a_batch_of_other_words_makes_it_forget() -> None:
    known = Known()
    known.learn(words_of(EXTREMES), 100)
    assert known.number(words_of([0, 10, 11, 12])) is None
    assert len(known) == 0


def test_words_that_come_once_are_not_remembered() -> None:
    known = Known()
    known.learn(words_of(range(10)), 79)
    assert len(known) == 0
    known.learn(words_of(range(10)), 80)
    assert len(known) == 10


def test_small_batches_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Known()
    known.learn(words_of(EXTREMES), 100)
    monkeypatch.setattr(module, "_FEWEST", 10)
    assert known.number(words_of(EXTREMES)) is None
    known.learn(words_of([1]), 9)
    assert len(known) == 5


def test_too_many_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LIMIT", 100)
    known = Known()
    known.learn(words_of(range(101)), 1000)
    assert len(known) == 0
    known.learn(words_of(range(100)), 1000)
    assert check(known, words_of(range(120)))
    assert len(known) == 120
    assert check(known, words_of(range(120)))
    assert known.number(words_of(range(121))) is None
    assert len(known) == 0


def colliding(count: int) -> U64:
    """Words that all want the first slot."""
    inverse = pow(int(module._MULTIPLIER), -1, 1 << 64)
    return np.array([inverse * place % (1 << 64) for place in range(count)], dtype=np.uint64)


def test_words_that_want_the_same_slot() -> None:
    known = Known()
    words = colliding(60)
    known.learn(words[:40], 1000)
    assert check(known, np.concatenate((words[:40], words[:40])))
    assert len(known) == 40
    assert check(known, words)
    assert len(known) == 60


def test_words_chosen_to_collide_are_not_remembered() -> None:
    known = Known()
    known.learn(colliding(100), 1000)
    assert len(known) == 0
    known.learn(colliding(60), 1000)
    words = colliding(100)
    assert check(known, words), "what does not fit any more is numbered all the same"
    assert len(known) == 0


@pytest.mark.parametrize("spread", ["random", "even", "high bits"])
def test_many_words(spread: str) -> None:
    rng = np.random.default_rng(11)
    pool: npt.NDArray[np.int64] = {
        "random": rng.integers(-(2**63), 2**63 - 1, 30_000),
        "even": np.arange(30_000) * 10**14,
        "high bits": np.arange(30_000) << 48,
    }[spread]
    known = Known()
    found = [
        check(known, words_of(pool[rng.integers(0, size, 300_000)]))
        for size in (20_000, 20_000, 25_000, 30_000)
    ]
    assert found == [False, True, True, True]


KEYS = st.one_of(st.none(), st.sampled_from([*EXTREMES, 10**12, 2 * 10**12]))
ROWS = st.tuples(KEYS, st.one_of(st.none(), st.integers(-3, 3)), st.integers(-2, 2))


@settings(max_examples=200)
@given(st.lists(st.lists(ROWS, max_size=12), min_size=1, max_size=6), st.booleans())
def test_results_are_the_same_with_known_keys(batches: list[list[Any]], plain: bool) -> None:
    schema: dict[str, pl.DataType] = {"k": pl.Int64(), "v": pl.Int64(), "x": pl.Float64()}
    aggregates = {"n": ab.count(), "s": ab.sum("v"), "x": ab.sum("x")}
    if plain:
        aggregates["m"] = ab.min("v")
    kernel = AggregateKernel(["k"], schema, aggregates, append_only=plain)
    known = Known()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_FEWEST", 1)
        patch.setattr(module, "_REPEATED", 0)
        plainly, knowing = [], []
        for batch in batches:
            frame = pl.DataFrame(
                [(key, value, None if value is None else value / 3) for key, value, _ in batch],
                schema=schema,
                orient="row",
            ).with_columns(pl.Series(WEIGHT, [1 if plain else w for *_, w in batch], dtype=pl.Int64))
            plainly.append(kernel.partial(frame))
            knowing.append(kernel.partial(frame, known))
            assert knowing[-1].schema == plainly[-1].schema
            assert knowing[-1].height <= plainly[-1].height * 16 / 15
        plainly.append(kernel.combine(plainly))
        knowing.append(kernel.combine(knowing, known))
    assert outcome(kernel, knowing) == outcome(kernel, plainly)


def test_a_few_known_keys_without_rows_change_nothing() -> None:
    schema: dict[str, pl.DataType] = {"k": pl.Int64(), "v": pl.Int64()}
    kernel = AggregateKernel(["k"], schema, {"s": ab.sum("v"), "m": ab.max("v")}, append_only=False)
    frame = pl.DataFrame({"k": [n * 10**12 for n in range(40)] * 8, "v": range(320), WEIGHT: [1] * 320})
    known = Known()
    kernel.partial(frame, known)
    fewer = frame.filter(pl.col("k") > 0)
    partials = kernel.partial(fewer, known)
    assert (partials.height, kernel.partial(fewer).height) == (40, 39)
    assert outcome(kernel, [partials]) == outcome(kernel, [kernel.partial(fewer)])
    assert kernel.partial(frame.filter(pl.col("k") > 30 * 10**12), known).height == 9


def outcome(kernel: AggregateKernel, steps: list[pl.DataFrame]) -> Any:
    """Each step's changes, and what is stored in the end."""
    state = DictState()
    changes = []
    for partials in steps:
        hashed = partials.with_columns(pl.Series(HASH, hash_columns(partials, ["k"]))).sort(HASH)
        out = kernel.process([hashed], state, Context(OperatorId("totals"), Step(0)))
        changes.append(sorted(repr(row) for row in out.rows()))
    return changes, state._tables
