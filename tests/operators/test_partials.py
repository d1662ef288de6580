"""Partials whose keys are the same, as far as they go, are added up without numbering, to the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from dictstate import DictState
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import RecordError
from anabranch.model.batch import HASH, WEIGHT
from anabranch.model.hashing import hash_columns
from anabranch.model.ids import OperatorId, Step
from anabranch.operators import aggregates as ab
from anabranch.operators import known as known_module
from anabranch.operators import partials as module
from anabranch.operators.aggregate import AggregateKernel
from anabranch.operators.grouping import Groups
from anabranch.operators.kernel import Context
from anabranch.operators.partials import Partials

LARGE = 1 << 62
SCHEMA: dict[str, pl.DataType] = {"k": pl.Int64(), "i": pl.Int64(), "x": pl.Float64()}
KEYS = [7, -(2**63), None, 2**63 - 1, 0]
VALUES = st.one_of(st.none(), st.integers(-3, 3), st.sampled_from([LARGE, -LARGE, 2 * LARGE - 1, -2 * LARGE]))
FLOATS = st.one_of(st.none(), st.sampled_from([0.1, -0.1, 0.0, -0.0, 1e300, -1e300, 5e-324, float("inf")]))


def frame_of(keys: list[int | None], rows: list[tuple[Any, Any, int]]) -> pl.DataFrame:
    frame = pl.DataFrame(
        [(key, value, x) for key, (value, x, _) in zip(keys, rows, strict=True)], schema=SCHEMA, orient="row"
    )
    return frame.with_columns(pl.Series(WEIGHT, [weight for *_, weight in rows], dtype=pl.Int64))


def outcome(kernel: AggregateKernel, steps: list[pl.DataFrame]) -> Any:
    """Each step's changes and what is stored in the end; or that a sum did not fit."""
    state = DictState()
    changes = []
    for partials in steps:
        hashed = partials.with_columns(pl.Series(HASH, hash_columns(partials, ["k"]))).sort(HASH)
        try:
            out = kernel.process([hashed], state, Context(OperatorId("totals"), Step(0)))
        except RecordError as error:
            return changes, error.reason
        changes.append(sorted(repr(row) for row in out.rows()))
    return changes, state._tables


@settings(max_examples=200)
@given(st.data(), st.booleans(), st.booleans())
def test_the_same_bits_as_of_all_rows(data: st.DataObject, append_only: bool, aligned: bool) -> None:
    """Batches with the first few keys each, in their order or in one of their own."""
    kernel = AggregateKernel(
        ["k"],
        SCHEMA,
        {"n": ab.count(), "s": ab.sum("i"), "x": ab.sum("x"), "m": ab.min("i"), "a": ab.mean("i")},
        append_only,
    )
    weights = st.integers(1, 3) if append_only else st.sampled_from([-2, -1, 1, 1, 1, 3, 1 << 40])
    row = st.tuples(VALUES, FLOATS, weights)
    whole, combined = [], []
    for _ in range(2):
        frames = []
        for count in data.draw(st.lists(st.integers(1, len(KEYS)), min_size=2, max_size=5)):
            keys = KEYS[:count] if aligned else data.draw(st.permutations(KEYS))[:count]
            frames.append(frame_of(keys, data.draw(st.lists(row, min_size=count, max_size=count))))
        pieces = [kernel.partial(frame) for frame in frames]
        assert Partials(pieces, ["k"])._aligned or not aligned
        combined.append(kernel.combine(pieces))
        whole.append(kernel.partial(pl.concat(frames)))
        assert combined[-1].schema == whole[-1].schema
        assert combined[-1].height == whole[-1].height
    assert outcome(kernel, combined) == outcome(kernel, whole)


def pieces_of(*keys: list[Any], dtype: pl.DataType | None = None) -> list[pl.DataFrame]:
    return [
        pl.DataFrame({"k": own, "v": range(len(own))}, schema={"k": dtype or pl.Int64(), "v": pl.Int64()})
        for own in keys
    ]


def check(pieces: list[pl.DataFrame], aligned: bool) -> None:
    """Index, sizes and totals, against a loop over all rows."""
    partials = Partials(pieces, ["k"])
    assert partials._aligned == aligned
    every = [row for piece in pieces for row in piece.rows()]
    names = partials.keys.get_column("k").to_list()
    assert [names[group] for group in partials.index.tolist()] == [key for key, _ in every]
    assert partials.sizes.tolist() == [sum(key == name for key, _ in every) for name in names]
    assert partials.total("v").tolist() == [sum(v for key, v in every if key == name) for name in names]
    assert partials.column("v").to_list() == [v for _, v in every]


def test_keys_that_go_on_where_others_end_are_shared() -> None:
    check(pieces_of([5, None, 3]), aligned=True)
    check(pieces_of([5, None], [5, None, 3], [], [5]), aligned=True)
    check(pieces_of([1, 2], [1, 2], dtype=pl.UInt8()), aligned=True)


def test_other_keys_are_numbered() -> None:
    check(pieces_of([5, None], [None, 5]), aligned=False)
    check(pieces_of([5, 3], [5, 4, 3]), aligned=False)
    check(pieces_of([5, 3], [3]), aligned=False)
    check(pieces_of([5, 3], [5, 4]), aligned=False)
    check(pieces_of(["a", "b"], ["a", "b"], dtype=pl.String()), aligned=False)
    check(pieces_of([1.0, 2.0], [1.0, 2.0], dtype=pl.Float64()), aligned=False)


def test_all_columns_of_a_key_count() -> None:
    one = pl.DataFrame({"k": [1, 1], "j": [1, 2]})
    assert Partials([one, one], ["k", "j"])._aligned
    assert not Partials([one, pl.DataFrame({"k": [1, 1], "j": [2, 1]})], ["k", "j"])._aligned


def test_known_keys_are_not_numbered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `partial` makes of batches whose keys are known, with a few that are new or do not come."""
    monkeypatch.setattr(known_module, "_FEWEST", 1)
    kernel = AggregateKernel(["k"], SCHEMA, {"s": ab.sum("i")}, append_only=False)
    known = known_module.Known()
    rng = np.random.default_rng(3)

    def batch(low: int, high: int) -> pl.DataFrame:
        keys = [*range(low, high)] * 9
        rng.shuffle(keys)
        return frame_of([key * 10**12 for key in keys], [(key, None, 1) for key in keys])

    frames = [batch(0, 100), batch(0, 103), batch(2, 103)]
    pieces = [kernel.partial(frame, known) for frame in frames]

    def refuse(*_: Any) -> Groups:
        raise AssertionError("keys were numbered")

    with monkeypatch.context() as patch:
        patch.setattr(module, "group_rows", refuse)
        combined = kernel.combine(pieces, known)
    assert combined.height == 103
    assert outcome(kernel, [combined]) == outcome(kernel, [kernel.partial(pl.concat(frames))])
