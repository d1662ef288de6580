"""What goes on beside the steps: copies are made in the background, dropped, and read by a checkpoint.

Must not know: the machine, or when.
"""

from __future__ import annotations

from anabranch.model.ids import ShardId
from anabranch.sim.copies import Cargo, Refused, Tasks, truth
from anabranch.sim.scene import Case, Copying, Garbage, Reading, Scene, State


class Beside:
    """Background work of one case.  Nothing is kept here: states go in and come out."""

    def __init__(self, case: Case, scene: Scene, tasks: Tasks) -> None:
        self._case = case
        self._scene = scene
        self._tasks = tasks

    def drop(self, state: State, garbage: Garbage) -> State:
        """A copy goes, if it is still the one that was meant."""
        place, incarnation = garbage
        stores = tuple(
            (where, store)
            for where, store in state.stores
            if where != place or store.incarnation != incarnation
        )
        drops = tuple(other for other in state.drops if other != garbage)
        return state._replace(stores=stores, drops=drops)

    def copy(self, state: State, copying: Copying, shard: int, late: bool) -> State:
        """One more shard of a round is copied; of a round that is complete none is left."""
        at = copying.fence.step
        placement = self._scene.placement(state.placement)
        source = placement.layout.host_of_shard(ShardId(shard))
        target = placement.layout.workers[self._case.goals[shard]]
        incarnation = placement.incarnations[shard] + 1
        stores = dict(state.stores)
        known = stores.get((target, shard))
        rest = copying._replace(shards=tuple(other for other in copying.shards if other != shard))
        try:
            store = stores[source, shard].before(at)
            now = store.history[-1][1]
            old = None if copying.since is None else store.as_of(copying.since)
            rows = tuple((key, now[key]) for key in range(len(now)) if old is None or old[key] != now[key])
            if known is not None and known.incarnation != incarnation:
                raise Refused(f"incarnation {known.incarnation} is in the way")
            made = self._tasks.copy_in(
                known, incarnation, copying.fence, Cargo(store.marker, rows), copying.since, len(now)
            )
        except Refused as refused:
            if late:
                return state._replace(late_copying=None)
            return state._replace(wrong=f"a background copy is refused: {refused}")
        made = made._replace(late=late and (known is None or known.late))
        state = state.with_store((target, shard), made)
        if late:
            return state._replace(late_copying=rest if rest.shards else None)
        return state._replace(copying=rest._replace(size=rest.size + len(rows)))

    def read(self, state: State, reading: Reading) -> State:
        """The checkpoint reads one more copy, and must find what the steps below its own make of the keys."""
        one, *rest = reading.copies
        try:
            held = self._scene.store_of(state, one).as_of(reading.at)
        except Refused as refused:
            return state._replace(wrong=f"a checkpoint as of {reading.at} cannot read {one}: {refused}")
        for key in self._scene.keys_in(one.shard, one.low, one.end):
            if held[key] != truth(self._scene.key(one.shard, key), reading.at):
                return state._replace(wrong=f"a checkpoint as of {reading.at} reads {held[key]} in {one}")
        return state._replace(reading=reading._replace(copies=tuple(rest)) if rest else None)
