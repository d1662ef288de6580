"""Stateful functions against a loop over a sorted list and a dict of states."""

from __future__ import annotations

import datetime as dt
import pickle
from collections import defaultdict, namedtuple
from decimal import Decimal
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from dictstate import DictState
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import EngineError, RecordError
from anabranch.model.batch import HASH, MAJOR, MINOR, ORDER_SCHEMA, ORIGIN, WEIGHT
from anabranch.model.hashing import hash_columns
from anabranch.model.ids import OperatorId, Step
from anabranch.operators.kernel import Context
from anabranch.operators.statecodec import NotStorable, decode, encoder
from anabranch.operators.stateful_batches import StatefulBatchesKernel
from anabranch.operators.stateful_map import StatefulMapKernel

SCHEMA = {"v": pl.Int64(), "k": pl.String()}
OUT = {"n": pl.Int64(), "seen": pl.String()}
FRAME = {**SCHEMA, WEIGHT: pl.Int64(), **ORDER_SCHEMA}

rows_of_a_step = st.lists(
    st.tuples(
        st.integers(0, 9),
        st.sampled_from([None, "", "a", "b", "c"]),
        st.sampled_from([1, 1, 1, 2]),
        st.integers(0, 1),
        st.integers(0, 2),
        st.integers(0, 99),
    ),
    max_size=10,
    unique_by=lambda row: row[3:],
)
steps = st.lists(rows_of_a_step, max_size=4)


def keyed(rows: Any, same_hash: bool = False) -> pl.DataFrame:
    frame = pl.DataFrame(rows, schema=FRAME, orient="row")
    hashes = np.full(frame.height, 7, np.uint64) if same_hash else hash_columns(frame, ["k"])
    return frame.with_columns(pl.Series(HASH, hashes, dtype=pl.UInt64)).sort(HASH)


def context(**settings: Any) -> Context:
    return Context(OperatorId("op"), Step(4), **settings)


def remember(state: Any, row: Any) -> Any:
    """Order matters: the state is the list of values; nine forgets."""
    if row.v == 9:
        return None, []
    state = [*(state or []), row.v]
    return state, [(row.v, str(state))] * (row.v % 3)


def remember_tables(rows: pa.Table, state: pa.Table) -> tuple[pa.Table, pa.Table]:
    """The same as `remember`, on tables."""
    kept = {row["k"]: row["values"] for row in state.to_pylist()}
    out = []
    for row in rows.to_pylist():
        new, made = remember(kept.pop(row["k"], None), namedtuple("R", "v")(row["v"]))
        if new is not None:
            kept[row["k"]] = new
        out += [{"k": row["k"], "n": n, "seen": seen} for n, seen in made]
    types = pa.schema([("k", pa.string()), ("values", pa.list_(pa.int64()))])
    out_types = pa.schema([("seen", pa.string()), ("n", pa.int64()), ("k", pa.string())])
    states = [{"k": key, "values": values} for key, values in kept.items()]
    return pa.Table.from_pylist(out, out_types), pa.Table.from_pylist(states, types)


def oracle(states: dict[Any, Any], rows: Any) -> list[Any]:
    out = []
    for value, key, weight, *_ in sorted(rows, key=lambda row: row[3:]):
        for _ in range(weight):
            states[key], made = remember(states.get(key), namedtuple("R", "v")(value))
            out += [(key, n, seen) for n, seen in made]
    return out


def kernels() -> list[Any]:
    return [
        StatefulMapKernel(["k"], SCHEMA, OUT, remember, False),
        StatefulBatchesKernel(["k"], SCHEMA, OUT, {"values": pl.List(pl.Int64())}, remember_tables, False),
    ]


@pytest.mark.parametrize("kernel", kernels(), ids=["rows", "batches"])
@pytest.mark.parametrize("same_hash", [False, True], ids=["hashed", "colliding"])
@settings(max_examples=20)
@given(steps)
def test_keys_see_their_rows_in_canonical_order(kernel: Any, same_hash: bool, steps: Any) -> None:
    state = DictState()
    states: dict[Any, Any] = {}
    for rows in steps:
        expected = oracle(states, rows)
        out = kernel.process([keyed(rows, same_hash)], state, context(emit_order=True, origin=5))
        assert out.columns == ["k", "n", "seen", WEIGHT, HASH, ORIGIN, MAJOR, MINOR]
        got = out.sort(ORIGIN, MAJOR, MINOR).select("k", "n", "seen").rows()
        for key in {row[0] for row in expected + got}:
            assert [r for r in got if r[0] == key] == [r for r in expected if r[0] == key]
        assert out.get_column(WEIGHT).to_list() == [1] * len(expected)
        assert out.get_column(MAJOR).to_list() == out.get_column(HASH).to_list()
        assert not out.select(ORIGIN, MAJOR, MINOR).is_duplicated().any()
        assert len(state.dump().get("state", {})) == sum(value is not None for value in states.values())


