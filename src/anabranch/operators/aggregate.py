"""`count`, `sum`, `min`, `max` and `mean` per key, right under deletions and any integer weights.

A group exists while the weight of its rows is not 0.  `count` is that weight.  The others ignore nulls and
are null when nothing is left: `sum` and `mean` when the weights of the values add up to 0, `min` and `max`
when no value has a positive weight.  Sums are exact: integers in int64 (beyond it is an error), decimals in 38
digits, floats rounded once from the exact sum.  A mean is the sum as a double, divided once.

A group's record in table `groups` is its weight and one part for each column that is aggregated; `min` and
`max` over rows that can be deleted also keep every value in a table of its own (`extremum.py`).  A record
that is all zero is deleted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import ne

import numpy as np
import numpy.typing as npt
import polars as pl

from anabranch.model.batch import HASH, MAJOR, MINOR, ORDER_SCHEMA, ORIGIN, WEIGHT
from anabranch.model.rowcodec import RowCodec
from anabranch.operators.accumulators import (
    Accumulator,
    DecimalSum,
    FloatSum,
    IntegerSum,
    Rows,
    Stored,
    Touched,
    add_checked,
)
from anabranch.operators.aggregates import Aggregate, check
from anabranch.operators.grouping import I64, Segments, group_rows, segment
from anabranch.operators.kernel import Context, KeyedState, Schema
from anabranch.operators.records import Records

_TOTAL = "__p_total"
_GROUPS = "groups"

Mask = npt.NDArray[np.bool_]


class AggregateKernel:
    """Several aggregates of the groups of one key, combined before the exchange.

    Raises:
        FlowError: see `check`.
    """

    ordered = False

    def __init__(
        self, keys: Sequence[str], schema: Schema, aggregates: Mapping[str, Aggregate], append_only: bool
    ) -> None:
        types = check(aggregates, schema, "aggregate")
        self._keys = list(keys)
        self._key_schema = {name: schema[name] for name in self._keys}
        self.output_schema: dict[str, pl.DataType] = {**self._key_schema, **types}
        self._codec = RowCodec(self._key_schema)
        self._accumulators: list[Accumulator] = []
        self._results: dict[str, tuple[str, int | None]] = {}
        shared: dict[tuple[str, str], int] = {}
        for name, aggregate in aggregates.items():
            place: int | None = None
            if aggregate.column is not None:
                what = "sum" if aggregate.kind == "mean" else aggregate.kind
                place = shared.setdefault((what, aggregate.column), len(self._accumulators))
                if place == len(self._accumulators):
                    self._accumulators.append(
                        _accumulator(what, aggregate.column, schema, append_only, place)
                    )
            self._results[name] = (aggregate.kind, place)
        self._records = Records(self._accumulators)
        self.tables: tuple[str, ...] = (_GROUPS,)

    def partial(self, frame: pl.DataFrame) -> pl.DataFrame:
        """One row for each key of the batch."""
        weights: I64 | None = frame.get_column(WEIGHT).to_numpy()
        assert weights is not None
        if (weights == 1).all():
            weights = None
        groups = group_rows(frame, self._keys)
        if weights is None:
            totals = np.bincount(groups.index, minlength=groups.count)
        else:
            totals = np.zeros(groups.count, dtype=np.int64)
            np.add.at(totals, groups.index, weights)
        rows = Rows(frame, groups, weights, totals)
        columns = {_TOTAL: pl.Series(totals)}
        for accumulator in self._accumulators:
            columns.update(accumulator.partial(rows))
        return groups.keys.with_columns(**columns)

    def process(self, inputs: Sequence[pl.DataFrame], state: KeyedState, context: Context) -> pl.DataFrame:
        """Changes of the groups that the partials touch."""
        (partials,) = inputs
        if partials.is_empty():
            return self._empty(context)
        segments = segment(partials, self._keys)
        keys = self._codec.encode(segments.keys)
        olds = state.get(_GROUPS, segments.hashes, keys)
        old_totals, old_parts = self._records.decode(olds)
        touched = Touched(segments, keys, state, context.operator)
        totals = add_checked(old_totals, segments.total(_TOTAL), context.operator, "count of rows")
        parts = [one.update(touched, old) for one, old in zip(self._accumulators, old_parts, strict=True)]
        self._write(state, segments, keys, self._records.encode(totals, parts), olds)
        return self._changes(segments, (old_totals, old_parts), (totals, parts), context)

    def _write(
        self,
        state: KeyedState,
        segments: Segments,
        keys: list[bytes],
        values: list[bytes | None],
        olds: list[bytes | None],
    ) -> None:
        changed = np.fromiter(map(ne, values, olds), dtype=np.bool_, count=len(values))
        if changed.all():
            state.put(_GROUPS, segments.hashes, keys, values, olds)
            return
        places = np.flatnonzero(changed)
        chosen = places.tolist()
        state.put(
            _GROUPS,
            segments.hashes[places],
            [keys[place] for place in chosen],
            [values[place] for place in chosen],
            [olds[place] for place in chosen],
        )

    def _changes(
        self,
        segments: Segments,
        old: tuple[I64, list[Stored]],
        new: tuple[I64, list[Stored]],
        context: Context,
    ) -> pl.DataFrame:
        before, after = self._values(*old), self._values(*new)
        existed, exists = old[0] != 0, new[0] != 0
        changed = existed != exists
        for name, column in after.items():
            changed |= column.ne_missing(before[name]).to_numpy()
        ranks = _ranks(segments) if context.emit_order else None
        return pl.concat(
            [
                self._rows(segments, values, mask, weight, ranks, context)
                for values, mask, weight in ((before, existed & changed, -1), (after, exists & changed, 1))
            ]
        )

    def _values(self, totals: I64, parts: list[Stored]) -> dict[str, pl.Series]:
        return {
            name: pl.Series(totals) if place is None else self._accumulators[place].result(kind, parts[place])
            for name, (kind, place) in self._results.items()
        }

    def _rows(
        self,
        segments: Segments,
        values: dict[str, pl.Series],
        mask: Mask,
        weight: int,
        ranks: I64 | None,
        context: Context,
    ) -> pl.DataFrame:
        hashes = pl.Series(segments.hashes)
        frame = segments.keys.with_columns(**values).with_columns(
            pl.lit(weight, dtype=pl.Int64).alias(WEIGHT), hashes.alias(HASH)
        )
        if ranks is not None:
            minor = pl.Series(2 * ranks + (weight > 0))
            frame = frame.with_columns(
                pl.lit(context.origin, dtype=pl.Int32).alias(ORIGIN), hashes.alias(MAJOR), minor.alias(MINOR)
            )
        return frame if mask.all() else frame.filter(mask)

    def _empty(self, context: Context) -> pl.DataFrame:
        schema = {**self.output_schema, WEIGHT: pl.Int64(), HASH: pl.UInt64()}
        return pl.DataFrame(schema={**schema, **ORDER_SCHEMA} if context.emit_order else schema)


def _accumulator(what: str, column: str, schema: Schema, append_only: bool, place: int) -> Accumulator:
    dtype = schema[column]
    if dtype.is_float():
        return FloatSum(column, place)
    if isinstance(dtype, pl.Decimal):
        return DecimalSum(column, place, dtype.scale)
    return IntegerSum(column, place)


def _ranks(segments: Segments) -> I64:
    """The place of a group among the groups of the same hash: 0 unless two keys share one."""
    hashes = segments.hashes
    fresh = np.ones(len(hashes), dtype=np.bool_)
    np.not_equal(hashes[1:], hashes[:-1], out=fresh[1:])
    every = np.arange(len(hashes))
    return every - np.maximum.accumulate(np.where(fresh, every, 0))
