"""What the model of a migration is made of: its cases, its states, and where keys lie in them.

States are values that are hashed and compared often.  Placements and plans are not, so a `Scene` gives each of them a
number, and equal ones the same; `sim.machines` does so for machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from anabranch.errors import EngineError
from anabranch.model.ids import HostId, LayoutVersion, ShardId, WorkerId
from anabranch.model.layout import Layout
from anabranch.model.placement import Copy, Placement
from anabranch.model.ranges import hash_range
from anabranch.protocol.orders import Settings, Strategy
from anabranch.protocol.pieces import Piece
from anabranch.sim.copies import Cargo, Fence, Refused, Store, truth

FIRST = 2
"""The first step that runs: every key has been written before."""


@dataclass(frozen=True, slots=True)
class Case:
    """What moves, and what may happen how often."""

    settings: Settings = Settings(Strategy.SUDDEN)  # noqa: RUF009 (it is frozen)
    owners: tuple[int, ...] = (0,)
    """The worker of each shard; every worker has a host of its own."""
    goals: tuple[int, ...] = (1,)
    keys: int = 2
    """Of each shard, spread evenly.  A shard's size is that number of bytes."""
    idle: int = 1
    """Steps that move nothing."""
    failures: int = 0
    crashes: int = 0
    stragglers: int = 0
    """How many of the attempts that end may leave tasks behind that go on."""
    cancels: int = 0
    copy_failures: int = 0
    checkpoints: int = 0


Markers = tuple[tuple[tuple[int, int], int], ...]
"""The step that wrote last to each copy, by shard and incarnation."""


class Plan(NamedTuple):
    """What a step is to do, and what its commit record will say."""

    pieces: tuple[Piece, ...]
    before: Placement
    after: Placement
    """Rows are routed by it."""
    cancelled: bool
    markers: Markers
    """As of the commit record before."""


class Run(NamedTuple):
    """An attempt at a step."""

    plan: int
    fence: Fence
    cargos: tuple[Cargo, ...] = ()
    """Of the first pieces; rows are exchanged when all are there."""
    ran: tuple[int, ...] = ()
    """Slots of the copies that are written, ascending."""
    refused: bool = False
    durable: bool = False


class Copying(NamedTuple):
    """A round of background copies."""

    fence: Fence
    since: int | None
    shards: tuple[int, ...]
    """Not yet copied."""
    size: int = 0


class Reading(NamedTuple):
    """A checkpoint as of `at` and the copies that it has not read yet."""

    at: int
    copies: tuple[Copy, ...]


Place = tuple[HostId, int]
"""Where a copy of a shard may be."""
Garbage = tuple[Place, int]
"""A copy, by its incarnation, that is to be dropped."""


class State(NamedTuple):
    """Numbers stand for machines, placements and plans: hashing stays cheap."""

    machine: int
    prepared: bool
    epoch: int
    attempt: int
    committed: int
    """The next step."""
    placement: int
    cancelled: bool
    """Whether the last commit record says so."""
    markers: Markers
    stores: tuple[tuple[Place, Store], ...]
    run: Run | None
    failed: int | None
    """The plan of the attempt before, if the step is tried again."""
    straggler: Run | None
    left: tuple[tuple[int, Garbage], ...]
    """By shard, the copy that its last piece came from."""
    drops: tuple[Garbage, ...]
    copying: Copying | None
    late_copying: Copying | None
    reading: Reading | None
    idle: int
    failures: int
    crashes: int
    stragglers: int
    cancels: int
    copy_failures: int
    checkpoints: int
    forward: int = -1
    """The last committed step in which something has left its place, rather than to come back."""
    outcome: bool | None = None
    """Whether it was cancelled, once it is over."""
    wrong: str | None = None

    def with_store(self, place: Place, store: Store) -> State:
        """What is at a place is another store now."""
        return self._replace(stores=tuple(sorted({**dict(self.stores), place: store}.items())))