@pytest.mark.parametrize("kernel", kernels(), ids=["rows", "batches"])
@settings(max_examples=10)
@given(steps)
def test_workers_by_hash_range_give_what_one_gives(kernel: Any, steps: Any) -> None:
    one, two = DictState(), [DictState(), DictState()]
    for rows in steps:
        whole = kernel.process([keyed(rows)], one, context(emit_order=True))
        low = pl.col(HASH) < np.uint64(1 << 63)
        parts = [
            kernel.process([keyed(rows[::-1]).filter(low if i else ~low)], two[i], context(emit_order=True))
            for i in (0, 1)
        ]
        assert pl.concat(parts).sort(ORIGIN, MAJOR, MINOR).equals(whole.sort(ORIGIN, MAJOR, MINOR))


def plain(*values: tuple[int, str], weight: int = 1) -> pl.DataFrame:
    return keyed([(value, key, weight, 0, 0, place) for place, (value, key) in enumerate(values)])


def test_initial_state_is_not_shared_between_keys() -> None:
    def collect(state: Any, row: Any) -> Any:
        state.append(row.v)
        return state, [len(state)]

    kernel = StatefulMapKernel(["k"], SCHEMA, {"n": pl.Int64()}, collect, False, [])
    out = kernel.process([plain((1, "a"), (2, "b"), (3, "a"))], DictState(), context())
    assert sorted(out.select("k", "n").rows()) == [("a", 1), ("a", 2), ("b", 1)]


def test_weights_are_given_and_returned() -> None:
    def weighted(state: Any, row: Any, weight: int) -> Any:
        return (state or 0) + weight, [(row.v, -weight)]

    kernel = StatefulMapKernel(["k"], SCHEMA, {"n": pl.Int64()}, weighted, True)
    state = DictState()
    out = kernel.process([plain((1, "a"), (2, "a"), weight=-2)], state, context())
    assert out.select("k", "n", WEIGHT).rows() == [("a", 1, 2), ("a", 2, 2)]
    assert [decode(value) for value in state.dump()["state"].values()] == [-4]
    unweighted = StatefulMapKernel(["k"], SCHEMA, {"n": pl.Int64()}, lambda s, r, w: (s, [r.v]), True)
    with pytest.raises(RecordError, match=r"expected \(row, weight\) pairs"):
        unweighted.process([plain((1, "a"))], state, context())
    with pytest.raises(EngineError, match="a deletion reached"):
        StatefulMapKernel(["k"], SCHEMA, OUT, remember, False).process(
            [plain((1, "a"), weight=-1)], state, context()
        )


@pytest.mark.parametrize("how", ["raise", "misfit", "no pair", "string"])
def test_a_failing_row_leaves_the_state_as_it_was(how: str) -> None:
    def fails_on_seven(state: Any, row: Any) -> Any:
        state = {} if state is None else state
        state[str(row.v)] = 1
        if row.v == 7:
            if how == "raise":
                raise KeyError("seven")
            return (state, ["seven"]) if how == "misfit" else (state, "abc") if how == "string" else state
        return state, [len(state)]

    kernel = StatefulMapKernel(["k"], SCHEMA, {"n": pl.Int64()}, fails_on_seven, False)
    frame = plain((1, "a"), (7, "a"), (2, "a"), (1, "b"))
    with pytest.raises(RecordError, match=r"operator op: function .*record: Row\(v=7, k='a'\)"):
        kernel.process([frame], DictState(), context())
    state, letters = DictState(), context(on_error="dead_letter")
    out = kernel.process([frame], state, letters)
    assert sorted(out.select("k", "n").rows()) == [("a", 1), ("a", 2), ("b", 1)]
    assert [letter.record for letter in letters.dead_letters] == ["Row(v=7, k='a')"]
    kept = sorted(map(decode, state.dump()["state"].values()), key=len)
    assert kept == [{"1": 1}, {"1": 1, "2": 1}]


@pytest.mark.parametrize("kernel", kernels(), ids=["rows", "batches"])
def test_kernels_can_be_pickled(kernel: Any) -> None:
    copy = pickle.loads(pickle.dumps(kernel))
    frame = plain((1, "a"), (2, "a"))
    assert copy.process([frame], DictState(), context()).equals(
        kernel.process([frame], DictState(), context())
    )


