"""From a wish to a layout, and the legs of the way there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import ConfigError
from anabranch.model.ids import HostId, ShardId
from anabranch.model.layout import DynamicSharding, FixedSharding, Layout, initial_layout
from anabranch.model.placement import Intent, Placement, moved, next_version, resharded
from anabranch.runtime.targets import (
    RescaleRequest,
    begin_leg,
    choose,
    journeys,
    resharding,
    target_layout,
)

FIXED = FixedSharding(8)
BAD_NAMES = [
    "",
    ".",
    "..",
    "./host-0",
    "../evil",
    "/proc/nope",
    "a/b",
    "a\\b",
    "a\0",
    "a b",
    "a\n",
    "é",
    "x" * 201,
]
"""Of directories: a logical host has one of its name."""


def hosts(count: int) -> list[HostId]:
    return [HostId(f"host-{number}") for number in range(count)]


def now(workers: int, count: int, shards: int = 8) -> Layout:
    return initial_layout(workers, hosts(count), FixedSharding(shards))


def ask(**body: Any) -> RescaleRequest:
    return RescaleRequest.from_json(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "say what is to change"),
        ({"workers": 0}, "--workers 0"),
        ({"workers": True}, "--workers True"),
        ({"workers": "4"}, "--workers 4: must be a whole number"),
        ({"hosts": 0}, "--hosts 0"),
        ({"hosts": 1025}, "--hosts 1025: must be a number from 1 to 1024"),
        ({"hosts": [7]}, "--hosts"),
        *(({"hosts": ["a", name]}, "a name of 1 to 200 letters") for name in BAD_NAMES),
        ({"workers": 2, "strategy": "slow"}, "--strategy slow: there are auto, stop-start, sudden"),
        ({"workers": 2, "budget": 5}, "at least 1024 bytes"),
        ({"workers": 2, "budget": 5000, "strategy": "sudden"}, "only fluid and hot have one, not sudden"),
        ({"workers": 2, "remove_hosts": "h"}, "--remove-host"),
        ({"wrokers": 2}, "a rescaling has no wrokers"),
    ],
)
def test_a_wrong_wish_is_refused(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RescaleRequest.from_json(body)


def test_hosts_stay_unless_somebody_says_otherwise() -> None:
    layout = target_layout(ask(workers=4), now(2, 2), FIXED, None)
    assert sorted(layout.workers) == ["host-0", "host-0", "host-1", "host-1"]
    assert set(target_layout(ask(workers=1), now(2, 2), FIXED, None).workers) == {"host-0"}
    assert set(target_layout(ask(hosts=3), now(2, 2), FIXED, None).workers) == set(hosts(3))
    assert set(target_layout(ask(hosts=["x"], workers=2), now(2, 2), FIXED, None).workers) == {"x"}
    gone = target_layout(ask(remove_hosts=["host-0"]), now(2, 2), FIXED, None)
    assert gone.workers == ("host-1", "host-1")


def test_on_a_cluster_a_host_that_joined_is_used_and_one_that_was_emptied_is_not() -> None:
    alive = hosts(3)
    assert set(target_layout(ask(workers=3), now(2, 2), FIXED, alive).workers) == set(alive)
    left = target_layout(ask(workers=3), now(2, 2), FIXED, alive, emptied={HostId("host-2")})
    assert set(left.workers) == set(hosts(2))
    with pytest.raises(
        ConfigError, match="--hosts 3: there are host-0, host-1; host-2 was emptied, and is used by name"
    ):
        target_layout(ask(hosts=3), now(2, 2), FIXED, alive, emptied={HostId("host-2")})
    named = target_layout(ask(hosts=["host-2"]), now(2, 2), FIXED, alive, emptied={HostId("host-2")})
    assert set(named.workers) == {"host-2"}


def test_a_number_of_logical_hosts_leaves_out_those_that_were_emptied() -> None:
    layout = target_layout(ask(hosts=3), now(2, 1), FIXED, None, emptied={HostId("host-1")})
    assert set(layout.workers) == {"host-0", "host-2", "host-3"}
    removed = target_layout(ask(hosts=2, remove_hosts=["host-0"]), now(2, 2), FIXED, None)
    assert set(removed.workers) == {"host-1", "host-2"}


def test_the_most_workers_are_so_however_they_are_asked_for() -> None:
    with pytest.raises(ConfigError, match="1025 workers: a job has 1 to 1024"):
        target_layout(ask(hosts=hosts(1025)), now(2, 1), DynamicSharding(), None)
    assert len(target_layout(ask(hosts=1024), now(2, 1), DynamicSharding(), None).workers) == 1024


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"workers": 9}, "the job has 8 shards"),
        ({"hosts": 3, "workers": 2}, "each of the 3 hosts needs a worker"),
        ({"hosts": 5}, "--hosts 5: there are host-0, host-1, host-2"),
        ({"hosts": 3, "remove_hosts": ["host-2"]}, "--hosts 3: there are host-0, host-1"),
        ({"hosts": ["mars"]}, "mars has no executor; there are host-0, host-1, host-2"),
        ({"remove_hosts": ["mars"]}, "there is no such host"),
        ({"remove_hosts": ["host-0", "host-1", "host-2"]}, "no host would be left"),
    ],
)
def test_what_cannot_be_had(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        target_layout(ask(**body), now(2, 2), FIXED, hosts(3))


def test_the_number_of_shards_follows_that_of_workers() -> None:
    dynamic = DynamicSharding()
    before = initial_layout(1, hosts(1), dynamic)
    assert len(before.shards) == 16
    assert len(target_layout(ask(workers=2), before, dynamic, None).shards) == 16
    assert len(target_layout(ask(workers=3), before, dynamic, None).shards) == 64
    many = initial_layout(16, hosts(1), dynamic)
    assert len(many.shards) == 256
    assert len(target_layout(ask(workers=4), many, dynamic, None).shards) == 256
    assert len(target_layout(ask(workers=2), many, dynamic, None).shards) == 32


def test_auto() -> None:
    assert choose("auto", 1000) == "sudden"
    assert choose("auto", 1 << 30) == "fluid"
    assert choose("hot", 1) == "hot"
    # Whoever gives a budget wants it kept.
    assert choose("auto", 1000, 4096) == "fluid"


sizes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.sampled_from([4, 8, 16, 32])).filter(
    lambda one: one[0] >= one[1]
)


@given(sizes, sizes, st.booleans())
def test_legs_lead_from_any_layout_to_any_other(
    before: tuple[int, int, int], after: tuple[int, int, int], turn_back: bool
) -> None:
    origin = now(*before)
    target = target_layout(RescaleRequest(after[0], after[1]), origin, _To(after[2]), None)
    intent = Intent(1, origin, target, "sudden", "sudden")
    placement = Placement(origin, (0,) * len(origin.shards))
    seen = 0
    while True:
        seen += 1
        assert seen < 9
        start, shards = begin_leg(placement, intent)
        start.validate()
        if shards is not None:
            assert {move.shard for move in resharding(start, shards, {})} == set(range(shards))
            placement = next_version(resharded(start, shards), resharded(start, shards).layout)
        else:
            left = journeys(start, {})
            if not left.moves:
                break
            for move in left.moves:
                assert start.layout.workers[move.source] != start.layout.workers[move.target]
                start = moved(start, move.shard, move.target, move.low, move.end, back=False)
            placement = start
        if turn_back and seen == 1:
            intent = replace(intent, cancelled=True)
    goal = origin if intent.cancelled else target
    assert len(start.layout.shards) == len(goal.shards)
    for shard in map(ShardId, range(len(goal.shards))):
        assert start.layout.host_of_shard(shard) == goal.host_of_shard(shard)


class _To:
    """A sharding that gives the number that it was made with."""

    def __init__(self, shards: int) -> None:
        self.shards = shards

    def shards_after(self, shards: int, workers: int) -> int:
        return self.shards
