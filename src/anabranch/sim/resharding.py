"""Shards that split or merge, as a model to explore: one leg of a rescaling, with the real machine and the real placements.

It differs from shards that move (`sim.migration`) in what the driver makes of the machine's orders.  There is a machine's
move for each *new* shard; all change over in one step, each on top of a background copy that was filled from all old shards
with which it shares hashes; there is nothing between, so it cannot turn back once that step is committed, and it cannot do
without the copies.  Where they fail, what there is of them is dropped and the leg begins anew.

All is on one host, as it is in a leg like this.  In every state the safety sentence is checked by counting; where the leg is
over, nothing is left but the shards of before or of after.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anabranch.model.ids import HostId, LayoutVersion, ShardId, Step, WorkerId
from anabranch.model.layout import Layout
from anabranch.model.placement import Copy, Placement, overlaps, resharded
from anabranch.model.ranges import hash_range
from anabranch.protocol import orders
from anabranch.protocol.migration import Migration
from anabranch.protocol.orders import Settings, Strategy
from anabranch.protocol.pieces import Move
from anabranch.sim.copies import Arrival, Cargo, Fence, FencedOff, Refused, Store, Tasks, touched, truth
from anabranch.sim.explore import Action
from anabranch.sim.machines import Machines
from anabranch.sim.scene import FIRST, Copying, Reading
from anabranch.sim.splitting import (
    Case,
    Job,
    Place,
    Run,
    State,
    leave_behind,
    place_of,
    spend,
    store_of,
    went_on,
)


class Resharding:
    """The `Model` of one `Case`; other machines and tasks may be put in, to see that broken ones are caught."""

    def __init__(self, case: Case, machine: type[Migration] = Migration, tasks: Tasks | None = None) -> None:
        self._case = case
        self._machine = machine
        self._tasks = tasks or Tasks()
        self._machines = Machines()
        owners = (WorkerId(0),) * case.before
        layout = Layout(LayoutVersion(0), owners, (HostId("h"),))
        self._before = Placement(layout, (1,) * case.before)
        self._after = resharded(self._before, case.after)
        self._overlaps = tuple(overlaps(self._before, self._after))

    def initial(self) -> State:
        fence = Fence(0, FIRST - 1, 0)
        stores, markers = [], []
        for one in self._before.copies():
            here = self._keys_in(one.low, one.end)
            values = tuple(truth(key, FIRST) if key in here else None for key in range(self._case.keys))
            stores.append((place_of(one), Store(one.incarnation, fence, ((FIRST - 1, values),))))
            markers.append((place_of(one), FIRST - 1))
        return self._begin(
            State(
                machine=0,
                prepared=False,
                epoch=1,
                attempt=0,
                committed=FIRST,
                switched=False,
                cancelled=False,
                markers=tuple(markers),
                stores=tuple(stores),
                run=None,
                straggler=None,
                drops=(),
                copying=None,
                late_copying=None,
                reading=None,
                left=self._case,
            )
        )

    def settled(self, state: State) -> bool:
        return state.over

    def violation(self, state: State) -> str | None:
        if state.wrong is not None:
            return state.wrong
        stores = dict(state.stores)
        known = [*self._placement(state).copies()]
        for one in known:
            store = stores.get(place_of(one))
            if store is None or store.incarnation != one.incarnation:
                return f"lost: {one} is not there, but {store}"
            try:
                held = store.as_of(state.committed)
            except Refused as refused:
                return f"lost: {one}: {refused}"
            for key in self._keys_in(one.low, one.end):
                if held[key] != (wanted := truth(key, state.committed)):
                    return f"key {key} is {held[key]} in {one}, not {wanted}"
        extra = [
            place for place, store in state.stores if place not in map(place_of, known) and not store.late
        ]
        return f"it is over, but there is still {extra}" if state.over and extra else None

    # --- what a driver owes the machine; a broken one does without

    def copies_failed(self, state: State) -> State:
        """What is there of the copies is dropped, and all begins anew."""
        return self._tell(state, orders.CancelAsked())

    def is_read(self, state: State, places: list[Place]) -> bool:
        return state.reading is not None and any(place_of(one) in places for one in state.reading.copies)

    def swept(self, state: State) -> tuple[tuple[Place, Store], ...]:
        """A recovery leaves on the hosts what the placement names."""
        known = {place_of(one): one.incarnation for one in self._placement(state).copies()}
        return tuple((place, store) for place, store in state.stores if known.get(place) == store.incarnation)

    def settings(self) -> Settings:
        return Settings(Strategy.HOT, at_once=True, switch_below=1, most_rounds=self._case.most_rounds)

    # --- what may happen

    def actions(self, state: State) -> Iterator[Action[State]]:
        if state.reading is not None and state.wrong is None:
            yield Action(("the checkpoint reads", state.reading.copies[0]), self._read(state, state.reading))
        if state.over or state.wrong is not None:
            return
        if not state.prepared:
            prepared = self._tell(state._replace(prepared=True), orders.Prepared({}))
            yield Action(("workers are ready",), prepared)
        yield from self._steps(state)
        yield from self._background(state)
        if state.straggler is not None:
            yield from self._work(state, state.straggler, late=True)
        if state.left.cancels and not state.switched and not state.cancelled and state.run is None:
            asked = spend(state._replace(cancelled=True), "cancels")
            yield Action(("somebody cancels",), self._tell(asked, orders.CancelAsked()), fault=True)
        if state.left.crashes:
            spent = spend(state, "crashes")
            yield Action(("the coordinator dies",), self._restart(spent), fault=True)
            if state.left.stragglers:
                late = self._restart(leave_behind(spent))
                yield Action(("the coordinator dies, its tasks do not",), late, fault=True)

    def _steps(self, state: State) -> Iterator[Action[State]]:
        run = state.run
        if run is None:
            if (begun := self._begin_step(state)) is not None:
                yield Action(("step", state.committed, "begins"), begun)
            return
        if run.refused:
            yield Action(("recovery under a new epoch",), self._restart(state))
            return
        yield from self._work(state, run, late=False)
        if {*run.ran} == {place_of(one) for one in self._to_run(run)}:
            yield Action(("step", run.fence.step, "is committed"), self._commit(state, run))
        if state.left.failures:
            again = Fence(state.epoch, run.fence.step, state.attempt + 1)
            failed = spend(state, "failures")
            anew = run._replace(fence=again, cargos=(), ran=())
            after = failed._replace(attempt=again.attempt, run=anew)
            yield Action(("step", run.fence.step, "fails and is tried again"), after, fault=True)
            if state.left.stragglers:
                late = leave_behind(failed)._replace(attempt=again.attempt, run=anew, late_copying=None)
                yield Action(("step", run.fence.step, "fails, a task of it goes on"), late, fault=True)

    def _background(self, state: State) -> Iterator[Action[State]]:
        copying = state.copying
        for job in state.drops:
            # A copy that is still being filled would come back to life.
            if copying is None and not self.is_read(state, self._dropped_places(job)):
                yield Action(("shards", job, "are dropped"), self._drop(state, job))
        if copying is not None:
            for shard in copying.shards:
                after = self._copy(state, copying, shard, late=False)
                yield Action(("shard", shard, "is copied, round since", copying.since), after)
            if state.left.copy_failures:
                failed = spend(state._replace(copying=None), "copy_failures")
                yield Action(("copying fails",), self._not_copied(failed), fault=True)
                if state.left.stragglers:
                    late = spend(failed._replace(late_copying=copying), "stragglers")
                    yield Action(("copying fails, a task goes on",), self._not_copied(late), fault=True)
        if state.late_copying is not None:
            for shard in state.late_copying.shards:
                after = self._copy(state, state.late_copying, shard, late=True)
                yield Action(("shard", shard, "is copied too late"), after)
        if state.reading is None and state.left.checkpoints:
            reading = Reading(state.committed, tuple(self._placement(state).copies()))
            begun = spend(state._replace(reading=reading), "checkpoints")
            yield Action(("a checkpoint as of", state.committed, "begins"), begun, fault=True)

    # --- steps

    def _begin_step(self, state: State) -> State | None:
        asked, commands = self._handle(state, orders.StepAsked(Step(state.committed)))
        if asked.wrong is not None:
            return asked
        pieces = commands[0].pieces
        if pieces and len(pieces) != self._case.after:
            return asked._replace(wrong=f"not all shards change over, but {pieces}")
        if not pieces:
            if not state.left.idle:
                return None
            asked = spend(asked, "idle")
        fence = Fence(state.epoch, state.committed, state.attempt)
        since = pieces[0].since if pieces else None
        return asked._replace(run=Run(fence, bool(pieces), since, state.markers))

    def _work(self, state: State, run: Run, late: bool) -> Iterator[Action[State]]:
        who = "a straggler" if late else "a task"
        if run.switches and len(run.cargos) < len(self._overlaps):
            source = self._overlaps[len(run.cargos)][0]
            yield Action((who, "collects from", source), self._collect(state, run, late))
            return
        todo = [one for one in self._to_run(run) if place_of(one) not in run.ran]
        for one in todo:
            yield Action((who, "runs step", run.fence.step, "in", one), self._run(state, run, one, late))
        if late and not todo:
            yield Action((who, "is done"), state._replace(straggler=None))

    def _collect(self, state: State, run: Run, late: bool) -> State:
        source, _, low, end = self._overlaps[len(run.cargos)]
        try:
            store, cargo = self._tasks.collect(
                store_of(state, source),
                run.fence,
                dict(run.markers)[place_of(source)],
                self._keys_in(low, end),
                run.since,
            )
        except Refused as refused:
            return self._refused(state, run, refused, late)
        return went_on(
            state.with_store(place_of(source), store), run._replace(cargos=(*run.cargos, cargo)), late
        )

    def _run(self, state: State, run: Run, one: Copy, late: bool) -> State:
        arrival = self._arrival(run, one) if run.switches else None
        expected = None if run.switches else dict(run.markers)[place_of(one)]
        known = dict(state.stores).get(place_of(one))
        try:
            if known is not None and known.incarnation != one.incarnation:
                raise Refused(f"{one} is to be written, and there is incarnation {known.incarnation}")
            store = self._tasks.run(
                known, one.incarnation, run.fence, expected, arrival, self._case.keys, self._rows(run, one)
            )
        except Refused as refused:
            return self._refused(state, run, refused, late)
        run = run._replace(ran=tuple(sorted({*run.ran, place_of(one)})))
        return went_on(state.with_store(place_of(one), store), run, late)

    def _arrival(self, run: Run, one: Copy) -> Arrival:
        """From all old shards that it shares hashes with, on top of the background copy."""
        mine = [
            cargo
            for cargo, pair in zip(run.cargos, self._overlaps, strict=True)
            if pair[1].shard == one.shard
        ]
        rows = tuple(row for cargo in mine for row in cargo.rows)
        return Arrival(Cargo(max(cargo.before for cargo in mine), rows), False, run.since)

    def _to_run(self, run: Run) -> list[Copy]:
        if run.switches:
            return [*self._after.copies()]
        there = dict(run.markers)
        placement = self._after if place_of(next(iter(self._after.copies()))) in there else self._before
        return [one for one in placement.copies() if self._rows(run, one)]

    def _rows(self, run: Run, one: Copy) -> list[int]:
        return [key for key in self._keys_in(one.low, one.end) if touched(key, run.fence.step)]

    def _refused(self, state: State, run: Run, refused: Refused, late: bool) -> State:
        if late:
            return state._replace(straggler=None)
        if isinstance(refused, FencedOff) or not self._case.stragglers:
            return state._replace(wrong=f"the only attempt that counts is refused: {refused}")
        # A straggler was there first; what it did is undone.
        return state._replace(run=run._replace(refused=True))

    def _commit(self, state: State, run: Run) -> State:
        switched = state.switched or run.switches
        markers = {} if run.switches else dict(run.markers)
        markers |= dict.fromkeys(map(place_of, self._to_run(run)), run.fence.step)
        state = state._replace(
            run=None,
            attempt=0,
            committed=run.fence.step + 1,
            switched=switched,
            markers=tuple(sorted(markers.items())),
        )
        return self._trim(self._tell(state, orders.StepCommitted(Step(run.fence.step), 0.1, 0)))

    # --- coordinators

    def _restart(self, state: State) -> State:
        """Another coordinator: all copies that count go back to what the last commit record says, others are swept."""
        epoch, expected = state.epoch + 1, dict(state.markers)
        for one in self._placement(state).copies():
            try:
                store = store_of(state, one).before(expected[place_of(one)] + 1)
            except Refused as refused:
                return state._replace(wrong=f"{one} cannot be recovered: {refused}")
            state = state.with_store(place_of(one), store._replace(fence=Fence(epoch, state.committed, -1)))
        idle = state.run is not None and not state.run.switches
        state = state._replace(
            epoch=epoch,
            attempt=0,
            cancelled=False,
            stores=self.swept(state),
            run=None,
            drops=(),
            copying=None,
            reading=None,
        )
        state = spend(state, "idle", -1) if idle else state
        return state._replace(over=True) if state.switched else self._begin(state)

    def _begin(self, state: State) -> State:
        moves = []
        for one in self._after.copies():
            low, end = hash_range(one.shard, one.of)
            moves.append(Move(one.shard, low, end, WorkerId(0), one.worker, self._case.keys))
        machine = self._machine(self.settings(), moves, None, Step(state.committed))
        return state._replace(machine=self._machines.number(machine), prepared=False)

    # --- beside the steps

    def _copy(self, state: State, copying: Copying, shard: int, late: bool) -> State:
        target = next(one for one in self._after.copies() if one.shard == shard)
        known = dict(state.stores).get(place_of(target))
        rows: list[tuple[int, int | None]] = []
        marker = 0
        try:
            for source, one, low, end in self._overlaps:
                if one.shard != shard:
                    continue
                store = store_of(state, source).before(copying.fence.step)
                now = store.history[-1][1]
                old = None if copying.since is None else store.as_of(copying.since)
                rows += [(k, now[k]) for k in self._keys_in(low, end) if old is None or old[k] != now[k]]
                marker = max(marker, store.marker)
            made = self._tasks.copy_in(
                known, target.incarnation, copying.fence, Cargo(marker, tuple(rows)), copying.since,
                self._case.keys,
            )  # fmt: skip
        except Refused as refused:
            if late:
                return state._replace(late_copying=None)
            if self._machines[state.machine].cancelled:
                # Nobody waits for it, or keeps undo for it.
                return state._replace(copying=None)
            return state._replace(wrong=f"a background copy is refused: {refused}")
        made = made._replace(late=late and (known is None or known.late))
        state = state.with_store(place_of(target), made)
        rest = copying._replace(shards=tuple(other for other in copying.shards if other != shard))
        if late:
            return state._replace(late_copying=rest if rest.shards else None)
        rest = rest._replace(size=rest.size + len(rows))
        if rest.shards:
            return state._replace(copying=rest)
        done = orders.CopyDone(Step(copying.fence.step), rest.size)
        return self._tell(state._replace(copying=None), done)

    def _not_copied(self, state: State) -> State:
        return state if state.cancelled else self.copies_failed(state)

    def _dropped_places(self, job: Job) -> list[Place]:
        after, shards = job
        if after:
            return [place_of(one) for one in self._after.copies() if one.shard in shards]
        return [place_of(source) for source, target, _, _ in self._overlaps if target.shard in shards]

    def _drop(self, state: State, job: Job) -> State:
        gone = self._dropped_places(job)
        state = state._replace(
            stores=tuple((place, store) for place, store in state.stores if place not in gone),
            drops=tuple(other for other in state.drops if other != job),
        )
        return self._tell(state, orders.Dropped(tuple(map(ShardId, job[1]))))

    def _read(self, state: State, reading: Reading) -> State:
        one, *rest = reading.copies
        try:
            held = store_of(state, one).as_of(reading.at)
        except Refused as refused:
            return state._replace(wrong=f"a checkpoint as of {reading.at} cannot read {one}: {refused}")
        for key in self._keys_in(one.low, one.end):
            if held[key] != truth(key, reading.at):
                return state._replace(wrong=f"a checkpoint as of {reading.at} reads {held[key]} in {one}")
        if rest:
            return state._replace(reading=reading._replace(copies=tuple(rest)))
        return self._trim(state._replace(reading=None))

    def _trim(self, state: State) -> State:
        """Undo that nobody needs any more is forgotten at once, which the real store may do."""
        copied = self._machines[state.machine].copied
        needed = [state.committed]
        needed += [] if copied is None else [copied]
        needed += [] if state.copying is None else [state.copying.fence.step]
        needed += [] if state.reading is None else [state.reading.at]
        stores = tuple((place, store.trimmed(min(needed))) for place, store in state.stores)
        return state._replace(stores=stores)

    # --- the machine

    def _tell(self, state: State, event: orders.Event) -> State:
        state, commands = self._handle(state, event)
        for command in commands:
            state = self._obey(state, command)
        return state

    def _obey(self, state: State, command: orders.Command) -> State:
        match command:
            case orders.StartCopy(shards, since):
                fence = Fence(state.epoch, state.committed, -1)
                return state._replace(copying=Copying(fence, since, shards))
            case orders.DropSources(shards):
                return state._replace(drops=(*state.drops, (False, shards)))
            case orders.DropCopies(shards):
                return state._replace(drops=(*state.drops, (True, shards)))
            case orders.Finish(cancelled):
                # Nobody wants to turn back where only the copies could not be made.
                if cancelled and not state.cancelled:
                    return self._begin(state)
                return state._replace(over=True)
        raise AssertionError(command)

    def _handle(self, state: State, event: orders.Event) -> tuple[State, list[Any]]:
        machine, commands, wrong = self._machines.told(state.machine, event)
        return state._replace(machine=machine, wrong=wrong or state.wrong), commands

    # --- small things

    def _placement(self, state: State) -> Placement:
        return self._after if state.switched else self._before

    def _keys_in(self, low: int, end: int) -> list[int]:
        keys = self._case.keys
        return [key for key in range(keys) if low <= (2 * key + 1 << 64) // (2 * keys) < end]
