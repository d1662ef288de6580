"""A user's Python function from state and row to state and rows.

The one place where Python runs for every row, so the loop is all that counts.  Measured on one core, a
million rows of three columns, 100,000 keys, an integer as state, one output row for every row:
1.2 M rows/s, without the store; 2.0 M when rows give no output.

Rows made one at a time by `tuple.__new__` cost 130 ns each; by `Row._make`, 300 ns.  A list of all rows, cut
by slices, makes the loop take 1.25 s instead of 0.45: a million live tuples keep the garbage collector busy.
Turning the collector off gains nothing once rows are made one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import polars as pl

from anabranch.model.batch import HASH, WEIGHT
from anabranch.model.rowcodec import RowCodec
from anabranch.operators.kernel import Context, KeyedState, Schema
from anabranch.operators.keyrows import Grouped, group, repeated
from anabranch.operators.order import I64, place_rows
from anabranch.operators.statecodec import NotStorable, decode, encoder
from anabranch.operators.userfn import (
    Misfit,
    Rows,
    as_rows,
    build_frame,
    check_out,
    guarded,
    misfits,
    reason_of,
    set_aside,
    stop,
)

Function = Callable[..., Any]


class StatefulMapKernel:
    """`fn(state, row) -> (state, rows)` for each row of a key, in canonical order.

    `state` is `initial` for a key without state; None forgets the key.  `rows` is None or an iterable of
    rows, bare values where there is one column.  With `weights`, `fn(state, row, weight)` gives
    (row, weight) pairs; without, a row of weight *w* comes *w* times.

    A row on which the function fails, or for which it gives rows that do not fit, leaves the state as it
    was before.  To know that state, a key that had such a row is run once more from what was stored, with
    care; so the function must not keep anything but in its state.
    """

    ordered = True
    tables: tuple[str, ...] = ("state",)

    def __init__(
        self,
        keys: Sequence[str],
        in_schema: Schema,
        out_schema: Schema,
        fn: Function,
        weights: bool,
        initial: Any = None,
    ) -> None:
        self._keys = list(keys)
        self._in = dict(in_schema)
        self._out = dict(out_schema)
        self._fn = fn
        self._weights = weights
        self._codec = RowCodec({key: in_schema[key] for key in keys})
        # Encoded, so that every key gets its own: a shared list or dict would leak from key to key.
        self._initial = None if initial is None else encoder()(initial)
        self.output_schema = {**self._codec.schema, **self._out}

    def process(self, inputs: Sequence[pl.DataFrame], state: KeyedState, context: Context) -> pl.DataFrame:
        frame = inputs[0]
        if not self._weights:
            frame = repeated(frame, context)
        grouped = group(frame, self._codec)
        olds = state.get("state", grouped.hashes, grouped.keys)
        batch = _Batch(self._fn, self._weights, self._in, self._out, grouped, self._starting(olds), context)
        states, columns, counts = batch.run()
        check_out(context)
        self._store(states, olds, grouped, state, context)
        firsts = grouped.starts[np.repeat(np.arange(len(counts)), counts)]
        out = grouped.frame.select(*self._keys, HASH)[firsts].hstack(columns)
        return place_rows(out.select(*self.output_schema, WEIGHT, HASH), context)

    def _starting(self, olds: list[bytes | None]) -> list[bytes | None]:
        initial = self._initial
        return olds if initial is None else [initial if old is None else old for old in olds]

    def _store(
        self,
        states: list[Any],
        olds: list[bytes | None],
        grouped: Grouped,
        state: KeyedState,
        context: Context,
    ) -> None:
        encode = encoder()
        news: list[bytes | None] = []
        try:
            news.extend(None if new is None else encode(new) for new in states)
        except NotStorable as error:
            at = int(grouped.starts[len(news)])
            key = grouped.frame.select(self._keys).row(at)
            stop(context, f"key {key[0] if len(key) == 1 else key!r}: {error}", cause=error)
        if news == olds:
            return
        changed = [i for i, new in enumerate(news) if new != olds[i]]
        state.put(
            "state",
            grouped.hashes[changed],
            [grouped.keys[i] for i in changed],
            [news[i] for i in changed],
            [olds[i] for i in changed],
        )


class _Batch:
    """One call of `process`: every key once, at full speed; then, with care, the keys that failed."""

    def __init__(
        self,
        fn: Function,
        weights: bool,
        in_schema: Schema,
        out_schema: Schema,
        grouped: Grouped,
        starting: list[bytes | None],
        context: Context,
    ) -> None:
        self._fn = guarded(fn, context, place=1)
        self._schema = out_schema
        self._rows = Rows(grouped.frame, in_schema)
        self._given = grouped.frame.get_column(WEIGHT).to_list() if weights else None
        self._all_weights = grouped.frame.get_column(WEIGHT)
        self._starts = grouped.starts
        self._sizes = grouped.sizes
        self._starting = starting
        self._context = context

    def run(self) -> tuple[list[Any], pl.DataFrame, I64]:
        """The new state of each key, the columns and weight of all results, and how many each key has."""
        states = [None if old is None else decode(old) for old in self._starting]
        results: list[Any] = []
        ends: list[int] = []
        loop = self._plain if self._given is None else self._weighted
        failed = loop(states, results, ends)
        counts: I64 = np.array(ends, dtype=np.int64)
        counts[1:] -= counts[:-1].copy()
        columns = self._try_columns(results)
        if columns is None:
            failed = sorted({*failed, *self._keys_of_misfits(results, ends)})
        elif not failed:
            return states, columns, counts
        per_key = [results[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]
        for key in failed:
            states[key], per_key[key] = self._careful(key)
        try:
            columns = self._columns(list(chain.from_iterable(per_key)))
        except Misfit as misfit:
            stop(self._context, str(misfit), cause=misfit)
        return states, columns, np.array([len(made) for made in per_key], dtype=np.int64)

    def _try_columns(self, results: list[Any]) -> pl.DataFrame | None:
        try:
            return self._columns(results)
        except Misfit:
            return None

    def _plain(self, states: list[Any], results: list[Any], ends: list[int]) -> list[int]:
        function = self._fn
        rows = iter(self._rows)
        extend, done = results.extend, ends.append
        failed: list[int] = []
        for key, (state, size) in enumerate(zip(states, self._sizes.tolist(), strict=True)):
            group = islice(rows, size)
            try:
                for row in group:
                    state, out = function(state, row)
                    if out is not None:
                        extend(out if type(out) is list else as_rows(out))
                states[key] = state
            except Exception:  # noqa: BLE001
                self._give_up(key, group, results, ends, failed)
            done(len(results))
        return failed

    def _weighted(self, states: list[Any], results: list[Any], ends: list[int]) -> list[int]:
        function = self._fn
        rows: Iterator[tuple[Any, int]] = zip(self._rows, self._given or (), strict=True)
        extend, done = results.extend, ends.append
        failed: list[int] = []
        for key, (state, size) in enumerate(zip(states, self._sizes.tolist(), strict=True)):
            group = islice(rows, size)
            try:
                for row, weight in group:
                    state, out = function(state, row, weight)
                    if out is not None:
                        extend(out if type(out) is list else as_rows(out))
                states[key] = state
            except Exception:  # noqa: BLE001
                self._give_up(key, group, results, ends, failed)
            done(len(results))
        return failed

    def _give_up(
        self, key: int, group: Iterable[Any], results: list[Any], ends: list[int], failed: list[int]
    ) -> None:
        failed.append(key)
        for _ in group:
            pass
        del results[ends[-1] if ends else 0 :]

    def _careful(self, key: int) -> tuple[Any, list[Any]]:
        """Run one key again from its stored state, setting aside the rows that fail."""
        start = int(self._starts[key])
        old = self._starting[key]
        state = None if old is None else decode(old)
        encode = encoder()
        results: list[Any] = []
        for place in range(start, start + int(self._sizes[key])):
            row = self._rows[place]
            arguments = (row,) if self._given is None else (row, self._given[place])
            # Lists and dicts may be changed in place before the function fails.
            try:
                saved = encode(state) if isinstance(state, list | dict | tuple) else None
            except NotStorable as error:
                stop(self._context, str(error), row, error)
            try:
                new, out = self._fn(state, *arguments)
                made = list(as_rows(out))
                self._columns(made)
            except Exception as error:  # noqa: BLE001
                set_aside(self._context, reason_of(error), row, int(self._all_weights[place]), error)
                state = state if saved is None else decode(saved)
            else:
                state = new
                results += made
        return state, results

    def _columns(self, results: list[Any]) -> pl.DataFrame:
        if self._given is None:
            return build_frame(results, self._schema).with_columns(pl.lit(1, dtype=pl.Int64).alias(WEIGHT))
        if not all(type(pair) is tuple and len(pair) == 2 for pair in results):
            raise Misfit("function returned rows without weights, expected (row, weight) pairs")
        columns = build_frame([row for row, _ in results], self._schema)
        return columns.hstack(build_frame([weight for _, weight in results], {WEIGHT: pl.Int64()}))

    def _keys_of_misfits(self, results: list[Any], ends: list[int]) -> list[int]:
        if self._given is None:
            places = [place for place, _ in misfits(results, self._schema)]
        else:
            places = [place for place, pair in enumerate(results) if not self._fits(pair)]
        found: list[int] = np.unique(np.searchsorted(ends, places, side="right")).tolist()
        return found

    def _fits(self, pair: Any) -> bool:
        try:
            self._columns([pair])
        except Misfit:
            return False
        return True
