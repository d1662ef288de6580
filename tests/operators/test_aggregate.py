"""The aggregate kernel against plain Python: any Z-set, any split over senders, batches and workers."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import polars as pl
import pytest
from dictstate import DictState
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import RecordError
from anabranch.model.batch import HASH, MAJOR, MINOR, ORIGIN, WEIGHT
from anabranch.model.hashing import hash_columns
from anabranch.model.ids import OperatorId, Step
from anabranch.operators import aggregates as ab
from anabranch.operators.aggregate import AggregateKernel
from anabranch.operators.kernel import Combining, Context

SCHEMA: dict[str, pl.DataType] = {
    "k": pl.String(),
    "j": pl.Int32(),
    "i": pl.Int64(),
    "x": pl.Float64(),
    "d": pl.Decimal(12, 2),
    "s": pl.String(),
}
KEYS = ["k", "j"]
AGGREGATES = {
    "rows": ab.count(),
    "si": ab.sum("i"),
    "ni": ab.min("i"),
    "mi": ab.mean("i"),
    "sx": ab.sum("x"),
    "nx": ab.min("x"),
    "xx": ab.max("x"),
    "mx": ab.mean("x"),
    "sd": ab.sum("d"),
    "md": ab.mean("d"),
    "xd": ab.max("d"),
    "ns": ab.min("s"),
    "xs": ab.max("s"),
}
Row = tuple[Any, ...]
Delta = list[tuple[Row, int]]

_FLOATS = st.sampled_from(
    [0.1, -0.1, 0.0, -0.0, 1e300, -1e300, 5e-324, 1e16, 1.0, math.inf, -math.inf, math.nan]
)
ROWS = st.tuples(
    st.sampled_from(["a", "b", "", None]),
    st.sampled_from([1, None]),
    st.one_of(st.none(), st.integers(-3, 3)),
    st.one_of(st.none(), _FLOATS),
    st.one_of(st.none(), st.decimals(-99, 99, places=2)),
    st.one_of(st.none(), st.sampled_from(["", "a", "ab", "ü", "\x00"])),
)


def frame_of(delta: Delta, schema: dict[str, pl.DataType] = SCHEMA) -> pl.DataFrame:
    frame = pl.DataFrame([row for row, _ in delta], schema=schema, orient="row")
    return frame.with_columns(
        pl.Series(WEIGHT, [w for _, w in delta], dtype=pl.Int64), pl.lit(7).alias("__minor")
    )


def context(**options: Any) -> Context:
    return Context(OperatorId("totals"), Step(0), **options)


def run_step(
    kernel: AggregateKernel,
    state: DictState,
    batches: list[Delta],
    workers: int,
    schema: dict[str, pl.DataType] = SCHEMA,
) -> Counter[Row]:
    """One step: a partial for every batch, exchanged by hash, processed by each worker."""
    keys = [name for name in kernel.output_schema if name in schema]
    partials = pl.concat([kernel.partial(frame_of(batch, schema)) for batch in batches])
    assert all(name in keys or name.startswith("__p_") for name in partials.columns)
    partials = partials.with_columns(pl.Series(HASH, hash_columns(partials, keys))).sort(HASH)
    changes: Counter[Row] = Counter()
    for worker in range(workers):
        mine = partials.filter(pl.col(HASH) % workers == worker)
        out = kernel.process([mine], state, context())
        assert dict(out.schema) == {**kernel.output_schema, WEIGHT: pl.Int64(), HASH: pl.UInt64()}
        assert (hash_columns(out, keys) == out.get_column(HASH).to_numpy()).all()
        for row in out.drop(HASH).rows():
            changes[tuple(map(plain, row[:-1]))] += row[-1]
    return changes


def plain(value: Any) -> Any:
    """A value that compares by identity of bits: NaN equals itself, 0.0 is not −0.0."""
    return value.hex() if isinstance(value, float) else value


def expected(rows: Counter[Row]) -> dict[Row, Row]:
    """The table of results of a Z-set, computed by brute force."""
    table: dict[Row, Row] = {}
    for key in {row[:2] for row in rows}:
        group = [(row, weight) for row, weight in rows.items() if row[:2] == key]
        total = sum(weight for _, weight in group)
        if total == 0:
            continue
        columns = [[(row[c], w) for row, w in group if row[c] is not None] for c in range(2, 6)]
        i, x, d, s = columns
        si, sx, sd = exact(i), exact(x), exact(d)
        mean_d = None if sd is None else float(Fraction(sd) * 100) / 100.0 / count_of(d) + 0.0
        result = (
            total,
            None if si is None else int(si),
            extremum(i, False),
            None if si is None else float(si) / count_of(i) + 0.0,
            sx,
            extremum(x, False),
            extremum(x, True),
            None if sx is None else sx / count_of(x) + 0.0,
            None if sd is None else Decimal(int(sd * 100)) / 100,
            mean_d,
            extremum(d, True),
            extremum(s, False),
            extremum(s, True),
        )
        table[key] = tuple(map(plain, key + result))
    return table


def count_of(values: list[tuple[Any, int]]) -> int:
    return sum(weight for _, weight in values)


def exact(values: list[tuple[Any, int]]) -> Any:
    if count_of(values) == 0:
        return None
    if any(isinstance(v, float) for v, _ in values):
        weights: Counter[str] = Counter()
        for v, w in values:
            if not math.isfinite(v):
                weights[repr(v)] += w
        up = weights["inf"] > 0 or weights["-inf"] < 0
        down = weights["inf"] < 0 or weights["-inf"] > 0
        if weights["nan"] or (up and down):
            return math.nan
        if up or down:
            return math.inf if up else -math.inf
        total = sum((Fraction(v) * w for v, w in values if math.isfinite(v)), Fraction(0))
        return float(total)
    return sum((Fraction(v) * w for v, w in values), Fraction(0))


def extremum(values: list[tuple[Any, int]], largest: bool) -> Any:
    weights: Counter[Any] = Counter()
    originals: dict[Any, Any] = {}
    for value, weight in values:
        if isinstance(value, float):
            value = value + 0.0
            order = (math.isnan(value), 0.0 if math.isnan(value) else value)
        else:
            order = value.encode() if isinstance(value, str) else value
        weights[order] += weight
        originals[order] = value
    present = [order for order, weight in weights.items() if weight > 0]
    if not present:
        return None
    return originals[max(present) if largest else min(present)]


def changes_between(old: dict[Row, Row], new: dict[Row, Row]) -> Counter[Row]:
    changes: Counter[Row] = Counter()
    for key in old.keys() | new.keys():
        if old.get(key) != new.get(key):
            if key in old:
                changes[old[key]] -= 1
            if key in new:
                changes[new[key]] += 1
    return changes


def cut(delta: Delta, places: list[int]) -> list[Delta]:
    batches: list[Delta] = [[], [], []]
    for row, place in zip(delta, places, strict=True):
        batches[place].append(row)
    return batches


@pytest.mark.parametrize("append_only", [False, True])
@settings(max_examples=25)
@given(data=st.data())
def test_any_zset_and_any_split(append_only: bool, data: st.DataObject) -> None:
    weights = st.integers(0, 3) if append_only else st.integers(-2, 2)
    steps = data.draw(st.lists(st.lists(st.tuples(ROWS, weights), max_size=12), max_size=4))
    kernel = AggregateKernel(KEYS, SCHEMA, AGGREGATES, append_only)
    whole, split = DictState(), DictState()
    rows: Counter[Row] = Counter()
    for delta in steps:
        before = expected(rows)
        for row, weight in delta:
            rows[row] += weight
        found = run_step(kernel, whole, [delta], 1)
        places = data.draw(st.lists(st.integers(0, 2), min_size=len(delta), max_size=len(delta)))
        assert run_step(kernel, split, cut(delta, places), 3) == found
        assert found == changes_between(before, expected(rows))
        assert split.dump() == whole.dump()


@settings(max_examples=15)
@given(st.lists(st.tuples(ROWS, st.integers(-2, 2)), max_size=15))
def test_nothing_is_left_of_vanished_rows(delta: Delta) -> None:
    kernel = AggregateKernel(KEYS, SCHEMA, AGGREGATES, append_only=False)
    state = DictState()
    run_step(kernel, state, [delta], 1)
    run_step(kernel, state, [[(row, -weight) for row, weight in delta]], 2)
    assert state.dump() == {}


def test_first_rows_changes_and_last_rows() -> None:
    schema: dict[str, pl.DataType] = {"word": pl.String(), "n": pl.Int64()}
    kernel = AggregateKernel(["word"], schema, {"count": ab.count(), "top": ab.max("n")}, append_only=False)
    state = DictState()
    assert run_step(kernel, state, [[(("a", 1), 1), (("b", 5), 2)]], 1, schema) == {
        ("a", 1, 1): 1,
        ("b", 2, 5): 1,
    }
    assert run_step(kernel, state, [[(("b", 5), -1)]], 1, schema) == {("b", 2, 5): -1, ("b", 1, 5): 1}
    assert run_step(kernel, state, [[(("b", 5), -1), (("b", 3), 1)]], 1, schema) == {
        ("b", 1, 5): -1,
        ("b", 1, 3): 1,
    }
    assert run_step(kernel, state, [[(("b", 3), -1), (("a", 1), 0)]], 1, schema) == {("b", 1, 3): -1}
    assert len(state.dump()["groups"]) == 1


def test_negative_values_at_the_edge_are_passed_over() -> None:
    schema: dict[str, pl.DataType] = {"k": pl.Int64(), "n": pl.Int64()}
    kernel = AggregateKernel(["k"], schema, {"low": ab.min("n"), "high": ab.max("n")}, append_only=False)
    assert kernel.tables == ("groups", "values_0")
    state = DictState()
    first = [((1, n), w) for n, w in ((0, -1), (1, -1), (2, 1), (3, 1), (4, 1), (5, 1), (6, -2), (7, -1))]
    assert run_step(kernel, state, [first], 1, schema) == {(1, 2, 5): 1}
    later: Delta = [((1, 2), -1), ((1, 5), -3)]
    assert run_step(kernel, state, [later], 1, schema) == {(1, 2, 5): -1, (1, 3, 4): 1}


def test_group_of_weight_zero_keeps_what_is_not_zero() -> None:
    schema: dict[str, pl.DataType] = {"k": pl.Int64(), "n": pl.Int64()}
    kernel = AggregateKernel(["k"], schema, {"s": ab.sum("n")}, append_only=False)
    state = DictState()
    assert run_step(kernel, state, [[((1, 10), 1), ((1, 3), -1)]], 1, schema) == {}
    assert state.dump() != {}
    assert run_step(kernel, state, [[((1, 3), 1)]], 1, schema) == {(1, 10): 1}


@pytest.mark.parametrize("dtype", [pl.Int64(), pl.Int8(), pl.UInt64(), pl.Float32()])
def test_sums_of_every_width(dtype: pl.DataType) -> None:
    schema = {"k": pl.Int64(), "n": dtype}
    kernel = AggregateKernel(["k"], schema, {"s": ab.sum("n"), "m": ab.mean("n")}, append_only=True)
    found = run_step(kernel, DictState(), [[((1, 100), 1), ((1, 27), 3)]], 1, schema)
    assert found == {(1, plain(181.0) if dtype.is_float() else 181, plain(45.25)): 1}


def test_integer_sums_may_pass_int64_inside_a_step_but_not_after_it() -> None:
    schema: dict[str, pl.DataType] = {"k": pl.Int64(), "n": pl.Int64()}
    kernel = AggregateKernel(["k"], schema, {"s": ab.sum("n")}, append_only=False)
    state = DictState()
    big = 2**63 - 1
    batches: list[Delta] = [[((1, big), 1), ((1, big), 1)], [((1, -big), 1), ((1, -5), 1)]]
    assert run_step(kernel, state, batches, 1, schema) == {(1, big - 5): 1}
    stored = state.dump()
    with pytest.raises(RecordError, match=r"operator totals: sum of column 'n' overflows int64.*'k': 1"):
        run_step(kernel, state, [[((1, 6), 1)]], 1, schema)
    assert state.dump() == stored
    cancelling: list[Delta] = [[((1, 2**40), -(2**22))], [((1, 2**62), 1)]]
    assert run_step(kernel, state, cancelling, 1, schema) == {}
    assert run_step(kernel, state, [[((1, 5), 1)]], 1, schema) == {(1, big - 5): -1, (1, big): 1}


def test_unsigned_values_beyond_int64() -> None:
    schema: dict[str, pl.DataType] = {"k": pl.Int64(), "n": pl.UInt64()}
    kernel = AggregateKernel(["k"], schema, {"s": ab.sum("n")}, append_only=False)
    delta: Delta = [((1, 2**64 - 1), 1), ((1, 2**63), -1)]
    assert run_step(kernel, DictState(), [delta], 1, schema) == {}
    assert run_step(kernel, DictState(), [[*delta, ((1, 0), 1)]], 1, schema) == {(1, 2**63 - 1): 1}
    with pytest.raises(RecordError, match="overflows int64"):
        run_step(kernel, DictState(), [[((1, 2**63), 1)]], 1, schema)


def test_decimal_sums_have_38_digits() -> None:
    schema: dict[str, pl.DataType] = {"k": pl.Int64(), "n": pl.Decimal(38, 2)}
    kernel = AggregateKernel(["k"], schema, {"s": ab.sum("n")}, append_only=False)
    assert kernel.output_schema["s"] == pl.Decimal(38, 2)
    largest = Decimal("9" * 36 + ".99")
    state = DictState()
    assert run_step(kernel, state, [[((1, largest), 1)]], 1, schema) == {(1, largest): 1}
    with pytest.raises(RecordError, match="38 digits"):
        run_step(kernel, state, [[((1, Decimal("0.01")), 1)]], 1, schema)
    with pytest.raises(RecordError, match="38 digits"):
        run_step(kernel, state, [[((1, largest), 9)]], 1, schema)


def test_keys_that_share_a_hash_stay_apart() -> None:
    schema: dict[str, pl.DataType] = {"k": pl.String(), "n": pl.Int64()}
    kernel = AggregateKernel(["k"], schema, {"s": ab.sum("n"), "low": ab.min("n")}, append_only=False)
    state = DictState()
    deltas: list[Delta] = [[(("a", 1), 1), (("b", 2), 1)], [(("b", 3), 1), (("a", 4), 1), ((None, 9), 1)]]
    partials = pl.concat([kernel.partial(frame_of(delta, schema)) for delta in deltas])
    collided = partials.with_columns(pl.lit(5, dtype=pl.UInt64).alias(HASH))
    out = kernel.process([collided], state, context(emit_order=True, origin=3))
    assert sorted(out.select("k", "s", "low", WEIGHT).rows(), key=repr) == [
        ("a", 5, 1, 1),
        ("b", 5, 2, 1),
        (None, 9, 9, 1),
    ]
    assert out.get_column(ORIGIN).to_list() == [3] * 3
    assert out.get_column(MAJOR).to_list() == [5] * 3
    assert len(set(out.get_column(MINOR).to_list())) == 3


def test_order_columns_put_the_old_row_before_the_new() -> None:
    schema: dict[str, pl.DataType] = {"k": pl.Int64()}
    kernel = AggregateKernel(["k"], schema, {"n": ab.count()}, append_only=True)
    state = DictState()
    partial = kernel.partial(frame_of([((1,), 1)], schema)).with_columns(
        pl.lit(9, dtype=pl.UInt64).alias(HASH)
    )
    kernel.process([partial], state, context())
    out = kernel.process([partial], state, context(emit_order=True)).sort(MINOR)
    assert out.select("n", WEIGHT).rows() == [(1, -1), (2, 1)]
    empty = kernel.process([partial.clear()], state, context(emit_order=True))
    assert empty.schema == out.schema


def test_kernel_is_picklable_and_combines() -> None:
    kernel = pickle.loads(pickle.dumps(AggregateKernel(KEYS, SCHEMA, AGGREGATES, append_only=False)))
    assert isinstance(kernel, Combining)
    assert run_step(kernel, DictState(), [[]], 1) == {}


def test_many_groups_at_once() -> None:
    rng = np.random.default_rng(3)
    count = 20_000
    frame = pl.DataFrame(
        {
            "k": rng.integers(0, 3_000, count) * 10**9,
            "x": rng.standard_normal(count) * 10.0 ** rng.integers(-9, 9, count),
        }
    ).with_columns(pl.lit(1, dtype=pl.Int64).alias(WEIGHT))
    kernel = AggregateKernel(
        ["k"], {"k": pl.Int64(), "x": pl.Float64()}, {"s": ab.sum("x")}, append_only=True
    )
    state = DictState()
    for part in (frame[:5_000], frame[5_000:]):
        partial = kernel.partial(part)
        hashed = partial.with_columns(pl.Series(HASH, hash_columns(partial, ["k"]))).sort(HASH)
        out = kernel.process([hashed], state, context())
    sums: dict[int, list[float]] = {}
    for key, value in frame.select("k", "x").rows():
        sums.setdefault(key, []).append(value)
    for key, total, weight in out.select("k", "s", WEIGHT).rows():
        assert weight < 0 or total == math.fsum(sums[key])
