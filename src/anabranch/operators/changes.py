"""From what groups were and what they are now to writes and to a Z-set of changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import ne

import numpy as np
import numpy.typing as npt
import polars as pl

from anabranch.model.batch import HASH, MAJOR, MINOR, ORDER_SCHEMA, ORIGIN, WEIGHT
from anabranch.operators.grouping import I64, Segments
from anabranch.operators.kernel import Context, KeyedState, Schema

Mask = npt.NDArray[np.bool_]
Columns = Mapping[str, pl.Series]


def write_changed(
    state: KeyedState,
    table: str,
    segments: Segments,
    keys: Sequence[bytes],
    values: Sequence[bytes | None],
    olds: Sequence[bytes | None],
) -> None:
    """Write the records that differ from what is stored: changes that cancel out cost no write."""
    changed = np.fromiter(map(ne, values, olds), dtype=np.bool_, count=len(values))
    if changed.all():
        state.put(table, segments.hashes, keys, values, olds)
        return
    places = np.flatnonzero(changed)
    chosen = places.tolist()
    state.put(
        table,
        segments.hashes[places],
        [keys[place] for place in chosen],
        [values[place] for place in chosen],
        [olds[place] for place in chosen],
    )


def changes(
    segments: Segments, before: Columns, existed: Mask, after: Columns, exists: Mask, context: Context
) -> pl.DataFrame:
    """Delete the old row and insert the new one of every group whose row is another than before."""
    changed = existed != exists
    for name, column in after.items():
        changed |= column.ne_missing(before[name]).to_numpy()
    sides = ((before, existed & changed, -1), (after, exists & changed, 1))
    return pl.concat([_rows(segments, values, mask, weight, context) for values, mask, weight in sides])


def no_changes(output_schema: Schema, context: Context) -> pl.DataFrame:
    """An empty result."""
    schema = {**output_schema, WEIGHT: pl.Int64(), HASH: pl.UInt64()}
    return pl.DataFrame(schema={**schema, **ORDER_SCHEMA} if context.emit_order else schema)


def _rows(segments: Segments, values: Columns, mask: Mask, weight: int, context: Context) -> pl.DataFrame:
    hashes = pl.Series(segments.hashes)
    hidden: list[pl.Expr | pl.Series] = [pl.lit(weight, dtype=pl.Int64).alias(WEIGHT), hashes.alias(HASH)]
    if context.emit_order:
        # The old row of a key stands before the new one.
        minor = pl.Series(MINOR, 2 * _ranks(segments) + (weight > 0))
        origin = pl.lit(context.origin, dtype=ORDER_SCHEMA[ORIGIN]).alias(ORIGIN)
        hidden += [origin, hashes.alias(MAJOR), minor]
    frame = segments.keys.with_columns(*(column.alias(name) for name, column in values.items()), *hidden)
    return frame if mask.all() else frame.filter(mask)


def _ranks(segments: Segments) -> I64:
    """The place of a group among the groups of the same hash: 0 unless two keys share one."""
    hashes = segments.hashes
    fresh = np.ones(len(hashes), dtype=np.bool_)
    np.not_equal(hashes[1:], hashes[:-1], out=fresh[1:])
    every = np.arange(len(hashes))
    return every - np.maximum.accumulate(np.where(fresh, every, 0))
