"""Layouts: shards → workers → hosts, and input partitions → workers.  Immutable values with a version.

`initial_layout`, `rescale` and `with_partitions` give layouts in which the workers of hosts, the shards of
workers and the partitions of each input differ by at most one, and which move the minimum that any such
layout must move (`assign` says exactly what).  Layouts in the middle of a migration need not be even.

Invariants, asserted by `Layout.validate`:

LAY-1  There is at least one worker, and there are 1 to 65,536 shards.
LAY-2  Every shard belongs to a worker of the layout.
LAY-3  Every input partition belongs to a worker of the layout.

Must not know: where state is, how it moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from anabranch.errors import ConfigError, CorruptError, EngineError
from anabranch.model.assign import Item, Part, assign
from anabranch.model.hashing import MAX_SHARDS
from anabranch.model.ids import HostId, LayoutVersion, PartitionId, ShardId, WorkerId
from anabranch.model.sharding import (
    DEFAULT_SHARDING,
    DynamicSharding,
    FixedSharding,
    Sharding,
    sharding_from_json,
)

__all__ = [
    "DEFAULT_SHARDING",
    "DynamicSharding",
    "FixedSharding",
    "InputPartition",
    "Layout",
    "Sharding",
    "initial_layout",
    "renaming",
    "rescale",
    "sharding_from_json",
    "with_partitions",
]

InputPartition = tuple[str, PartitionId]
"""The name of an input and one of its partitions."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Who has what.  `inputs` must not be changed after construction."""

    version: LayoutVersion
    shards: tuple[WorkerId, ...]
    """The worker of each shard."""
    workers: tuple[HostId, ...]
    """The host of each worker."""
    inputs: Mapping[InputPartition, WorkerId] = field(default_factory=dict, hash=False)

    @property
    def hosts(self) -> tuple[HostId, ...]:
        """The hosts that have workers, in the order of their first ones."""
        return tuple(dict.fromkeys(self.workers))

    def workers_of(self, host: HostId) -> tuple[WorkerId, ...]:
        """The workers of a host, ascending."""
        return tuple(WorkerId(w) for w, place in enumerate(self.workers) if place == host)

    def shards_of(self, worker: WorkerId) -> tuple[ShardId, ...]:
        """The shards of a worker, ascending."""
        return tuple(ShardId(s) for s, owner in enumerate(self.shards) if owner == worker)

    def partitions_of(self, worker: WorkerId) -> tuple[InputPartition, ...]:
        """The input partitions of a worker, by input and name."""
        return tuple(sorted(partition for partition, owner in self.inputs.items() if owner == worker))

    def host_of_shard(self, shard: ShardId) -> HostId:
        """The host that holds a shard."""
        return self.workers[self.shards[shard]]

    def validate(self) -> None:
        """Assert the invariants LAY-1 to LAY-3.

        Raises:
            EngineError: one is broken.
        """
        count = len(self.workers)
        if not count or not 1 <= len(self.shards) <= MAX_SHARDS:
            raise EngineError(f"LAY-1: layout {self.version} has {count} workers, {len(self.shards)} shards")
        for shard, worker in enumerate(self.shards):
            if not 0 <= worker < count:
                raise EngineError(
                    f"LAY-2: shard {shard} is with worker {worker} of {count} ({self.version=})"
                )
        for (name, partition), worker in self.inputs.items():
            if not 0 <= worker < count:
                raise EngineError(
                    f"LAY-3: partition {partition!r} of input {name!r} is with worker {worker} "
                    f"of {count} ({self.version=})"
                )

    def to_json(self) -> dict[str, object]:
        """As plain dictionaries and lists; equal layouts give equal text."""
        inputs: dict[str, dict[str, int]] = {}
        for name, partition in sorted(self.inputs):
            inputs.setdefault(name, {})[partition] = self.inputs[name, partition]
        return {
            "version": self.version,
            "shards": list(self.shards),
            "workers": list(self.workers),
            "inputs": inputs,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Layout:
        """The inverse of `to_json`.

        Raises:
            CorruptError: the data is not a valid layout.
        """
        match data:
            case {
                "version": int(version),
                "shards": list(shards),
                "workers": list(workers),
                "inputs": dict(inputs),
            }:
                pass
            case _:
                raise CorruptError(f"not a layout: it has {sorted(data)} with values of unexpected types")
        try:
            layout = cls(
                version=LayoutVersion(version),
                shards=tuple(WorkerId(int(worker)) for worker in shards),
                workers=tuple(HostId(str(host)) for host in workers),
                inputs={
                    (str(name), PartitionId(partition)): WorkerId(int(worker))
                    for name, partitions in inputs.items()
                    for partition, worker in partitions.items()
                },
            )
            layout.validate()
        except (AttributeError, TypeError, ValueError, EngineError) as error:
            raise CorruptError(f"layout {version} does not parse: {error}") from error
        return layout


def initial_layout(workers: int, hosts: Sequence[HostId], sharding: Sharding = DEFAULT_SHARDING) -> Layout:
    """Version 0: worker *w* on host *w* mod H, and a run of neighbouring shards for each worker.

    Going round the hosts means that the workers with the highest ids, which leave first, leave evenly.

    Raises:
        ConfigError: no worker, no host, a host twice, or too many shards.
    """
    _check(workers, hosts)
    shards = sharding.shards_for(workers)
    return Layout(
        version=LayoutVersion(0),
        shards=tuple(WorkerId(shard * workers // shards) for shard in range(shards)),
        workers=tuple(hosts[worker % len(hosts)] for worker in range(workers)),
    )


def rescale(
    layout: Layout,
    workers: int,
    hosts: Sequence[HostId],
    sharding: Sharding = DEFAULT_SHARDING,
    *,
    remove: Collection[WorkerId] = (),
    visible: Mapping[InputPartition, Collection[HostId] | None] | None = None,
) -> Layout:
    """The next layout, for that many workers on those hosts; the same one if nothing changes.

    When S grows, the children of a shard start where it was; when it shrinks, a merged shard may
    stay with the owner of any of its parts.  Input partitions are assigned again as by `with_partitions`.

    Args:
        layout: what is.
        workers: how many workers there shall be.
        hosts: where they may be; every one is used evenly.
        sharding: gives the number of shards.
        remove: workers that must go.  Beyond them go those of hosts that go, then those with the highest ids
            as far as that leaves hosts even.  `renaming` tells the ids of those that stay.
        visible: the input partitions and the hosts that see them (None: all); without it, those
            of the layout, visible to all.

    Raises:
        ConfigError: a wrong argument; or the numbers of shards do not divide each other.
    """
    _check(workers, hosts)
    names = renaming(layout, workers, hosts, remove)
    places: list[HostId | None] = [None] * workers
    for old, new in names.items():
        if layout.workers[old] in hosts:
            places[new] = layout.workers[old]
    placed = _place(places, hosts)

    items = _split_or_merge(
        [_part(layout, owner, names) for owner in layout.shards], sharding.shards_for(workers)
    )
    draft = replace(
        layout,
        shards=tuple(assign(items, placed)),
        workers=tuple(placed),
        inputs=_assign_partitions(
            {key: _part(layout, owner, names) for key, owner in layout.inputs.items()},
            dict.fromkeys(layout.inputs) if visible is None else visible,
            placed,
        ),
    )
    return _next(layout, draft)


def with_partitions(layout: Layout, wanted: Mapping[InputPartition, Collection[HostId] | None]) -> Layout:
    """The layout with exactly the wanted input partitions; the same one if nothing changes.

    Args:
        layout: what is.
        wanted: each partition and the hosts that see it (None: all).

    Raises:
        ConfigError: a partition is visible to no host that has workers.
    """
    same = {WorkerId(worker): WorkerId(worker) for worker in range(len(layout.workers))}
    homes = {key: _part(layout, owner, same) for key, owner in layout.inputs.items()}
    return _next(layout, replace(layout, inputs=_assign_partitions(homes, wanted, layout.workers)))


def renaming(
    layout: Layout, workers: int, hosts: Sequence[HostId], remove: Collection[WorkerId] = ()
) -> dict[WorkerId, WorkerId]:
    """Old ids to new ids of the workers that stay in `rescale` with these arguments.

    Ids have no holes, so a worker whose id is too high takes one that became free; all others keep theirs.

    Raises:
        ConfigError: `remove` names a worker that does not exist.
    """
    unknown = sorted(worker for worker in remove if not 0 <= worker < len(layout.workers))
    if unknown:
        raise ConfigError(f"cannot remove workers {unknown}: there are {len(layout.workers)} workers, from 0")
    stay = {WorkerId(w): host for w, host in enumerate(layout.workers) if w not in remove}
    while len(stay) > workers:
        crowds = Counter(stay.values())
        leaver = max(stay, key=lambda worker: (stay[worker] not in hosts, crowds[stay[worker]], worker))
        del stay[leaver]
    free = iter(WorkerId(w) for w in range(workers) if w not in stay)
    return {worker: worker if worker < workers else next(free) for worker in stay}


def _check(workers: int, hosts: Sequence[HostId]) -> None:
    if workers < 1:
        raise ConfigError(f"a flow needs at least one worker, not {workers}")
    if not hosts:
        raise ConfigError("a flow needs at least one host")
    twice = [host for host, count in Counter(hosts).items() if count > 1]
    if twice:
        raise ConfigError(f"hosts must differ: {twice} are named more than once")


def _part(layout: Layout, owner: WorkerId, names: Mapping[WorkerId, WorkerId]) -> Part:
    return Part(worker=names.get(owner), host=layout.workers[owner])


def _place(places: Sequence[HostId | None], hosts: Sequence[HostId]) -> list[HostId]:
    """A host for every worker: even, and as many as possible stay where they are."""
    floor, spare = divmod(len(places), len(hosts))
    held = Counter(place for place in places if place is not None)
    crowded = sorted(hosts, key=lambda host: -held[host])[:spare]
    room = {host: floor + (host in crowded) for host in hosts}
    placed: list[HostId | None] = []
    for place in places:
        stays = place is not None and room[place] > 0
        placed.append(place if stays else None)
        if stays and place is not None:
            room[place] -= 1
    result: list[HostId] = []
    for place in placed:
        if place is None:
            place = max(hosts, key=lambda host: room[host])
            room[place] -= 1
        result.append(place)
    return result


def _split_or_merge(parts: Sequence[Part], shards: int) -> list[Item]:
    """The new shards, each with what it is made of."""
    if shards % len(parts) == 0:
        return [Item((part,)) for part in parts for _ in range(shards // len(parts))]
    if len(parts) % shards == 0:
        size = len(parts) // shards
        groups = [parts[at : at + size] for at in range(0, len(parts), size)]
        return [
            Item(tuple(sorted(group, key=lambda part: (str(part.worker), str(part.host)))))
            for group in groups
        ]
    raise ConfigError(
        f"{len(parts)} shards cannot become {shards}: one number must divide the other, so that whole shards "
        "split or merge"
    )


def _assign_partitions(
    homes: Mapping[InputPartition, Part],
    wanted: Mapping[InputPartition, Collection[HostId] | None],
    workers: Sequence[HostId],
) -> dict[InputPartition, WorkerId]:
    """Each input by itself, in the order of names; workers with less from the earlier ones are preferred."""
    crowding = [0] * len(workers)
    result: dict[InputPartition, WorkerId] = {}
    for name in sorted({name for name, _ in wanted}):
        keys = sorted(key for key in wanted if key[0] == name)
        items = []
        for key in keys:
            seen_by = wanted[key]
            if seen_by is not None and not set(seen_by) & set(workers):
                raise ConfigError(
                    f"partition {key[1]!r} of input {name!r} is visible to hosts {sorted(seen_by)} only, "
                    f"and the flow has workers on {sorted(set(workers))}: give it a worker there"
                )
            visible = None if seen_by is None or set(workers) <= set(seen_by) else frozenset(seen_by)
            items.append(Item((homes[key],) if key in homes else (), visible))
        for key, worker in zip(keys, assign(items, workers, crowding), strict=True):
            result[key] = worker
            crowding[worker] += 1
    return result


def _next(layout: Layout, draft: Layout) -> Layout:
    if draft == layout:
        return layout
    return replace(draft, version=LayoutVersion(layout.version + 1))