def test_unchanged_states_are_not_written() -> None:
    class Watched(DictState):
        written = 0

        def put(self, table: str, hashes: Any, keys: Any, values: Any, olds: Any) -> None:
            self.written += len(keys)
            super().put(table, hashes, keys, values, olds)

    state = Watched()
    kernel = StatefulMapKernel(["k"], SCHEMA, {"n": pl.Int64()}, lambda s, r: (r.v, None), False)
    kernel.process([plain((1, "a"), (2, "b"))], state, context())
    assert kernel.process([plain((1, "a"), (3, "b"))], state, context()).height == 0
    assert state.written == 3


def test_states_that_cannot_be_stored_name_operator_and_key() -> None:
    kernel = StatefulMapKernel(["k"], SCHEMA, OUT, lambda s, r: ({1, 2}, None), False)
    with pytest.raises(RecordError, match="operator op: key 'a': state holds a set"):
        kernel.process([plain((1, "a"))], DictState(), context())


@pytest.mark.parametrize(
    "state",
    [
        True, 1, -(2**63), 2**70, 1.5, "x", b"x", [1, [None]], (1, (2,)), {"a": {1: [2]}},
        dt.datetime(2020, 1, 2, 3, 4, 5, 6), dt.datetime(2020, 1, 1, tzinfo=dt.UTC),
        dt.date(2020, 1, 1), dt.timedelta(-1, 2, 3), Decimal("-1.50"),
    ],
    ids=repr,
)  # fmt: skip
def test_states_come_back_as_they_were(state: Any) -> None:
    back = decode(encoder()(state))
    assert back == state
    assert type(back) is type(state)


NOT_STORABLE = [{1}, object(), defaultdict(int), namedtuple("T", "a")(1)]


@pytest.mark.parametrize("state", NOT_STORABLE, ids=[type(state).__name__ for state in NOT_STORABLE])
def test_states_of_other_types_are_refused(state: Any) -> None:
    encode = encoder()
    with pytest.raises(NotStorable):
        encode([state])
    assert decode(encode(5)) == 5


def counting(change: Any) -> StatefulBatchesKernel:
    def function(rows: pa.Table, state: pa.Table) -> Any:
        out = rows.select(["k"]).append_column("n", rows["v"])
        return change(out, out.group_by("k").aggregate([("n", "max")]).rename_columns(["k", "top"]))

    return StatefulBatchesKernel(["k"], SCHEMA, {"n": pl.Int64()}, {"top": pl.Int64()}, function, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out, state: out, "function returned .*expected two tables"),
        (lambda out, state: (out, pa.concat_tables([state, state])), "two rows of state for key 'a'"),
        (lambda out, state: (out, state.set_column(0, "k", [["z"]])), "returned state for key 'z'"),
        (lambda out, state: (out.set_column(0, "k", [["z"]]), state), "returned rows for key 'z'"),
        (lambda out, state: (out, state.rename_columns(["k", "other"])), r"columns \(k, other\)"),
        (lambda out, state: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_batch_functions_that_are_refused(change: Any, message: str) -> None:
    with pytest.raises(RecordError, match=f"operator op: .*{message}"):
        counting(change).process([plain((1, "a"))], DictState(), context())


def test_batch_functions_set_whole_keys_aside() -> None:
    def picky(out: Any, state: Any) -> Any:
        if 7 in out["n"].to_pylist():
            raise ValueError("seven")
        return out, state

    state, letters = DictState(), context(on_error="dead_letter")
    out = counting(picky).process([plain((1, "a"), (7, "b"), (2, "c"), (3, "b"))], state, letters)
    assert sorted(out.select("k", "n").rows()) == [("a", 1), ("c", 2)]
    assert len(state.dump()["state"]) == 2
    assert [letter.record for letter in letters.dead_letters] == ["{'v': 7, 'k': 'b'}", "{'v': 3, 'k': 'b'}"]


def test_batch_functions_with_weights() -> None:
    def function(rows: pa.Table, state: pa.Table) -> Any:
        return rows.select(["k", WEIGHT]).append_column("n", rows["v"]), state

    kernel = StatefulBatchesKernel(["k"], SCHEMA, {"n": pl.Int64()}, {"top": pl.Int64()}, function, True)
    out = kernel.process([plain((1, "a"), weight=-3)], DictState(), context())
    assert out.select("k", "n", WEIGHT).rows() == [("a", 1, -3)]
