"""Where every copy of every shard is: a layout, which copy counts, and how far shards under way have come.

A layout says which worker has a shard.  While a flow runs, a shard may also be cut in two: hashes below its *cursor*
are with the *arriving* copy at another host, the others with the *staying* one, which is that of the layout.  A
placement is a value that changes only with the commit record of a step, so that for every step each key is in one
place, and everybody who routes a row of that step knows which.

Markers name a copy by its *slot*: the number of its shard, or S + that number for an arriving copy.

PLC-1  A cut's cursor lies strictly inside its shard, and its two copies are on different hosts.
PLC-2  A copy that moves gets the incarnation after that of the copy it comes from; a rebuilt one a higher one still.
PLC-3  The version grows with every change.

Must not know: how state moves, who decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from anabranch.errors import CorruptError, EngineError
from anabranch.model.ids import HostId, Incarnation, LayoutVersion, ShardId, WorkerId
from anabranch.model.layout import Layout
from anabranch.model.ranges import hash_range


@dataclass(frozen=True, slots=True)
class Cut:
    """How far a shard has come that is on its way."""

    cursor: int
    """Hashes of the shard below it are with the arriving copy."""
    arriving: WorkerId
    incarnation: Incarnation
    """Of the arriving copy."""


class Copy(NamedTuple):
    """One store of state, and the hashes that are valid in it."""

    slot: ShardId
    shard: ShardId
    of: int
    worker: WorkerId
    host: HostId
    incarnation: Incarnation
    low: int
    end: int
    generation: int = 0
    """How often the number of shards had changed when it was made."""

    @property
    def share(self) -> float:
        """The part of its shard that is valid in it."""
        low, end = hash_range(self.shard, self.of)
        return (self.end - self.low) / (end - low)


@dataclass(frozen=True, slots=True)
class Intent:
    """Where a migration under way leads; with the placement it survives a crash."""

    number: int
    """Of the rescaling, for people."""
    origin: Layout
    target: Layout
    strategy: str
    asked: str
    """The strategy as the user said it."""
    budget: int | None = None
    cancelled: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "origin": self.origin.to_json(),
            "target": self.target.to_json(),
            "strategy": self.strategy,
            "asked": self.asked,
            "budget": self.budget,
            "cancelled": self.cancelled,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Intent:
        return cls(
            int(data["number"]),
            Layout.from_json(data["origin"]),
            Layout.from_json(data["target"]),
            str(data["strategy"]),
            str(data["asked"]),
            data["budget"],
            bool(data["cancelled"]),
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """A layout with the incarnations of its shards and the cuts of those under way."""

    layout: Layout
    incarnations: tuple[int, ...]
    cuts: Mapping[ShardId, Cut] = field(default_factory=dict, hash=False)
    intent: Intent | None = None
    generation: int = 0
    """How often the number of shards has changed."""

    @property
    def version(self) -> LayoutVersion:
        return self.layout.version

    @property
    def settled(self) -> bool:
        """Whether no migration is under way."""
        return self.intent is None and not self.cuts

    def copies(self) -> Iterable[Copy]:
        """All copies that count, by shard."""
        layout, of, age = self.layout, len(self.layout.shards), self.generation
        for number, worker in enumerate(layout.shards):
            shard = ShardId(number)
            low, end = hash_range(shard, of)
            cut = self.cuts.get(shard)
            if cut is not None:
                host = layout.workers[cut.arriving]
                slot = ShardId(of + shard)
                yield Copy(slot, shard, of, cut.arriving, host, cut.incarnation, low, cut.cursor, age)
                low = cut.cursor
            host = layout.workers[worker]
            yield Copy(shard, shard, of, worker, host, Incarnation(self.incarnations[shard]), low, end, age)

    def copies_of(self, worker: WorkerId) -> list[Copy]:
        """The copies that a worker has, by shard."""
        if not self.cuts:
            layout, of = self.layout, len(self.layout.shards)
            host = layout.workers[worker]
            return [
                Copy(
                    s,
                    s,
                    of,
                    worker,
                    host,
                    Incarnation(self.incarnations[s]),
                    *hash_range(s, of),
                    self.generation,
                )
                for s in layout.shards_of(worker)
            ]
        return [copy for copy in self.copies() if copy.worker == worker]

    def copies_at(self, host: HostId) -> list[Copy]:
        """The copies that a host has, by shard."""
        return [copy for copy in self.copies() if copy.host == host]

    def validate(self) -> None:
        """Assert the invariants.  Raises EngineError."""
        self.layout.validate()
        of = len(self.layout.shards)
        if len(self.incarnations) != of:
            raise EngineError(f"PLC-2: {len(self.incarnations)} incarnations for {of} shards")
        for shard, cut in self.cuts.items():
            low, end = hash_range(shard, of)
            hosts = self.layout.workers
            if not low < cut.cursor < end or hosts[cut.arriving] == hosts[self.layout.shards[shard]]:
                raise EngineError(f"PLC-1: shard {shard} is cut at {cut} within {low} to {end}")

    def to_json(self) -> dict[str, Any]:
        return {
            "layout": self.layout.to_json() | {"inputs": {}},
            "incarnations": list(self.incarnations),
            "cuts": {str(s): [c.cursor, c.arriving, c.incarnation] for s, c in self.cuts.items()},
            "intent": None if self.intent is None else self.intent.to_json(),
            "generation": self.generation,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Placement:
        """The inverse of `to_json`; raises CorruptError."""
        try:
            found = cls(
                Layout.from_json(data["layout"]),
                tuple(map(int, data["incarnations"])),
                {
                    ShardId(int(shard)): Cut(int(cursor), WorkerId(worker), Incarnation(incarnation))
                    for shard, (cursor, worker, incarnation) in data.get("cuts", {}).items()
                },
                None if data.get("intent") is None else Intent.from_json(data["intent"]),
                int(data.get("generation", 0)),
            )
            found.validate()
        except (KeyError, TypeError, ValueError, EngineError) as error:
            raise CorruptError(f"a placement does not parse: {error!r}") from error
        return found


def next_version(placement: Placement, layout: Layout, **changes: Any) -> Placement:
    """The placement with this layout, under the next version."""
    version = LayoutVersion(placement.version + 1)
    return replace(placement, layout=replace(layout, version=version), **changes)


def anew(before: Placement, layout: Layout) -> Placement:
    """A placement in another layout, with nothing under way: what is not where it says is to be rebuilt there."""
    if len(layout.shards) == len(before.layout.shards):
        return replace(before, layout=layout, cuts={}, intent=None)
    incarnations = (max(before.incarnations) + 1,) * len(layout.shards)
    return Placement(layout, incarnations, generation=before.generation + 1)


def has_joined(placement: Placement, target: Layout) -> bool:
    """Whether the placement has the workers of the target, under their numbers."""
    return placement.layout.workers[: len(target.workers)] == target.workers


def joined(placement: Placement, intent: Intent, target: Layout) -> tuple[Placement, dict[ShardId, WorkerId]]:
    """The placement with which a migration begins, and the worker that each shard still has to reach.

    The target's workers are there, under the target's numbers, and after them those of hosts that are to be emptied.
    A shard whose host stays has its new owner; one that has to change its host stays with a worker of its old one.
    """
    before = placement.layout
    if len(before.shards) != len(target.shards) or placement.cuts:
        raise EngineError(
            f"{len(before.shards)} shards, {len(placement.cuts)} of them cut, cannot move as {len(target.shards)}"
        )
    workers = list(target.workers)
    teams: dict[HostId, list[WorkerId]] = {}
    for number, host in enumerate(target.workers):
        teams.setdefault(host, []).append(WorkerId(number))
    for host in before.hosts:
        if host not in teams:
            teams[host] = [WorkerId(len(workers) + place) for place in range(len(before.workers_of(host)))]
            workers += [host] * len(teams[host])
    owners: list[WorkerId] = []
    journeys: dict[ShardId, WorkerId] = {}
    for shard, (old, new) in enumerate(zip(before.shards, target.shards, strict=True)):
        host = before.workers[old]
        if host == target.workers[new]:
            owners.append(new)
            continue
        journeys[ShardId(shard)] = new
        team = teams[host]
        owners.append(old if old in team else team[before.workers_of(host).index(old) % len(team)])
    layout = Layout(before.version, tuple(owners), tuple(workers), dict(target.inputs))
    return next_version(placement, layout, intent=intent), journeys


def moved(
    placement: Placement, shard: ShardId, target: WorkerId, low: int, end: int, back: bool
) -> Placement:
    """The placement after hashes `low` to `end` of a shard have moved to `target`; under the same version.

    Forwards, a range begins where the last one ended; backwards (`back`), it ends where the cut is and goes to the copy
    that stays.
    """
    first, last = hash_range(shard, len(placement.layout.shards))
    cut = placement.cuts.get(shard)
    cuts = dict(placement.cuts)
    if back:
        if cut is None or cut.cursor != end or placement.layout.shards[shard] != target:
            raise EngineError(f"shard {shard} cannot go back from {end} to {low}: it is at {cut}")
        if low > first:
            cuts[shard] = replace(cut, cursor=low)
        else:
            del cuts[shard]
        return replace(placement, cuts=cuts)
    if low != (first if cut is None else cut.cursor) or (cut is not None and cut.arriving != target):
        raise EngineError(f"shard {shard} cannot go on from {low} to worker {target}: it is at {cut}")
    incarnation = cut.incarnation if cut is not None else Incarnation(placement.incarnations[shard] + 1)
    if end < last:
        cuts[shard] = Cut(end, target, incarnation)
        return replace(placement, cuts=cuts)
    cuts.pop(shard, None)
    owners, incarnations = list(placement.layout.shards), list(placement.incarnations)
    owners[shard], incarnations[shard] = target, incarnation
    layout = replace(placement.layout, shards=tuple(owners))
    return replace(placement, layout=layout, incarnations=tuple(incarnations), cuts=cuts)


def spread(layout: Layout, shards: int) -> Layout:
    """The layout with a larger number of shards: each part of a shard where that was."""
    before = len(layout.shards)
    if shards % before:
        raise EngineError(f"{before} shards cannot become {shards}")
    return replace(layout, shards=tuple(layout.shards[shard * before // shards] for shard in range(shards)))


def resharded(placement: Placement, shards: int) -> Placement:
    """The placement with another number of shards, under the same version: shards split, or merge, where they are.

    Those that merge must be on one host; the worker of the first has them afterwards.
    """
    layout, before = placement.layout, len(placement.layout.shards)
    if placement.cuts or (shards % before and before % shards):
        raise EngineError(f"{before} shards, {len(placement.cuts)} of them cut, cannot become {shards}")
    if shards > before:
        owners = spread(layout, shards).shards
    else:
        size = before // shards
        owners = layout.shards[::size]
        for shard, owner in enumerate(layout.shards):
            if layout.workers[owner] != layout.workers[owners[shard // size]]:
                raise EngineError(f"shard {shard} is not on the host of those that it merges with")
    incarnation = max(placement.incarnations) + 1
    return replace(
        placement,
        layout=replace(layout, shards=owners),
        incarnations=(incarnation,) * shards,
        generation=placement.generation + 1,
    )


def overlaps(before: Placement, after: Placement) -> Iterable[tuple[Copy, Copy, int, int]]:
    """Of two placements with different numbers of shards: each pair of copies that share hashes, and which."""
    sources = list(before.copies())
    for target in after.copies():
        for source in sources:
            low, end = max(source.low, target.low), min(source.end, target.end)
            if low < end:
                yield source, target, low, end
