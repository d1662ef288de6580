"""What the tasks of an attempt at a step do: collect pieces, run in copies, and in the end become durable together.

A task that comes late does the same, and what it meets then is the same too.  Must not know: the machine, or when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from anabranch.model.placement import Copy
from anabranch.protocol.pieces import Piece
from anabranch.sim.copies import Arrival, FencedOff, Refused, Tasks, touched
from anabranch.sim.explore import Action
from anabranch.sim.scene import Case, Plan, Run, Scene, State

Routed = Callable[[Plan, Copy], tuple[int, int]]
"""The hashes whose rows a step sends to a copy."""


class Attempts:
    """Attempts at the steps of one case.  Nothing is kept here: states go in and come out."""

    def __init__(self, case: Case, scene: Scene, tasks: Tasks, routed: Routed) -> None:
        self._case = case
        self._scene = scene
        self._tasks = tasks
        self._routed = routed

    def work(self, state: State, run: Run, late: bool) -> Iterator[Action[State]]:
        """What the tasks of an attempt may do next."""
        who = "a straggler" if late else "a task"
        plan = self._scene.plan(run.plan)
        if len(run.cargos) < len(plan.pieces):
            piece = plan.pieces[len(run.cargos)]
            yield Action((who, "collects", piece), self._collect(state, run, piece, late))
            return
        todo = [one for one in self._to_run(run) if one.slot not in run.ran]
        for one in todo:
            yield Action((who, "runs step", run.fence.step, "in", one), self._run(state, run, one, late))
        if late and not todo:
            yield Action((who, "is done"), state._replace(straggler=None))

    def complete(self, run: Run) -> bool:
        """Whether all that its record will speak of is done."""
        return len(run.ran) == len(self._to_run(run)) and len(run.cargos) == len(
            self._scene.plan(run.plan).pieces
        )

    def _collect(self, state: State, run: Run, piece: Piece, late: bool) -> State:
        plan = self._scene.plan(run.plan)
        source = self._scene.copy_with(plan.before, piece.shard, piece.source)
        place = (source.host, source.shard)
        wanted = self._scene.keys_in(piece.shard, piece.low, piece.end)
        try:
            store, cargo = self._tasks.collect(
                self._scene.store_of(state, source),
                run.fence,
                dict(plan.markers)[source.shard, source.incarnation],
                wanted,
                piece.since,
            )
        except Refused as refused:
            return self._refused(state, run, refused, late)
        run = run._replace(cargos=(*run.cargos, cargo))
        return self._went_on(state.with_store(place, store), run, late)

    def _run(self, state: State, run: Run, one: Copy, late: bool) -> State:
        plan = self._scene.plan(run.plan)
        place = (one.host, one.shard)
        arrival = self._arrival(run, one)
        known = dict(state.stores).get(place)
        # Of a copy that is being filled, only the copying itself knows which step it is at.
        unchecked = arrival is not None and (arrival.fresh or arrival.since is not None)
        expected = None if unchecked else dict(plan.markers)[one.shard, one.incarnation]
        try:
            if known is not None and known.incarnation != one.incarnation:
                raise Refused(f"{one} is to be written, and there is incarnation {known.incarnation}")
            store = self._tasks.run(
                known, one.incarnation, run.fence, expected, arrival, self._case.keys, self._rows(run, one)
            )
        except Refused as refused:
            return self._refused(state, run, refused, late)
        if late and (known is None or known.late):
            store = store._replace(late=True)
        run = run._replace(ran=tuple(sorted({*run.ran, one.slot})))
        return self._went_on(state.with_store(place, store), run, late)

    def _arrival(self, run: Run, one: Copy) -> Arrival | None:
        plan = self._scene.plan(run.plan)
        for piece, cargo in zip(plan.pieces, run.cargos, strict=True):
            if (piece.shard, plan.after.layout.workers[piece.target]) == (one.shard, one.host):
                fresh = not piece.back and piece.since is None and piece.shard not in plan.before.cuts
                return Arrival(cargo, fresh, piece.since)
        return None

    def _to_run(self, run: Run) -> list[Copy]:
        """Copies that the step writes: where something arrives, and where rows are routed to."""
        plan = self._scene.plan(run.plan)
        arriving = {(piece.shard, piece.target) for piece in plan.pieces}
        return [
            one for one in plan.after.copies() if (one.shard, one.worker) in arriving or self._rows(run, one)
        ]

    def _rows(self, run: Run, one: Copy) -> list[int]:
        keys = self._scene.keys_in(one.shard, *self._routed(self._scene.plan(run.plan), one))
        return [key for key in keys if touched(self._scene.key(one.shard, key), run.fence.step)]

    def _refused(self, state: State, run: Run, refused: Refused, late: bool) -> State:
        if late:
            return state._replace(straggler=None)
        if isinstance(refused, FencedOff) or not self._case.stragglers:
            return state._replace(wrong=f"the only attempt that counts is refused: {refused}")
        # A straggler was there first; what it did is undone.
        return state._replace(run=run._replace(refused=True))

    def _went_on(self, state: State, run: Run, late: bool) -> State:
        return state._replace(straggler=run) if late else state._replace(run=run)

    def commit(self, state: State, run: Run) -> State:
        """The record is durable: what it says is so from now on."""
        plan = self._scene.plan(run.plan)
        wrote = {one.slot for one in self._to_run(run)}
        old = dict(plan.markers)
        markers = {}
        for one in plan.after.copies():
            name = (int(one.shard), int(one.incarnation))
            markers[name] = run.fence.step if one.slot in wrote else old[name]
        return state._replace(
            run=run._replace(durable=True),
            committed=run.fence.step + 1,
            attempt=0,
            failed=None,
            placement=self._scene.number_placement(plan.after),
            cancelled=plan.cancelled,
            forward=state.forward if all(piece.back for piece in plan.pieces) else run.fence.step,
            markers=tuple(sorted(markers.items())),
        )
