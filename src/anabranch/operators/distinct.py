"""Each row once, while its weights add up to more than zero."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from anabranch.model.batch import HASH, WEIGHT, consolidate
from anabranch.model.rowcodec import RowCodec
from anabranch.operators.kernel import Context, KeyedState, Schema
from anabranch.operators.known import Known
from anabranch.operators.order import place_rows
from anabranch.operators.zset import canonical, fold, has_nested, pack_weights, unpack_weights


class DistinctKernel:
    """Keeps the total weight of every row; emits +1 when it becomes positive and −1 when it ceases to be.

    Where no deletions can come, a row that is there once is there for good: its weight is not
    updated, and rows seen before cost a read and no write.
    """

    ordered = False
    tables: tuple[str, ...] = ("rows",)

    def __init__(self, keys: Sequence[str], schema: Schema, append_only: bool) -> None:
        self.output_schema = dict(schema)
        self._append_only = append_only
        rest = [name for name in schema if name not in keys]
        self._codec = RowCodec({name: schema[name] for name in (*keys, *rest)})

    def partial(self, frame: pl.DataFrame, known: Known | None = None) -> pl.DataFrame:
        if has_nested(self.output_schema):
            return frame.select(*self.output_schema, WEIGHT)
        return consolidate(canonical(frame.select(*self.output_schema, WEIGHT)))

    def combine(self, partials: Sequence[pl.DataFrame], known: Known | None = None) -> pl.DataFrame:
        return self.partial(pl.concat(partials))

    def process(self, inputs: Sequence[pl.DataFrame], state: KeyedState, context: Context) -> pl.DataFrame:
        frame = canonical(inputs[0].select(*self.output_schema, WEIGHT, HASH))
        delta = fold(frame, self._codec.encode(frame))
        olds = state.get("rows", delta.hashes, delta.rows)
        before = unpack_weights(olds)
        after = before + delta.weights
        put = np.flatnonzero(before == 0) if self._append_only else np.arange(len(after))
        state.put(
            "rows",
            delta.hashes[put],
            [delta.rows[i] for i in put],
            pack_weights(after[put]),
            [olds[i] for i in put],
        )
        change = (after > 0).astype(np.int64) - (before > 0).astype(np.int64)
        changed = np.flatnonzero(change)
        out = frame[delta.at[changed]].with_columns(pl.Series(WEIGHT, change[changed]))
        return place_rows(out, context)