class Scene:
    """Numbers for what is not hashed, and the geometry of a case."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._numbers: dict[Any, int] = {}
        self._values: list[Any] = []

    def initial(self) -> State:
        case = self._case
        workers = tuple(HostId(f"h{worker}") for worker in range(max(*case.owners, *case.goals) + 1))
        owners = tuple(map(WorkerId, case.owners))
        placement = Placement(Layout(LayoutVersion(0), owners, workers), (1,) * len(owners))
        values = {
            shard: tuple(truth(self.key(shard, key), FIRST) for key in range(case.keys))
            for shard in range(len(owners))
        }
        fence = Fence(0, FIRST - 1, 0)
        return State(
            machine=0,
            prepared=False,
            epoch=1,
            attempt=0,
            committed=FIRST,
            placement=self.number_placement(placement),
            cancelled=False,
            markers=tuple(((shard, 1), FIRST - 1) for shard in values),
            stores=tuple(
                sorted(
                    ((workers[owners[shard]], shard), Store(1, fence, ((FIRST - 1, held),)))
                    for shard, held in values.items()
                )
            ),
            run=None,
            failed=None,
            straggler=None,
            left=(),
            drops=(),
            copying=None,
            late_copying=None,
            reading=None,
            idle=case.idle,
            failures=case.failures,
            crashes=case.crashes,
            stragglers=case.stragglers,
            cancels=case.cancels,
            copy_failures=case.copy_failures,
            checkpoints=case.checkpoints,
        )

    def loss(self, state: State) -> str | None:
        """The safety sentence: each key is in one copy, which has what the committed steps make of it."""
        stores = dict(state.stores)
        placement = self.placement(state.placement)
        seen: set[tuple[int, int]] = set()
        for one in placement.copies():
            store = stores.get((one.host, one.shard))
            if store is None or store.incarnation != one.incarnation:
                return f"lost: {one} is not there, but {store}"
            try:
                held = store.as_of(state.committed)
            except Refused as refused:
                return f"lost: {one}: {refused}"
            for key in self.keys_in(one.shard, one.low, one.end):
                wanted = truth(self.key(one.shard, key), state.committed)
                if held[key] != wanted or (one.shard, key) in seen:
                    return f"key {key} of shard {one.shard} is {held[key]} at {one.host}, not {wanted}"
                seen.add((one.shard, key))
        if len(seen) != len(placement.layout.shards) * self._case.keys:
            return f"some keys are nowhere: there are only {seen}"
        return None

    def range_of(self, shard: int) -> tuple[int, int]:
        return hash_range(shard, len(self._case.owners))

    def key(self, shard: int, key: int) -> int:
        return shard * self._case.keys + key

    def keys_in(self, shard: int, low: int, end: int) -> list[int]:
        """The keys of a shard in a range of hashes, by their places in the shard."""
        first, last = self.range_of(shard)
        hashes = (
            first + (last - first) * (2 * key + 1) // (2 * self._case.keys) for key in range(self._case.keys)
        )
        return [key for key, value in enumerate(hashes) if low <= value < end]

    def copy_with(self, placement: Placement, shard: ShardId, worker: WorkerId) -> Copy:
        for one in placement.copies():
            if (one.shard, one.worker) == (shard, worker):
                return one
        raise EngineError(f"worker {worker} has no copy of shard {shard} in {placement}")

    def store_of(self, state: State, one: Copy) -> Store:
        store = dict(state.stores).get((one.host, one.shard))
        if store is None or store.incarnation != one.incarnation:
            raise Refused(f"it is not there, but {store}")
        return store

    def placement(self, number: int) -> Placement:
        placement: Placement = self._values[number]
        return placement

    def plan(self, number: int) -> Plan:
        plan: Plan = self._values[number]
        return plan

    def _intern(self, key: Any, value: Any) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._values)
            self._values.append(value)
        return number

    def number_placement(self, placement: Placement) -> int:
        cuts = tuple(sorted((shard, cut.cursor, cut.arriving) for shard, cut in placement.cuts.items()))
        return self._intern((placement.layout.shards, placement.incarnations, cuts), placement)

    def number_plan(self, plan: Plan) -> int:
        before, after = self.number_placement(plan.before), self.number_placement(plan.after)
        return self._intern((plan.pieces, before, after, plan.cancelled, plan.markers), plan)
