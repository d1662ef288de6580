"""`reduce` against a plain fold in canonical order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import polars as pl
import pytest
from dictstate import DictState
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import RecordError
from anabranch.model.batch import HASH, MAJOR, MINOR, ORDER_SCHEMA, WEIGHT
from anabranch.model.hashing import hash_columns
from anabranch.model.ids import OperatorId, Step
from anabranch.operators.kernel import Context
from anabranch.operators.reduce import ReduceKernel

SCHEMA: dict[str, pl.DataType] = {"k": pl.String(), "v": pl.Int64()}
Rows = list[tuple[str | None, int | None, int]]


def kernel_of(fn: Callable[..., Any], weights: bool = False) -> ReduceKernel:
    return ReduceKernel(["k"], SCHEMA, "v", fn, "folded", weights)


def frame_of(rows: Rows, shuffle: int | None = None) -> pl.DataFrame:
    """Rows whose canonical order is the order given, handed over in any other."""
    frame = pl.DataFrame(rows, schema={**SCHEMA, WEIGHT: pl.Int64()}, orient="row")
    order = [(0, place // 3, place % 3) for place in range(len(rows))]
    frame = frame.hstack(pl.DataFrame(order, schema=ORDER_SCHEMA, orient="row"))
    frame = frame.with_columns(pl.Series(HASH, hash_columns(frame, ["k"])))
    if shuffle is not None:
        places = list(range(len(rows)))
        random.Random(shuffle).shuffle(places)
        frame = frame[places]
    return frame.sort(HASH)


def context(**options: Any) -> Context:
    return Context(OperatorId("fold"), Step(4), **options)


def run(
    kernel: ReduceKernel, state: DictState, frame: pl.DataFrame, given: Context | None = None
) -> Counter[Any]:
    out = kernel.process([frame], state, given or context())
    assert dict(out.select("k", "folded").schema) == kernel.output_schema
    return Counter({row[:2]: row[2] for row in out.select("k", "folded", WEIGHT).rows()})


@settings(max_examples=25)
@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from(["a", "b", None]), st.integers(-9, 9) | st.none(), st.integers(1, 3)),
            max_size=12,
        ),
        max_size=3,
    ),
    st.integers(0, 9),
)
def test_folds_in_canonical_order(steps: list[Rows], shuffle: int) -> None:
    def fn(so_far: int, value: int | None) -> int:
        return (so_far * 31 + (value if value is not None else 7)) % 1009

    kernel = kernel_of(fn)
    state, shuffled = DictState(), DictState()
    folded: dict[str | None, int | None] = {}
    for rows in steps:
        before = dict(folded)
        for key, value, weight in rows:
            for _ in range(weight):
                so_far = folded.get(key)
                folded[key] = value if so_far is None else fn(so_far, value)
        expected: Counter[Any] = Counter()
        for key in folded:
            if before.get(key) != folded[key]:
                if before.get(key) is not None:
                    expected[key, before[key]] = -1
                if folded[key] is not None:
                    expected[key, folded[key]] = 1
        assert run(kernel, state, frame_of(rows)) == expected
        assert run(kernel, shuffled, frame_of(rows, shuffle)) == expected
        assert shuffled.dump() == state.dump()


def test_weights_reach_the_function_and_none_ends_a_key() -> None:
    def fn(so_far: int | None, value: int, weight: int) -> int | None:
        return ((so_far or 0) + value * weight) or None

    kernel = kernel_of(fn, weights=True)
    state = DictState()
    assert run(kernel, state, frame_of([("a", 5, 2), ("a", 1, -1)])) == {("a", 9): 1}
    assert run(kernel, state, frame_of([("a", 9, -1)])) == {("a", 9): -1}
    assert state.dump() == {}


def test_failing_function_stops_the_flow_by_name() -> None:
    def fn(so_far: int, value: int) -> int:
        return so_far // value

    kernel = kernel_of(fn)
    state = DictState()
    with pytest.raises(RecordError, match=r"operator fold: .*ZeroDivisionError.*'v': 0"):
        run(kernel, state, frame_of([("a", 8, 1), ("a", 0, 1)]))
    assert state.dump() == {}


@pytest.mark.parametrize("bad", ["text", 1.5, 2**70, (1, 2)])
def test_result_of_another_type_is_an_error(bad: object) -> None:
    kernel = kernel_of(lambda so_far, value: bad)
    with pytest.raises(RecordError, match=r"operator fold: function returned .* expected .*Int64"):
        run(kernel, DictState(), frame_of([("a", 8, 1), ("a", 0, 1)]))


def test_bad_rows_become_dead_letters_and_the_rest_is_folded() -> None:
    def fn(so_far: int, value: int) -> Any:
        if value == 13:
            raise ValueError("unlucky")
        return "word" if value == 14 else so_far + value

    kernel = kernel_of(fn)
    asked = context(on_error="dead_letter")
    rows: Rows = [("a", 1, 1), ("a", 13, 2), ("b", 1, 1), ("a", 2, 1), ("b", 14, 1), ("b", 3, 1)]
    assert run(kernel, DictState(), frame_of(rows), asked) == {("a", 3): 1, ("b", 4): 1}
    letters = sorted(asked.dead_letters, key=lambda letter: letter.record)
    assert [(letter.operator, letter.weight) for letter in letters] == [("fold", 2), ("fold", 1)]
    assert "'v': 13" in letters[0].record
    assert "ValueError" in letters[0].reason
    assert "'v': 14" in letters[1].record


def test_order_of_changes_and_empty_input() -> None:
    kernel = kernel_of(lambda so_far, value: so_far + value)
    state = DictState()
    first = frame_of([("a", 1, 1)])
    run(kernel, state, first)
    out = kernel.process([first], state, context(emit_order=True, origin=2)).sort(MAJOR, MINOR)
    assert out.select("folded", WEIGHT).rows() == [(1, -1), (2, 1)]
    assert kernel.process([first.clear()], state, context(emit_order=True)).schema == out.schema
    assert kernel.process([first.clear()], state, context()).columns == ["k", "folded", WEIGHT, HASH]
