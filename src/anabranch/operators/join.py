"""Joins that are incremental on both sides and right for any weights.

Both sides are kept as Z-sets, row by row under their key.  With L and R what was there before the step,
and ΔL and ΔR its changes, the inner join changes by

    ΔL ⋈ R  +  (L + ΔL) ⋈ ΔR

with the product of the weights.  The other kinds hang on whether a key has a match: whether the
other side has a row of weight other than zero under it.  With m(R) = 1 for a key that has one and 0
otherwise, the rows of L that count are L·m(R) for `semi` and L·(1 − m(R)) for `anti` and the null-extended
part of `left` and `full`.  For f either of them, that changes by

    ΔL · f(R + ΔR)  +  L · (f(R + ΔR) − f(R))

so rows of L are read only under keys where f flipped.

Null keys are as in SQL: null equals nothing, so a row with a null in its key matches nothing.  It is never
stored; `left`, `full` and `anti` pass it on with its weight.

The cost of a step follows the changed rows, and the rows stored under their keys that they can meet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import polars as pl

from anabranch.errors import FlowError
from anabranch.model.batch import HASH, U64, WEIGHT
from anabranch.model.rowcodec import RowCodec
from anabranch.operators.kernel import Context, KeyedState, Schema
from anabranch.operators.order import I64, place_rows, runs
from anabranch.operators.zset import canonical, fold, pack_weights, unpack_weights

How = Literal["inner", "left", "full", "semi", "anti"]
Mask = npt.NDArray[np.bool_]

_LENGTH = 4


@dataclass(frozen=True)
class _Rows:
    """Rows of one side without their key; `key[i]` numbers the key of row *i*, ascending."""

    key: I64
    columns: pl.DataFrame
    weights: I64


@dataclass(frozen=True)
class _Keys:
    """The keys that a step touches, in the order of their hashes."""

    hashes: U64
    prefixes: list[bytes]
    columns: pl.DataFrame


class _Side:
    """One input: its key under the result's names, its other columns under theirs."""

    def __init__(self, table: str, keys: Sequence[str], names: Mapping[str, str], schema: Schema) -> None:
        self.table = table
        self.rename = dict(names)
        self.keys = [names[key] for key in keys]
        self.schema = {names[name]: dtype for name, dtype in schema.items()}
        rest = {name: dtype for name, dtype in self.schema.items() if name not in self.keys}
        self.rest = list(rest)
        self.key_codec = RowCodec({key: self.schema[key] for key in self.keys})
        self.codec = RowCodec(rest)

    def split(self, frame: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
        """The rows that can match, and those with a null in their key."""
        frame = canonical(frame.select(*self.rename, WEIGHT, HASH).rename(self.rename))
        null = frame.select(pl.any_horizontal(pl.col(self.keys).is_null())).to_series()
        if not null.any():
            return frame, frame.clear()
        return frame.filter(~null), frame.filter(null)

    def fold(self, frame: pl.DataFrame) -> _Delta:
        sizes_and_keys = [len(key).to_bytes(_LENGTH, "big") + key for key in self.key_codec.encode(frame)]
        rows = [key + row for key, row in zip(sizes_and_keys, self.codec.encode(frame), strict=True)]
        folded = fold(frame, rows)
        chosen = frame[folded.at]
        prefixes = [sizes_and_keys[i] for i in folded.at.tolist()]
        return _Delta(folded.hashes, folded.rows, prefixes, folded.weights, chosen)


@dataclass(frozen=True)
class _Delta:
    """One side's changes, in the order of (hash, key, row)."""

    hashes: U64
    rows: list[bytes]
    prefixes: list[bytes]
    weights: I64
    columns: pl.DataFrame


class JoinKernel:
    """Joins two inputs on their keys.

    The result has the key (under the left names), the left's other columns and the right's other
    columns, with `suffix` where the left has the name too; `semi` and `anti` have the left's columns.
    """

    ordered = False
    tables: tuple[str, ...] = ("left", "right")

    def __init__(
        self,
        keys_left: Sequence[str],
        keys_right: Sequence[str],
        left_schema: Schema,
        right_schema: Schema,
        how: How,
        suffix: str = "_right",
    ) -> None:
        self._how = how
        self._keys = list(keys_left)
        self._left = _Side("left", keys_left, {name: name for name in left_schema}, left_schema)
        names = dict(zip(keys_right, keys_left, strict=True))
        for name in right_schema:
            if name not in names:
                names[name] = name + suffix if name in left_schema else name
        if how not in ("semi", "anti") and len({*left_schema, *names.values()}) < len(left_schema) + len(
            right_schema
        ) - len(keys_left):
            raise FlowError(f"join: suffix {suffix!r} leaves two columns of one name; choose another suffix")
        self._right = _Side("right", keys_right, names, right_schema)
        if how in ("semi", "anti"):
            self.output_schema = dict(left_schema)
        else:
            self.output_schema = {
                **{key: left_schema[key] for key in keys_left},
                **{name: self._left.schema[name] for name in self._left.rest},
                **{name: self._right.schema[name] for name in self._right.rest},
            }
        self._codec = RowCodec(self.output_schema)
        self._nothing = pl.DataFrame(schema={**self.output_schema, WEIGHT: pl.Int64(), HASH: pl.UInt64()})

    def process(self, inputs: Sequence[pl.DataFrame], state: KeyedState, context: Context) -> pl.DataFrame:
        left_frame, left_null = self._left.split(inputs[0])
        right_frame, right_null = self._right.split(inputs[1])
        left, right = self._left.fold(left_frame), self._right.fold(right_frame)
        keys, left_key, right_key = _number(left, right, self._left.key_codec)
        step = _Step(self, state, keys)
        left_rows = _Rows(left_key, left.columns.select(self._left.rest), left.weights)
        right_rows = _Rows(right_key, right.columns.select(self._right.rest), right.weights)
        parts = step.run(left, right, left_rows, right_rows)
        if self._how in ("left", "full", "anti"):
            parts.append(self._shaped(left_null))
        if self._how == "full":
            parts.append(self._shaped(right_null))
        out = pl.concat([self._nothing, *(part for part in parts if part.height)])
        # Without these, no two parts can hold the same row, and none holds it twice.
        if (left.rows and right.rows) or self._how != "inner" or context.emit_order:
            folded = fold(out, self._codec.encode(out))
            out = out[folded.at].with_columns(pl.Series(WEIGHT, folded.weights))
        return place_rows(out, context)

    @property
    def how(self) -> How:
        """The kind of join."""
        return self._how

    def sides(self) -> tuple[_Side, _Side]:
        """Left and right."""
        return self._left, self._right

    def emit(self, keys: _Keys, key: I64, others: Sequence[pl.DataFrame], weights: I64) -> pl.DataFrame:
        """Rows of the result; columns that nobody gives are null."""
        if not len(key):
            return self._nothing
        out = keys.columns[key]
        for other in others:
            out = out.hstack(other.get_columns())
        return self._shaped(
            out.with_columns(pl.Series(WEIGHT, weights, dtype=pl.Int64), pl.Series(HASH, keys.hashes[key]))
        )

    def _shaped(self, frame: pl.DataFrame) -> pl.DataFrame:
        return frame.select(
            *(
                pl.col(name) if name in frame.columns else pl.lit(None, dtype=dtype).alias(name)
                for name, dtype in self.output_schema.items()
            ),
            WEIGHT,
            HASH,
        )


class _Step:
    """One step of one join: reads all it needs, writes both sides, and says what changed."""

    def __init__(self, kernel: JoinKernel, state: KeyedState, keys: _Keys) -> None:
        self._kernel = kernel
        self._state = state
        self._keys = keys

    def run(self, left: _Delta, right: _Delta, left_rows: _Rows, right_rows: _Rows) -> list[pl.DataFrame]:
        how = self._kernel.how
        left_side, right_side = self._kernel.sides()
        touched_left, touched_right = np.unique(left_rows.key), np.unique(right_rows.key)
        everything = np.arange(len(self._keys.hashes))
        joins = how in ("inner", "left", "full")
        parts: list[pl.DataFrame] = []

        old_right = self._scan(right_side, touched_left if joins else touched_left[:0])
        right_before = right_after = np.zeros(len(everything), dtype=np.bool_)
        if how != "inner":
            right_before = self._matched(right_side, everything)
        self._write(right_side, right)
        if how != "inner":
            right_after = self._after(right_side, right_before, touched_right)

        flipped = np.flatnonzero(right_before != right_after)
        old_left = self._scan(left_side, touched_right if joins else flipped)
        left_before = self._matched(left_side, everything) if how == "full" else None
        self._write(left_side, left)

        if joins:
            parts += [
                self._product(left_rows, old_right),
                self._product(old_left, right_rows),
                self._product(left_rows, right_rows),
            ]
        if how == "semi":
            parts += self._counted(left_rows, old_left, right_before, right_after)
        elif how != "inner":
            parts += self._counted(left_rows, old_left, ~right_before, ~right_after)
        if left_before is not None:
            left_after = self._after(left_side, left_before, touched_left)
            parts += self._counted(right_rows, old_right, ~left_before, ~left_after)
        return parts

    def _scan(self, side: _Side, chosen: I64) -> _Rows:
        found = self._state.scan(
            side.table, self._keys.hashes[chosen], [self._keys.prefixes[i] for i in chosen.tolist()]
        )
        return _Rows(chosen[found.index], side.codec.decode(found.suffixes), unpack_weights(found.values))

    def _matched(self, side: _Side, chosen: I64) -> Mask:
        edges = self._state.edge(
            side.table, self._keys.hashes[chosen], [self._keys.prefixes[i] for i in chosen.tolist()], False
        )
        return np.fromiter((edge is not None for edge in edges), dtype=np.bool_, count=len(edges))

    def _after(self, side: _Side, before: Mask, touched: I64) -> Mask:
        after = before.copy()
        after[touched] = self._matched(side, touched)
        return after

    def _write(self, side: _Side, delta: _Delta) -> None:
        olds = self._state.get(side.table, delta.hashes, delta.rows)
        values = pack_weights(unpack_weights(olds) + delta.weights)
        self._state.put(side.table, delta.hashes, delta.rows, values, olds)

    def _product(self, left: _Rows, right: _Rows) -> pl.DataFrame:
        first = np.searchsorted(right.key, left.key, side="left")
        counts = np.searchsorted(right.key, left.key, side="right") - first
        of_left = np.repeat(np.arange(len(left.key)), counts)
        starts = np.cumsum(counts) - counts
        of_right = np.repeat(first - starts, counts) + np.arange(len(of_left))
        return self._kernel.emit(
            self._keys,
            left.key[of_left],
            [_take(left.columns, of_left), _take(right.columns, of_right)],
            left.weights[of_left] * right.weights[of_right],
        )

    def _counted(self, delta: _Rows, old: _Rows, before: Mask, after: Mask) -> list[pl.DataFrame]:
        """What changes in rows that count while a condition on their key holds."""
        new = np.flatnonzero(after[delta.key])
        flips = after.astype(np.int64) - before.astype(np.int64)
        moved = np.flatnonzero(flips[old.key])
        return [
            self._kernel.emit(self._keys, rows.key[at], [_take(rows.columns, at)], weights)
            for rows, at, weights in (
                (delta, new, delta.weights[new]),
                (old, moved, (old.weights * flips[old.key])[moved]),
            )
        ]


def _take(frame: pl.DataFrame, at: I64) -> pl.DataFrame:
    return frame[at] if frame.width else frame


def _number(left: _Delta, right: _Delta, codec: RowCodec) -> tuple[_Keys, I64, I64]:
    """The touched keys of both sides, and the number of each change's key."""
    both = pl.DataFrame(
        {
            "hash": np.concatenate([left.hashes, right.hashes]),
            "prefix": pl.Series([*left.prefixes, *right.prefixes], dtype=pl.Binary),
            "at": np.arange(len(left.hashes) + len(right.hashes)),
        }
    ).sort("hash", "prefix")
    hashes = both.get_column("hash").to_numpy()
    prefix = both.get_column("prefix")
    new = (prefix != prefix.shift(1)).fill_null(value=True).to_numpy().copy()
    new[runs(hashes)] = True
    firsts = np.flatnonzero(new)
    numbers = np.empty(both.height, dtype=np.int64)
    numbers[both.get_column("at").to_numpy()] = np.cumsum(new) - 1
    prefixes = prefix[firsts].to_list()
    keys = _Keys(hashes[firsts], prefixes, codec.decode([key[_LENGTH:] for key in prefixes]))
    return keys, numbers[: len(left.hashes)], numbers[len(left.hashes) :]
