"""A migration at work, as a model to explore: the machine, its driver, steps, copies, a checkpoint and who comes late.

The machine is the real one, and so is the placement that a commit record holds.  The driver is what is left of the
runtime when Spark, files and clocks are taken away.  It runs a step in the parts between which something can go
wrong: pieces are collected, one after the other; copies acquire and run, in any order; the record becomes
durable; the machine is told.  Between them

- the attempt fails, and the step is asked for again; a message that is lost is one way to fail;
- the coordinator dies, and another begins with what is durable: the placement, and the wish to cancel if a record had it;
- what is left of an attempt that is over goes on, and comes late (a *straggler*);
- background copies of `hot` are made, drops are done, a checkpoint reads copies as of its step, somebody cancels.

The driver does what the machine's documentation asks of it: it removes what no placement names before `Prepared`, and it
leaves a copy in place as long as a checkpoint reads it.

In every state the safety sentence is checked against nothing but counting: of each key the one copy that the placement names
has what the committed steps make of it.  Where the migration is over, nothing else is left on any host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anabranch.errors import EngineError
from anabranch.model.ids import ShardId, Step, WorkerId
from anabranch.model.placement import Copy, moved
from anabranch.protocol import orders
from anabranch.protocol.migration import Migration
from anabranch.protocol.pieces import Move
from anabranch.sim.attempts import Attempts
from anabranch.sim.beside import Beside
from anabranch.sim.copies import Fence, Refused, Store, Tasks
from anabranch.sim.explore import Action
from anabranch.sim.machines import Machines
from anabranch.sim.scene import Case, Copying, Garbage, Place, Plan, Reading, Run, Scene, State


class Rescaling:
    """The `Model` of one `Case`; other machines and tasks may be put in, to see that broken ones are caught."""

    def __init__(self, case: Case, machine: type[Migration] = Migration, tasks: Tasks | None = None) -> None:
        self._case = case
        self._machine = machine
        self._scene = Scene(case)
        self._machines = Machines()
        self._attempts = Attempts(case, self._scene, tasks or Tasks(), self.routed)
        self._beside = Beside(case, self._scene, tasks or Tasks())

    def initial(self) -> State:
        return self._begin_anew(self._scene.initial())

    def settled(self, state: State) -> bool:
        return state.outcome is not None

    def violation(self, state: State) -> str | None:
        """The safety sentence; and that nothing is left behind where it is over."""
        if state.wrong is not None:
            return state.wrong
        lost = self._scene.loss(state)
        return self._remains(state) if lost is None and state.outcome is not None else lost

    def _remains(self, state: State) -> str | None:
        placement = self._scene.placement(state.placement)
        goals = self._case.owners if state.outcome else self._case.goals
        if placement.layout.shards != goals or placement.cuts:
            return f"it is over, but shards are with {placement.layout.shards}, cuts {placement.cuts}, not with {goals}"
        known = {(one.host, one.shard) for one in placement.copies()}
        extra = [place for place, store in state.stores if place not in known and not store.late]
        return f"it is over, but there is still {extra}" if extra else None

    expects_the_same = True
    """Whether MIG-8 is a violation by itself, or only what comes of it."""

    # --- what a driver owes the machine; a broken one does without

    lists_what_is_done = True
    """After a crash a shard that is whole at its target is still a move: it may have to come back."""

    def held(self, state: State) -> tuple[ShardId, ...]:
        """What comes back would show in a checkpoint that began before it left."""
        if state.reading is None or state.reading.at > state.forward:
            return ()
        return tuple(map(ShardId, range(len(self._case.owners))))

    def is_read(self, state: State, garbage: Garbage) -> bool:
        """A copy stays as long as a checkpoint reads it."""
        (host, shard), incarnation = garbage
        return state.reading is not None and any(
            (one.host, one.shard, one.incarnation) == (host, shard, incarnation)
            for one in state.reading.copies
        )

    def routed(self, plan: Plan, one: Copy) -> tuple[int, int]:
        """The hashes whose rows are sent to a copy: those of the placement after the step."""
        return one.low, one.end

    def next_epoch(self, state: State) -> int:
        """Every coordinator has one of its own."""
        return state.epoch + 1

    def swept(self, state: State) -> tuple[tuple[Place, Store], ...]:
        """Before it is prepared, hosts lose what the placement does not name."""
        known = {
            ((one.host, one.shard), one.incarnation)
            for one in self._scene.placement(state.placement).copies()
        }
        return tuple((place, store) for place, store in state.stores if (place, store.incarnation) in known)

    # --- what may happen

    def actions(self, state: State) -> Iterator[Action[State]]:
        if state.reading is not None and state.wrong is None:
            yield Action(("the checkpoint reads", state.reading.copies[0]), self._read(state, state.reading))
        if state.outcome is not None or state.wrong is not None:
            return
        if not state.prepared:
            yield Action(("hosts are swept and workers ready",), self._prepare(state))
        yield from self._steps(state)
        yield from self._background(state)
        if state.straggler is not None:
            yield from self._attempts.work(state, state.straggler, late=True)
        if state.cancels:
            asked = state._replace(cancels=state.cancels - 1)
            yield Action(("somebody cancels",), self._tell(asked, orders.CancelAsked()), fault=True)
        if state.crashes:
            spent = state._replace(crashes=state.crashes - 1)
            yield Action(("the coordinator dies",), self._restart(spent), fault=True)
            if state.stragglers:
                late = self._leave_behind(spent)
                yield Action(("the coordinator dies, its tasks do not",), self._restart(late), fault=True)

    def _steps(self, state: State) -> Iterator[Action[State]]:
        run = state.run
        if run is None:
            begun = self._begin_step(state)
            if begun is not None:
                yield Action(("step", state.committed, "begins"), begun)
            return
        if run.durable:
            told = self._tell(state._replace(run=None), orders.StepCommitted(Step(run.fence.step), 0.1, 0))
            yield Action(("the machine hears of step", run.fence.step), told)
            return
        if run.refused:
            yield Action(("recovery under a new epoch",), self._restart(state))
            return
        yield from self._attempts.work(state, run, late=False)
        if self._attempts.complete(run):
            durable = self._trim(self._attempts.commit(state, run))
            yield Action(("the record of step", run.fence.step, "is durable"), durable)
        if state.failures:
            failed = state._replace(failures=state.failures - 1)
            yield Action(("step", run.fence.step, "fails"), self._abort(failed), fault=True)
            if state.stragglers:
                late = self._abort(self._leave_behind(failed))
                yield Action(("step", run.fence.step, "fails, a task of it goes on"), late, fault=True)

    def _background(self, state: State) -> Iterator[Action[State]]:
        for garbage in state.drops:
            if not self.is_read(state, garbage):
                (host, shard), _ = garbage
                yield Action(("shard", shard, "at", host, "is dropped"), self._drop(state, garbage))
        if state.copying is not None:
            for shard in state.copying.shards:
                after = self._copy(state, state.copying, shard)
                yield Action(("shard", shard, "is copied, round since", state.copying.since), after)
            if state.copy_failures:
                failed = state._replace(copying=None, copy_failures=state.copy_failures - 1)
                yield Action(("copying fails",), self._tell(failed, orders.CopyFailed("")), fault=True)
                if state.stragglers:
                    late = failed._replace(late_copying=state.copying, stragglers=state.stragglers - 1)
                    after = self._tell(late, orders.CopyFailed(""))
                    yield Action(("copying fails, a task of it goes on",), after, fault=True)
        if state.late_copying is not None:
            for shard in state.late_copying.shards:
                after = self._beside.copy(state, state.late_copying, shard, late=True)
                yield Action(("shard", shard, "is copied too late"), after)
        if state.reading is None and state.checkpoints:
            copies = tuple(self._scene.placement(state.placement).copies())
            begun = state._replace(
                reading=Reading(state.committed, copies), checkpoints=state.checkpoints - 1
            )
            yield Action(("a checkpoint as of", state.committed, "begins"), begun, fault=True)

    # --- steps

    def _begin_step(self, state: State) -> State | None:
        state, commands = self._handle(state, orders.StepAsked(Step(state.committed), self.held(state)))
        if state.wrong is not None:
            return state
        answer, *others = commands
        if self.expects_the_same and state.failed is not None:
            failed = self._scene.plan(state.failed).pieces
            if answer.pieces != failed:
                return state._replace(
                    wrong=f"MIG-8: the next attempt is to move {answer.pieces}, not {failed}"
                )
        placement = after = self._scene.placement(state.placement)
        left = dict(state.left)
        try:
            for piece in answer.pieces:
                after = moved(after, piece.shard, piece.target, piece.low, piece.end, piece.back)
                if piece.last:
                    source = self._scene.copy_with(placement, piece.shard, piece.source)
                    left[piece.shard] = ((source.host, source.shard), source.incarnation)
        except EngineError as error:
            return state._replace(wrong=str(error))
        if not answer.pieces:
            if not state.idle:
                return None
            state = state._replace(idle=state.idle - 1)
        cancelled = self._machines[state.machine].cancelled
        plan = Plan(answer.pieces, placement, after, cancelled, state.markers)
        fence = Fence(state.epoch, state.committed, state.attempt)
        state = state._replace(
            run=Run(self._scene.number_plan(plan), fence), left=tuple(sorted(left.items()))
        )
        for command in others:
            state = self._obey(state, command)
        return state

    def _abort(self, state: State) -> State:
        assert state.run is not None
        idle = state.idle if self._scene.plan(state.run.plan).pieces else state.idle + 1
        again = state._replace(run=None, failed=state.run.plan, attempt=state.attempt + 1, idle=idle)
        return self._tell(again, orders.StepAborted(Step(state.committed)))

    # --- coordinators

    def _leave_behind(self, state: State) -> State:
        """The tasks that run now go on, whatever becomes of their attempt."""
        late = state.run if state.run is not None and not state.run.durable else None
        return state._replace(straggler=late, late_copying=state.copying, stragglers=state.stragglers - 1)

    def _restart(self, state: State) -> State:
        """Another coordinator: all copies that count go back to what the last commit record says, under its fence."""
        epoch = self.next_epoch(state)
        expected = dict(state.markers)
        stores = dict(state.stores)
        for one in self._scene.placement(state.placement).copies():
            try:
                store = self._scene.store_of(state, one).before(expected[one.shard, one.incarnation] + 1)
            except Refused as refused:
                return state._replace(wrong=f"{one} cannot be recovered: {refused}")
            stores[one.host, int(one.shard)] = store._replace(fence=Fence(epoch, state.committed, -1))
        return self._begin_anew(
            state._replace(
                prepared=False,
                epoch=epoch,
                attempt=0,
                stores=tuple(sorted(stores.items())),
                run=None,
                failed=None,
                left=(),
                drops=(),
                copying=None,
                reading=None,
                idle=state.idle + (state.run is not None and not self._scene.plan(state.run.plan).pieces),
            )
        )

    def _begin_anew(self, state: State) -> State:
        placement = self._scene.placement(state.placement)
        goals = self._case.owners if state.cancelled else self._case.goals
        moves, cursors, backwards = [], {}, []
        for number, (owner, goal) in enumerate(zip(placement.layout.shards, goals, strict=True)):
            shard = ShardId(number)
            cut = placement.cuts.get(shard)
            if cut is not None:
                cursors[shard] = cut.cursor
                if goal == owner:
                    backwards.append(shard)
            low, end = self._scene.range_of(shard)
            if cut is not None or owner != goal:
                target = WorkerId(goal) if cut is None else cut.arriving
                moves.append(Move(shard, low, end, owner, target, self._case.keys))
            elif owner != self._case.owners[shard] and self.lists_what_is_done:
                cursors[shard] = end
                moves.append(
                    Move(shard, low, end, WorkerId(self._case.owners[shard]), owner, self._case.keys)
                )
        first = state.epoch == 1 and state.crashes == self._case.crashes
        resumed = None if first else cursors
        machine = self._machine(
            self._case.settings, moves, resumed, Step(state.committed), backwards, state.cancelled
        )
        return state._replace(machine=self._machines.number(machine))

    def _prepare(self, state: State) -> State:
        swept = state._replace(prepared=True, stores=self.swept(state))
        return self._tell(swept, orders.Prepared({}))

    # --- drops, background copies, checkpoints

    def _drop(self, state: State, garbage: Garbage) -> State:
        (_, shard), _ = garbage
        return self._tell(self._beside.drop(state, garbage), orders.Dropped((ShardId(shard),)))

    def _copy(self, state: State, copying: Copying, shard: int) -> State:
        state = self._beside.copy(state, copying, shard, late=False)
        if state.wrong is not None or state.copying is None or state.copying.shards:
            return state
        done = orders.CopyDone(Step(copying.fence.step), state.copying.size)
        return self._tell(state._replace(copying=None), done)

    def _read(self, state: State, reading: Reading) -> State:
        after = self._beside.read(state, reading)
        return after if after.reading is not None else self._trim(after)

    def _trim(self, state: State) -> State:
        """Undo that nobody needs any more is forgotten at once, which the real store may do."""
        needed = [state.committed]
        copied = self._machines[state.machine].copied
        if copied is not None:
            needed.append(copied)
        if state.copying is not None:
            needed.append(state.copying.fence.step)
        if state.reading is not None:
            needed.append(state.reading.at)
        stores = tuple((place, store.trimmed(min(needed))) for place, store in state.stores)
        return state._replace(stores=stores)

    # --- the machine

    def _tell(self, state: State, event: orders.Event) -> State:
        state, commands = self._handle(state, event)
        for command in commands:
            state = self._obey(state, command)
        return state

    def _obey(self, state: State, command: orders.Command) -> State:
        placement = self._scene.placement(state.placement)
        match command:
            case orders.StartCopy(shards, since):
                fence = Fence(state.epoch, state.committed, -1)
                return state._replace(copying=Copying(fence, since, shards))
            case orders.DropSources(shards):
                left = dict(state.left)
                sources = {move.shard: move.source for move in self._machines[state.machine].moves}
                # Of what was done before a crash only this is known; it was swept already.
                swept = {
                    shard: ((placement.layout.workers[worker], int(shard)), placement.incarnations[shard] - 1)
                    for shard, worker in sources.items()
                }
                return _to_drop(state, [left.get(shard, swept[shard]) for shard in shards])
            case orders.DropCopies(shards):
                targets = {move.shard: move.target for move in self._machines[state.machine].moves}
                copies = [
                    (
                        (placement.layout.workers[targets[shard]], int(shard)),
                        placement.incarnations[shard] + 1,
                    )
                    for shard in shards
                ]
                return _to_drop(state._replace(copying=None), copies)
            case orders.Finish(cancelled):
                return state._replace(outcome=cancelled)
        raise AssertionError(command)

    def _handle(self, state: State, event: orders.Event) -> tuple[State, list[Any]]:
        machine, commands, wrong = self._machines.told(state.machine, event)
        return state._replace(machine=machine, wrong=wrong or state.wrong), commands


def _to_drop(state: State, garbage: list[Garbage]) -> State:
    return state._replace(drops=tuple(sorted({*state.drops, *garbage})))
