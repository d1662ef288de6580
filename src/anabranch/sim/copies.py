"""Copies of shards as the simulator sees them: a few values with their undo, a fence, and what a task does to them.

A copy keeps what it held after each of its last steps, so that the newest can be taken back and earlier ones read.
What arrives is written without undo, as the real store does: it is put into all that is kept.  Whoever writes
shows a fence, and a copy that has seen a newer one refuses him; one that is not the expected copy, or is not at the expected
step, refuses too.  Each method of `Tasks` is one transaction.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

Values = tuple[int | None, ...]
"""Of each key of a shard; None: it is not there."""


class Fence(NamedTuple):
    epoch: int
    step: int
    attempt: int


class Cargo(NamedTuple):
    """Keys on their way, by their place in the shard.  None: it is to be deleted."""

    before: int
    """The step that wrote last to the copy they come from."""
    rows: tuple[tuple[int, int | None], ...]


class Store(NamedTuple):
    incarnation: int
    fence: Fence
    history: tuple[tuple[int, Values], ...]
    """Steps that wrote, ascending, and what was there after each."""
    copied: int | None = None
    """Filled in the background with all steps below this one."""
    late: bool = False
    """Made by a task whose attempt was over: nobody knows of it."""

    @property
    def marker(self) -> int:
        return self.history[-1][0]

    def as_of(self, step: int) -> Values:
        """What the steps below this one made."""
        return self.before(step).history[-1][1]

    def before(self, step: int) -> Store:
        """With this step and all after it taken back."""
        kept = tuple(entry for entry in self.history if entry[0] < step)
        if not kept:
            raise Refused(f"it cannot go back before step {step}: its undo begins at {self.history[0][0]}")
        return self._replace(history=kept)

    def trimmed(self, step: int) -> Store:
        """Without undo that nobody needs who reads as of this step or a later one."""
        old = [place for place, (marker, _) in enumerate(self.history) if marker < step]
        return self._replace(history=self.history[old[-1] :]) if old else self


class Refused(Exception):
    """A task finds something else than it was told: the step cannot go on as it is."""


class FencedOff(Refused):
    """A newer attempt has been here."""


def touch(value: int | None, step: int) -> int | None:
    """What a row of this step makes of a key: counted, and in one step of three deleted."""
    return None if step % 3 == 2 else (value or 0) + 1


def touched(key: int, step: int) -> bool:
    """Whether the step has a row for a key: in turns, so that a copy may have none in a step."""
    return (key + step) % 2 == 0


def truth(key: int, steps: int) -> int | None:
    """What all steps below this one make of a key, by nothing but counting."""
    value: int | None = None
    for step in range(steps):
        if touched(key, step):
            value = touch(value, step)
    return value


class Arrival(NamedTuple):
    cargo: Cargo
    fresh: bool
    """It is the first of this copy, which is made anew."""
    since: int | None
    """It comes on top of a background copy as of this step."""


class Tasks:
    """What tasks do to a copy; others may be put in, to see that broken ones are caught."""

    def collect(
        self, store: Store, fence: Fence, expected: int, wanted: Iterable[int], since: int | None
    ) -> tuple[Store, Cargo]:
        """Some keys as they are before the fence's step; with `since`, those that changed from that step on."""
        store = self.fence_source(store, fence)
        store = self.taken_back(store, fence.step, expected)
        now = store.history[-1][1]
        old = None if since is None else store.as_of(since)
        rows = tuple((key, now[key]) for key in wanted if old is None or old[key] != now[key])
        return store, Cargo(store.marker, rows)

    def run(
        self,
        store: Store | None,
        incarnation: int,
        fence: Fence,
        expected: int | None,
        arrival: Arrival | None,
        keys: int,
        rows: Iterable[int],
    ) -> Store:
        """One write transaction: what arrives, then what the step's rows make of their keys."""
        if store is not None:
            self.check_fence(store, fence)
        if arrival is not None and arrival.fresh:
            store = Store(incarnation, fence, ((arrival.cargo.before, (None,) * keys),))
        if store is None:
            raise Refused("the copy is not there")
        store = self.taken_back(store, fence.step, expected)
        if arrival is not None:
            if arrival.since is not None and store.copied != arrival.since:
                raise Refused(f"it was copied as of {store.copied}, what arrives is since {arrival.since}")
            store = self.put(store, arrival.cargo)
        values = list(store.history[-1][1])
        for key in rows:
            values[key] = touch(values[key], fence.step)
        return store._replace(fence=fence, history=(*store.history, (fence.step, tuple(values))))

    def copy_in(
        self, store: Store | None, incarnation: int, fence: Fence, cargo: Cargo, since: int | None, keys: int
    ) -> Store:
        """Make a copy as of the fence's step; with `since`, bring one as of that step up to it."""
        if store is not None:
            self.check_fence(store, fence)
        if since is None:
            store = Store(incarnation, fence, ((cargo.before, (None,) * keys),))
        if store is None or (since is not None and store.copied != since):
            raise Refused("the copy to be brought up to date is not there")
        store = self.put(store, cargo)
        return store._replace(fence=fence, copied=fence.step, history=((cargo.before, store.history[-1][1]),))

    # --- parts

    def check_fence(self, store: Store, fence: Fence) -> None:
        if store.fence > fence:
            raise FencedOff(f"{fence} is older than {store.fence}")

    def fence_source(self, store: Store, fence: Fence) -> Store:
        self.check_fence(store, fence)
        return store._replace(fence=fence)

    def taken_back(self, store: Store, step: int, expected: int | None) -> Store:
        """As it was before an earlier attempt at the step."""
        if store.marker == step:
            store = store.before(step)
        if expected is not None and store.marker != expected:
            raise Refused(f"it is at step {store.marker}, not at {expected}")
        return store

    def put(self, store: Store, cargo: Cargo) -> Store:
        rows = dict(cargo.rows)
        history = tuple(
            (marker, tuple(rows.get(key, value) for key, value in enumerate(values)))
            for marker, values in store.history
        )
        return store._replace(history=history)
