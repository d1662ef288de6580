"""What the model of shards that split or merge is made of: its cases and its states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from anabranch.model.placement import Copy
from anabranch.sim.copies import Cargo, Fence, Refused, Store
from anabranch.sim.scene import Copying, Reading


@dataclass(frozen=True, slots=True)
class Case:
    """How many shards become how many, and what may happen how often."""

    before: int
    after: int
    keys: int = 4
    """Of all shards together, spread evenly."""
    idle: int = 1
    """Steps in which nothing changes over."""
    most_rounds: int = 2
    failures: int = 0
    crashes: int = 0
    stragglers: int = 0
    cancels: int = 0
    copy_failures: int = 0
    checkpoints: int = 0


Place = tuple[int, int]
"""Where a store is: the shard, and the generation."""


class Run(NamedTuple):
    """An attempt at a step."""

    fence: Fence
    switches: bool
    since: int | None
    markers: tuple[tuple[Place, int], ...]
    cargos: tuple[Cargo, ...] = ()
    """Of the first overlaps."""
    ran: tuple[Place, ...] = ()
    refused: bool = False


Job = tuple[bool, tuple[int, ...]]
"""Something to be dropped: whether it is copies of after, and for which shards the machine wants it."""


class State(NamedTuple):
    """A number stands for a machine that the model has interned."""

    machine: int
    prepared: bool
    epoch: int
    attempt: int
    committed: int
    """The next step."""
    switched: bool
    """Whether the placement is the one of after."""
    cancelled: bool
    markers: tuple[tuple[Place, int], ...]
    stores: tuple[tuple[Place, Store], ...]
    run: Run | None
    straggler: Run | None
    drops: tuple[Job, ...]
    copying: Copying | None
    late_copying: Copying | None
    reading: Reading | None
    left: Case
    """What may still happen."""
    over: bool = False
    wrong: str | None = None

    def with_store(self, place: Place, store: Store) -> State:
        return self._replace(stores=tuple(sorted({**dict(self.stores), place: store}.items())))


def place_of(one: Copy) -> Place:
    return int(one.shard), one.generation


def store_of(state: State, one: Copy) -> Store:
    store = dict(state.stores).get(place_of(one))
    if store is None or store.incarnation != one.incarnation:
        raise Refused(f"it is not there, but {store}")
    return store


def went_on(state: State, run: Run, late: bool) -> State:
    return state._replace(straggler=run) if late else state._replace(run=run)


def leave_behind(state: State) -> State:
    """The tasks that run now go on, whatever becomes of their attempt."""
    late = state._replace(straggler=state.run, late_copying=state.copying)
    return spend(late, "stragglers")


def spend(state: State, kind: str, count: int = 1) -> State:
    return state._replace(left=replace(state.left, **{kind: getattr(state.left, kind) - count}))
