"""The contracts between kernels, the state below them and the stage that runs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import polars as pl

from anabranch.model.batch import U64
from anabranch.model.ids import OperatorId, Step
from anabranch.model.scan import Scan as Scan
from anabranch.operators.known import Known

OnError = Literal["stop", "dead_letter"]


class KeyedState(Protocol):
    """One worker's shards, seen as keyed tables, for one stage of one attempt of one step.

    `hashes` is sorted ascending and `keys[i]` belongs to `hashes[i]`; equal (hash, key) pairs
    appear once.  `olds` must be what `get`, `scan` or `edge` returned in this step for that key (None: absent).
    """

    def get(self, table: str, hashes: U64, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value of each key, or None."""
        ...

    def put(
        self,
        table: str,
        hashes: U64,
        keys: Sequence[bytes],
        values: Sequence[bytes | None],
        olds: Sequence[bytes | None],
    ) -> None:
        """Write each key; a value of None deletes it."""
        ...

    def scan(self, table: str, hashes: U64, prefixes: Sequence[bytes]) -> Scan:
        """All entries whose key begins with `prefixes[i]` under `hashes[i]`, in key order per prefix."""
        ...

    def edge(
        self, table: str, hashes: U64, prefixes: Sequence[bytes], last: bool
    ) -> list[tuple[bytes, bytes] | None]:
        """The first (or last) entry of each prefix as (suffix, value), or None."""
        ...


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that was set aside, and why."""

    operator: str
    where: str
    record: str
    reason: str
    weight: int = 1


class Guard(Protocol):
    """Watches the calls of users' functions in a step in which processes died; see `spark/crumbs.py`."""

    def died(self, operator: OperatorId, record: str) -> int:
        """How many processes have died on this record."""
        ...

    def admit(self, operator: OperatorId, record: str) -> str | None:
        """Note that a function is about to get the record, or say why it must not."""
        ...

    def leave(self) -> None:
        """The function has returned."""
        ...


@dataclass(slots=True)
class Context:
    """What a kernel may know about the run it is part of."""

    operator: OperatorId
    step: Step
    on_error: OnError = "stop"
    emit_order: bool = False
    """Whether the result must carry the order columns."""
    origin: int = 0
    """The `__origin` of rows that this operator makes, when it emits order."""
    dead_letters: list[DeadLetter] = field(default_factory=list)
    guard: Guard | None = None
    """Where set, it is asked before each call of a user's function."""


class StatelessKernel(Protocol):
    """Rows in, rows out; hidden columns are carried along."""

    def apply(self, frame: pl.DataFrame, context: Context) -> pl.DataFrame: ...


class StatefulKernel(Protocol):
    """Keyed rows and state in, changes out.

    Every input is sorted by `__hash`.  The result carries the output columns, `__weight`
    and `__hash`, in any row order, and the order columns if `context.emit_order`.
    """

    ordered: bool
    """Whether the inputs must carry the order columns."""
    tables: tuple[str, ...]
    """Suffixes of the tables it keeps; the stage prefixes the operator's id."""

    def process(
        self, inputs: Sequence[pl.DataFrame], state: KeyedState, context: Context
    ) -> pl.DataFrame: ...


@runtime_checkable
class Combining(Protocol):
    """A stateful kernel that can shrink its input before the exchange.

    Both may be given the keys that are `known` from earlier batches of the same flow and channel, and may add to
    them.  `process` gives the same bits with and without.
    """

    def partial(self, frame: pl.DataFrame, known: Known | None = None) -> pl.DataFrame:
        """Rows (with the key's columns and `__weight`, without `__hash`) to partials.

        Partials carry the key's columns and whatever `process` needs; not more rows
        than came in, but for a few of keys that were known.
        """
        ...

    def combine(self, partials: Sequence[pl.DataFrame], known: Known | None = None) -> pl.DataFrame:
        """The partials of each of several batches to partials of all their rows.

        `process` gives the same bits for either, however rows were cut into batches.
        """
        ...


Schema = Mapping[str, pl.DataType]
"""Names and Polars types of a stream's columns, in order."""
