"""`reduce`: fold a column of each key with a Python function, in canonical order.

What is folded so far is of the column's type; None is the same as nothing: a key without rows begins with it,
and a function that returns it makes the key's row and state disappear.

Without weights the function is `fn(so_far, value)`; the first value is taken as it is, and a row of weight
*w* is folded *w* times.  With weights it is `fn(so_far, value, weight)` and is called for every row, also
for the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import polars as pl

from anabranch.model.batch import HASH, WEIGHT
from anabranch.model.rowcodec import RowCodec
from anabranch.operators.changes import changes, no_changes, write_changed
from anabranch.operators.grouping import Segments, segment
from anabranch.operators.kernel import Context, DeadLetter, KeyedState, Schema
from anabranch.operators.order import in_order
from anabranch.operators.userfn import Misfit, build_frame, check_in, check_out, misfits, reason_of, set_aside

_FOLDS = "folds"


class ReduceKernel:
    """Folds `column` into one output column called `name`.

    Costs a Python call for each row; a row on which the function fails leaves what was folded as it was.
    """

    ordered = True
    tables: tuple[str, ...] = (_FOLDS,)

    def __init__(
        self,
        keys: Sequence[str],
        schema: Schema,
        column: str,
        fn: Callable[..., Any],
        name: str,
        weights: bool,
    ) -> None:
        self._keys = list(keys)
        self._column = column
        self._fn = fn
        self._name = name
        self._weighted = weights
        self._codec = RowCodec({key: schema[key] for key in self._keys})
        self._result: dict[str, pl.DataType] = {name: schema[column]}
        self._folds = RowCodec(self._result)
        self.output_schema: dict[str, pl.DataType] = {**self._codec.schema, **self._result}

    def process(self, inputs: Sequence[pl.DataFrame], state: KeyedState, context: Context) -> pl.DataFrame:
        """Changes of the keys that the rows touch."""
        (frame,) = inputs
        if frame.is_empty():
            return no_changes(self.output_schema, context)
        segments = segment(in_order(frame).sort(HASH, maintain_order=True), self._keys)
        keys = self._codec.encode(segments.keys)
        olds = state.get(_FOLDS, segments.hashes, keys)
        before = self._decode(olds)
        after = self._fold(segments, before.to_list(), context)
        check_out(context)
        values = self._encode(after)
        write_changed(state, _FOLDS, segments, keys, values, olds)
        return changes(
            segments,
            {self._name: before},
            before.is_not_null().to_numpy(),
            {self._name: after},
            after.is_not_null().to_numpy(),
            context,
        )

    def _decode(self, records: Sequence[bytes | None]) -> pl.Series:
        present = np.fromiter((record is not None for record in records), np.bool_, len(records))
        values = self._folds.decode([record for record in records if record is not None]).get_column(
            self._name
        )
        places = pl.Series(np.where(present, np.cumsum(present) - 1, -1))
        return values.gather(places.replace(-1, None))

    def _encode(self, values: pl.Series) -> list[bytes | None]:
        encoded = iter(self._folds.encode(values.drop_nulls().to_frame(self._name)))
        return [next(encoded) if present else None for present in values.is_not_null().to_list()]

    def _fold(self, segments: Segments, folds: list[Any], context: Context) -> pl.Series:
        """What each group has folded after its rows."""
        values = segments.frame.get_column(self._column).to_list()
        weights = segments.frame.get_column(WEIGHT).to_list()
        bounds = [*segments.starts.tolist(), len(values)]
        letters: list[list[DeadLetter]] = []
        after: list[Any] = []
        for group, so_far in enumerate(folds):
            rows = range(bounds[group], bounds[group + 1])
            local = _local(context)
            after.append(self._fold_group(segments, values, weights, rows, so_far, local, strict=False))
            letters.append(local.dead_letters)
        try:
            column = build_frame(after, self._result)
        except Misfit:
            # Types are looked at for whole columns; only the groups at fault are folded again, row by row.
            for group, _ in misfits(after, self._result):
                rows = range(bounds[group], bounds[group + 1])
                local = _local(context)
                after[group] = self._fold_group(
                    segments, values, weights, rows, folds[group], local, strict=True
                )
                letters[group] = local.dead_letters
            column = build_frame(after, self._result)
        for own in letters:
            context.dead_letters.extend(own)
        return column.get_column(self._name)

    def _fold_group(
        self,
        segments: Segments,
        values: list[Any],
        weights: list[int],
        rows: range,
        so_far: Any,
        context: Context,
        strict: bool,
    ) -> Any:
        fold = self._fold_row if context.guard is None else self._guarded(segments, rows, context)
        for row in rows:
            value, weight = values[row], weights[row]
            try:
                new = fold(so_far, value, weight)
                if strict:
                    build_frame([new], self._result)
            except Exception as error:  # noqa: BLE001
                set_aside(context, reason_of(error), self._record(segments, row), weight, error)
            else:
                so_far = new
        return so_far

    def _guarded(self, segments: Segments, rows: range, context: Context) -> Callable[[Any, Any, int], Any]:
        places = iter(rows)

        def fold(so_far: Any, value: Any, weight: int) -> Any:
            check_in(context, self._record(segments, next(places)))
            return self._fold_row(so_far, value, weight)

        return fold

    def _fold_row(self, so_far: Any, value: Any, weight: int) -> Any:
        if self._weighted:
            return self._fn(so_far, value, weight)
        for _ in range(weight):
            so_far = value if so_far is None else self._fn(so_far, value)
        return so_far

    def _record(self, segments: Segments, row: int) -> dict[str, Any]:
        return segments.frame.select(*self._keys, self._column).row(row, named=True)


def _local(context: Context) -> Context:
    """The same context with dead letters of its own, so that a group can be folded twice."""
    return Context(context.operator, context.step, context.on_error, guard=context.guard)
