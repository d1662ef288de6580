"""The vectorised form of `stateful_map`: all rows and the state of a batch of keys as Arrow tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import polars as pl

from anabranch.model.batch import HASH, WEIGHT
from anabranch.model.rowcodec import RowCodec
from anabranch.operators.arrow import BatchFunctionError, Table, from_table, to_table
from anabranch.operators.kernel import Context, KeyedState, Schema
from anabranch.operators.keyrows import Grouped, group, repeated
from anabranch.operators.order import I64, place_rows
from anabranch.operators.userfn import Poisoned, check_in, check_out, raised, set_aside, stop

_NUMBER = "__key"
"""Numbers the keys of a batch, in the order of (hash, key)."""
_PIECES = 1024
"""Into so many a batch is cut on which processes died."""


class StatefulBatchesKernel:
    """`fn(rows, state) -> (out, new_state)`, each an Arrow table, for all rows of a batch of keys.

    `rows` is sorted by the hash of the key, and canonically within a key; with `weights` it has `__weight`,
    and so must `out`.  `state` has the key's columns and the state's for those keys that have state, and
    `new_state` replaces it: a key of the batch without a row in it loses its state.  Which keys come together
    depends on the number of workers, so the function must treat keys one by one.

    When the function fails and bad records are to be set aside, it is run on halves of the keys, until the
    keys at fault stand alone; all rows of such a key in this step are dead letters, and its state stays.  Where
    processes died on a batch it is run in pieces, to the same end.
    """

    ordered = True
    tables: tuple[str, ...] = ("state",)

    def __init__(
        self,
        keys: Sequence[str],
        in_schema: Schema,
        out_schema: Schema,
        state_schema: Schema,
        fn: Callable[[Table, Table], tuple[Table, Table]],
        weights: bool,
    ) -> None:
        self._keys = list(keys)
        self._in = list(in_schema)
        self._fn = fn
        self._weights = weights
        self._key_codec = RowCodec({key: in_schema[key] for key in keys})
        self._state_codec = RowCodec(state_schema)
        self._state_schema = {**self._key_codec.schema, **state_schema}
        self.output_schema = {**self._key_codec.schema, **out_schema}

    def process(self, inputs: Sequence[pl.DataFrame], state: KeyedState, context: Context) -> pl.DataFrame:
        frame = inputs[0] if self._weights else repeated(inputs[0], context)
        grouped = group(frame, self._key_codec)
        olds = state.get("state", grouped.hashes, grouped.keys)
        news = list(olds)
        parts = [self._no_rows()]
        if grouped.keys:
            parts += self._run(grouped, np.arange(len(grouped.keys)), olds, news, context)
        changed = [i for i, new in enumerate(news) if new != olds[i]]
        state.put(
            "state",
            grouped.hashes[changed],
            [grouped.keys[i] for i in changed],
            [news[i] for i in changed],
            [olds[i] for i in changed],
        )
        out = pl.concat(parts).sort(_NUMBER, maintain_order=True)
        hashes = grouped.hashes[out.get_column(_NUMBER).to_numpy()]
        out = out.drop(_NUMBER).with_columns(pl.Series(HASH, hashes, dtype=pl.UInt64))
        return place_rows(out, context)

    def _run(
        self,
        grouped: Grouped,
        chosen: I64,
        olds: list[bytes | None],
        news: list[bytes | None],
        context: Context,
    ) -> list[pl.DataFrame]:
        """Call the function for some of the keys, which stand one after the other; fills in their `news`."""
        first, last = int(chosen[0]), int(chosen[-1])
        start, end = int(grouped.starts[first]), int(grouped.starts[last] + grouped.sizes[last])
        rows = grouped.frame[start:end]
        keys = rows.select(self._keys)[grouped.starts[chosen] - start]
        noted = "" if context.guard is None else _noted(keys)
        keys = keys.with_columns(pl.Series(_NUMBER, chosen))
        if len(chosen) > 1 and context.guard is not None and context.guard.died(context.operator, noted):
            size = -(-len(chosen) // _PIECES)
            pieces = (chosen[start : start + size] for start in range(0, len(chosen), size))
            return [part for keys_ in pieces for part in self._run(grouped, keys_, olds, news, context)]
        try:
            check_in(context, noted)
            out, kept = self._call(rows, keys, olds, chosen)
            check_out(context)
        except (BatchFunctionError, Poisoned) as error:
            if context.on_error == "stop":
                stop(context, str(error), _noted(keys.drop(_NUMBER)) if len(chosen) == 1 else "", error)
            if len(chosen) > 1:
                half = len(chosen) // 2
                halves = (chosen[:half], chosen[half:])
                return [part for keys_ in halves for part in self._run(grouped, keys_, olds, news, context)]
            for row in rows.select(*self._in, WEIGHT).iter_rows(named=True):
                weight = row.pop(WEIGHT)
                set_aside(context, str(error), row, weight, error)
            return []
        for number in chosen.tolist():
            news[number] = None
        values = self._state_codec.encode(kept)
        for number, value in zip(kept.get_column(_NUMBER).to_list(), values, strict=True):
            news[number] = value
        return [out.select(*self.output_schema, WEIGHT, _NUMBER)]

    def _call(
        self, rows: pl.DataFrame, keys: pl.DataFrame, olds: list[bytes | None], chosen: I64
    ) -> tuple[pl.DataFrame, pl.DataFrame]:
        stored = [(i, olds[number]) for i, number in enumerate(chosen.tolist())]
        have = [i for i, old in stored if old is not None]
        state = self._state_codec.decode([old for _, old in stored if old is not None])
        given = keys.drop(_NUMBER)[have].hstack(state.get_columns())
        columns = [*self._in, WEIGHT] if self._weights else self._in
        try:
            result = self._fn(to_table(rows.select(columns)), to_table(given))
        except Exception as error:
            raise BatchFunctionError(raised(error)) from error
        if not isinstance(result, tuple) or len(result) != 2:
            raise BatchFunctionError(
                f"function returned {type(result).__name__}, expected two tables: rows and new state"
            )
        wanted = {**self.output_schema, WEIGHT: pl.Int64()} if self._weights else self.output_schema
        out = self._numbered(from_table(result[0], wanted, "a table of rows"), keys, "rows")
        kept = self._numbered(from_table(result[1], self._state_schema, "a table of state"), keys, "state")
        if kept.get_column(_NUMBER).is_duplicated().any():
            twice = kept.filter(pl.col(_NUMBER).is_duplicated()).select(self._keys).row(0)
            raise BatchFunctionError(
                f"function returned two rows of state for key {_shown(twice)}, expected one"
            )
        if not self._weights:
            out = out.with_columns(pl.lit(1, dtype=pl.Int64).alias(WEIGHT))
        return out, kept

    def _numbered(self, frame: pl.DataFrame, keys: pl.DataFrame, what: str) -> pl.DataFrame:
        frame = frame.join(keys, on=self._keys, how="left", nulls_equal=True, maintain_order="left")
        foreign = frame.filter(pl.col(_NUMBER).is_null())
        if foreign.height:
            key = foreign.select(self._keys).row(0)
            raise BatchFunctionError(
                f"function returned {what} for key {_shown(key)}, which none of the rows it was given has"
            )
        return frame

    def _no_rows(self) -> pl.DataFrame:
        return pl.DataFrame(schema={**self.output_schema, WEIGHT: pl.Int64(), _NUMBER: pl.Int64()})


def _noted(keys: pl.DataFrame) -> str:
    """What errors and a guard know a batch by: its key, or the first, the last and how many."""
    first = repr(keys.row(0, named=True))
    return first if keys.height == 1 else f"{keys.height} keys from {first} to {keys.row(-1, named=True)}"


def _shown(key: tuple[object, ...]) -> str:
    return repr(key[0]) if len(key) == 1 else repr(key)
