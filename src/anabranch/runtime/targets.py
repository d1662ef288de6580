"""From a wish to a layout, and from a placement to the moves that are left.

Must not know: when anything moves.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anabranch.errors import ConfigError
from anabranch.model.ids import HostId, RegionId, ShardId, Step, WorkerId
from anabranch.model.layout import FixedSharding, Layout, Sharding, rescale
from anabranch.model.placement import (
    Intent,
    Placement,
    has_joined,
    joined,
    moved,
    overlaps,
    resharded,
    spread,
)
from anabranch.model.ranges import hash_range
from anabranch.protocol.orders import Strategy
from anabranch.protocol.pieces import Move, Piece
from anabranch.runtime.hosts import logical_hosts
from anabranch.runtime.standing import Moves
from anabranch.spark.spec import Moving

STOP_START = "stop-start"
AUTO = "auto"
STRATEGIES = (AUTO, STOP_START, *(str(strategy) for strategy in Strategy))
MOST_WORKERS = 1024
_SMALL = 1 << 20
"""Bytes that one step moves and nobody notices."""
_HOST = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._:\-\[\]]{1,200}")
"""A host's name or address.  Embedded, its state has a directory of that name, which must not be another's."""


@dataclass(frozen=True, slots=True)
class RescaleRequest:
    """What a user asked for.  Left out, a number of workers, or the hosts, stay as they are."""

    workers: int | None = None
    hosts: int | tuple[HostId, ...] | None = None
    strategy: str = AUTO
    budget: int | None = None
    remove_hosts: tuple[HostId, ...] = ()

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> RescaleRequest:
        """Of what came through the control endpoint.

        Raises:
            ConfigError: it is not a rescaling.
        """
        unknown = sorted(body.keys() - {"workers", "hosts", "strategy", "budget", "remove_hosts"})
        if unknown:
            raise ConfigError(f"a rescaling has no {', '.join(unknown)}")
        workers, hosts, budget = body.get("workers"), body.get("hosts"), body.get("budget")
        strategy, remove = body.get("strategy") or AUTO, body.get("remove_hosts") or []
        if workers is not None and not (_whole(workers) and 1 <= workers <= MOST_WORKERS):
            raise ConfigError(f"--workers {workers}: must be a whole number from 1 to {MOST_WORKERS}")
        if isinstance(hosts, list) and hosts and all(isinstance(host, str) for host in hosts):
            hosts = tuple(HostId(host) for host in hosts)
        elif hosts is not None and not (_whole(hosts) and 1 <= hosts <= MOST_WORKERS):
            raise ConfigError(
                f"--hosts {hosts}: must be a number from 1 to {MOST_WORKERS}, or names of hosts"
            )
        for name in hosts if isinstance(hosts, tuple) else ():
            if not _HOST.fullmatch(name):
                raise ConfigError(
                    f"--hosts {name!r}: a host has a name of 1 to 200 letters, digits and . _ - : [ ]"
                )
        if strategy not in STRATEGIES:
            raise ConfigError(f"--strategy {strategy}: there are {', '.join(STRATEGIES)}")
        if budget is not None and not (_whole(budget) and budget >= 1024):
            raise ConfigError(f"--budget {budget}: must be at least 1024 bytes a step")
        if budget is not None and strategy not in (AUTO, Strategy.FLUID, Strategy.HOT):
            raise ConfigError(f"--budget: only fluid and hot have one, not {strategy}")
        if workers is None and hosts is None and not remove:
            raise ConfigError("say what is to change: --workers, --hosts or --remove-host")
        if not (isinstance(remove, list) and all(isinstance(host, str) for host in remove)):
            raise ConfigError(f"--remove-host {remove}: must be names of hosts")
        return cls(workers, hosts, strategy, budget, tuple(HostId(host) for host in remove))


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def target_layout(
    request: RescaleRequest,
    now: Layout,
    sharding: Sharding,
    alive: Sequence[HostId] | None,
    emptied: Collection[HostId] = (),
) -> Layout:
    """The layout that a request asks for.

    Args:
        request: the wish.
        now: what is.
        sharding: how many shards there shall be.
        alive: the hosts that have executors; None when hosts are logical and any number can be had.
        emptied: hosts that were removed before, which are used again only by name.

    Raises:
        ConfigError: it cannot be had; says why.
    """
    hosts = _hosts(request, now, alive, emptied)
    workers = request.workers or max(len(now.workers), len(hosts))
    if workers > MOST_WORKERS:
        raise ConfigError(f"{workers} workers: a job has 1 to {MOST_WORKERS}")
    shards = sharding.shards_after(len(now.shards), workers)
    if workers > shards:
        raise ConfigError(f"--workers {workers}: the job has {shards} shards, so at most as many workers")
    if len(hosts) > workers:
        if request.hosts is not None:
            raise ConfigError(f"--workers {workers}: each of the {len(hosts)} hosts needs a worker")
        hosts = _fullest(hosts, now, workers)
    return rescale(now, workers, hosts, FixedSharding(shards))


def _hosts(
    request: RescaleRequest, now: Layout, alive: Sequence[HostId] | None, emptied: Collection[HostId]
) -> list[HostId]:
    known = list(now.hosts if alive is None else alive)
    if isinstance(request.hosts, int):
        left_out = {*request.remove_hosts, *(host for host in emptied if host not in now.hosts)}
        # Those in use come first, so that as little as possible moves.
        spare = known if alive is not None else logical_hosts(request.hosts + len(left_out))
        found = dict.fromkeys([*(host for host in now.hosts if host in known), *spare])
        hosts = [host for host in found if host not in left_out]
        if len(hosts) < request.hosts:
            unused = ", ".join(sorted(left_out.intersection(known) - {*request.remove_hosts}))
            raise ConfigError(
                f"--hosts {request.hosts}: there are {', '.join(hosts) or 'none'}"
                + (f"; {unused} was emptied, and is used by name" if unused else "")
            )
        hosts = hosts[: request.hosts]
    elif request.hosts is not None:
        hosts = list(dict.fromkeys(request.hosts))
        if alive is not None and (missing := sorted(set(hosts) - set(alive))):
            raise ConfigError(
                f"--hosts: {', '.join(missing)} {'has' if len(missing) == 1 else 'have'} no executor; there are "
                f"{', '.join(alive)}"
            )
    else:
        hosts = [host for host in known if host in now.hosts or host not in emptied]
    unknown = sorted(set(request.remove_hosts) - set(now.hosts) - set(known))
    if unknown:
        raise ConfigError(f"--remove-host {unknown[0]}: there is no such host; there are {', '.join(known)}")
    hosts = [host for host in hosts if host not in request.remove_hosts]
    if not hosts:
        raise ConfigError("no host would be left: add one first, or stop the job")
    return hosts


def _fullest(hosts: Sequence[HostId], now: Layout, count: int) -> list[HostId]:
    """The hosts that have most workers now: with fewer workers than hosts, some must go."""
    return sorted(hosts, key=lambda host: (-len(now.workers_of(host)), hosts.index(host)))[:count]


def choose(asked: str, moving_bytes: int, budget: int | None = None) -> str:
    """What `auto` means: at once where nobody would notice, else `fluid`; which also is what keeps to a budget."""
    if asked != AUTO:
        return asked
    return Strategy.SUDDEN if moving_bytes <= _SMALL and budget is None else Strategy.FLUID


def goal_of(intent: Intent) -> Layout:
    """The layout in which the migration shall end."""
    return intent.origin if intent.cancelled else intent.target


def begin_leg(placement: Placement, intent: Intent) -> tuple[Placement, int | None]:
    """The next leg of a migration: the placement in which it begins, under the same version where that is the one there
    is; and the number of shards, where they split or merge.

    Shards split before they move, and merge behind that: those that merge have to be on one host.
    """
    goal, shards = goal_of(intent), len(placement.layout.shards)
    under_way = replace(placement, intent=intent)
    if shards < len(goal.shards):
        return under_way, len(goal.shards)
    target = spread(goal, shards)
    if not placement.cuts and not has_joined(placement, target):
        under_way, _ = joined(placement, intent, target)
    arrived = all(
        under_way.layout.host_of_shard(ShardId(shard)) == target.host_of_shard(ShardId(shard))
        for shard in range(shards)
    )
    if shards > len(goal.shards) and arrived and not placement.cuts:
        return under_way, len(goal.shards)
    return under_way, None


def resharding(placement: Placement, shards: int, sizes: Mapping[ShardId, int]) -> tuple[Move, ...]:
    """The moves of a leg in which shards split or merge: one for each new shard."""
    after = resharded(placement, shards)
    found: dict[ShardId, Move] = {}
    for source, target, low, end in overlaps(placement, after):
        size = sizes.get(source.shard, 0) * (end - low) // (source.end - source.low)
        if target.shard in found:
            one = found[target.shard]
            found[target.shard] = replace(one, size=one.size + size)
        else:
            found[target.shard] = Move(
                target.shard, target.low, target.end, source.worker, target.worker, size
            )
    return tuple(found.values())


def reshard_moves(
    placement: Placement, shards: int, since: Step | None, markers: Mapping[RegionId, Mapping[ShardId, Step]]
) -> Moves:
    """What the step does in which shards split or merge; as `moves_of`."""
    after = resharded(placement, shards)
    moving = tuple(
        Moving(
            shard=target.shard,
            low=low,
            end=end,
            source=source,
            target=target,
            fresh=False,
            since=since,
            markers={r: steps[source.slot] for r, steps in markers.items() if source.slot in steps},
        )
        for source, target, low, end in overlaps(placement, after)
    )
    return Moves(after, moving)


@dataclass(frozen=True, slots=True)
class Journeys:
    """The moves that a placement still needs, as `protocol.migration` takes them."""

    moves: tuple[Move, ...]
    cursors: Mapping[ShardId, int]
    backwards: frozenset[ShardId]


def journeys(placement: Placement, sizes: Mapping[ShardId, int]) -> Journeys:
    """What is left of the migration that the placement is in the middle of."""
    intent = placement.intent
    assert intent is not None, "only a placement that leads somewhere has journeys"
    layout = placement.layout
    goal = spread(goal_of(intent), len(layout.shards))
    moves: list[Move] = []
    cursors: dict[ShardId, int] = {}
    backwards: set[ShardId] = set()
    for number, owner in enumerate(layout.shards):
        shard = ShardId(number)
        wanted = goal.host_of_shard(shard)
        low, end = hash_range(shard, len(layout.shards))
        size = sizes.get(shard, 0)
        cut = placement.cuts.get(shard)
        if cut is not None:
            moves.append(Move(shard, low, end, owner, cut.arriving, size))
            cursors[shard] = cut.cursor
            if layout.workers[cut.arriving] != wanted:
                backwards.add(shard)
        elif layout.workers[owner] != wanted:
            team = layout.workers_of(wanted)
            own = goal.shards[shard]
            target = own if own in team and not intent.cancelled else team[shard % len(team)]
            moves.append(Move(shard, low, end, owner, WorkerId(target), size))
    return Journeys(tuple(moves), cursors, frozenset(backwards))


def moves_of(
    placement: Placement, pieces: Sequence[Piece], markers: Mapping[RegionId, Mapping[ShardId, Step]]
) -> Moves:
    """What a step does that moves these pieces.

    Args:
        placement: where everything is before the step, with the workers that the step has.
        pieces: as the machine says.
        markers: what regions of copies are at, by slot.
    """
    before = {(copy.shard, copy.worker): copy for copy in placement.copies()}
    for piece in pieces:
        placement = moved(placement, piece.shard, piece.target, piece.low, piece.end, piece.back)
    after = {(copy.shard, copy.worker): copy for copy in placement.copies()}
    moving = []
    for piece in pieces:
        source = before[piece.shard, piece.source]
        there = before.get((piece.shard, piece.target))
        moving.append(
            Moving(
                shard=piece.shard,
                low=piece.low,
                end=piece.end,
                source=source,
                target=after[piece.shard, piece.target],
                fresh=there is None and piece.since is None,
                since=piece.since,
                markers={r: steps[source.slot] for r, steps in markers.items() if source.slot in steps},
                slot=None if there is None else there.slot,
            )
        )
    return Moves(placement, tuple(moving))
