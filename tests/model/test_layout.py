"""Every layout that a scale change gives is even and moves the minimum, over thousands of changes."""

from __future__ import annotations

import json
import pickle
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from anabranch.errors import ConfigError, CorruptError, EngineError
from anabranch.model.ids import HostId, LayoutVersion, PartitionId, ShardId, WorkerId
from anabranch.model.layout import (
    DynamicSharding,
    FixedSharding,
    InputPartition,
    Layout,
    Sharding,
    initial_layout,
    renaming,
    rescale,
    with_partitions,
)

HOSTS = [HostId(f"host-{i}") for i in range(6)]


def keys(name: str, count: int) -> list[InputPartition]:
    return [(name, PartitionId(f"p{i}")) for i in range(count)]


def assert_even(owners: Sequence[object], bins: Sequence[object]) -> None:
    counts = Counter(owners)
    assert set(counts) <= set(bins)
    sizes = [counts[b] for b in bins]
    assert max(sizes) - min(sizes) <= 1


def least_moves(held: Sequence[int], total: int) -> int:
    """Σ of what exceeds the targets and of what has no owner, ceilings given to those who hold the most."""
    floor, spare = divmod(total, len(held))
    ordered = sorted(held, reverse=True)
    kept = sum(min(have, floor + (rank < spare)) for rank, have in enumerate(ordered))
    return total - kept


def old_parts(old: Layout, shards: int, shard: int) -> list[WorkerId]:
    """Owners of the old shards that a new one is made of; the parent's for each child."""
    before = len(old.shards)
    if shards >= before:
        return [old.shards[shard * before // shards]]
    size = before // shards
    return list(old.shards[shard * size : (shard + 1) * size])


def moved(old: Layout, new: Layout, names: dict[WorkerId, WorkerId]) -> int:
    return sum(
        names.get(owner) != worker
        for shard, worker in enumerate(new.shards)
        for owner in old_parts(old, len(new.shards), shard)
    )


def least_moves_of_merge(gains: list[list[int]], workers: int, parts: int) -> int:
    """Independent of the code under test: augmenting paths by Bellman-Ford over one slot per place.

    `gains[item][worker]` is how many parts stay.  Slots beyond the floor have a price that no gain outweighs.
    """
    floor, spare = divmod(len(gains), workers)
    price = parts + 1
    slots = [(w, 0) for w in range(workers) for _ in range(floor)]
    slots += [(w, price) for w in range(workers)] if spare else []
    taken: dict[int, int] = {}
    for start in range(len(gains)):
        best: dict[int, tuple[int, int]] = {}
        frontier = {start: 0}
        while frontier:
            reached: dict[int, int] = {}
            for item, cost in frontier.items():
                for slot, (w, extra) in enumerate(slots):
                    if taken.get(slot) == item:
                        continue
                    value = cost + extra - gains[item][w]
                    if slot not in best or value < best[slot][0]:
                        best[slot] = (value, item)
                        if slot in taken:
                            other = taken[slot]
                            back = value - extra + gains[other][w]
                            if other not in reached or back < reached[other]:
                                reached[other] = back
            frontier = reached
        slot = min((s for s in best if s not in taken), key=lambda s: best[s][0])
        while True:
            item = best[slot][1]
            previous = next((s for s, holder in taken.items() if holder == item), None)
            taken[slot] = item
            if item == start or previous is None:
                break
            slot = previous
    return parts - sum(gains[item][slots[slot][0]] for slot, item in taken.items())


def check_change(old: Layout, new: Layout, hosts: list[HostId], names: dict[WorkerId, WorkerId]) -> None:
    new.validate()
    workers = range(len(new.workers))
    assert_even(new.shards, workers)
    assert_even(new.workers, hosts)
    assert new.version in (old.version, old.version + 1)
    assert (new is old) == (new.version == old.version)
    parts = [old_parts(old, len(new.shards), shard) for shard in range(len(new.shards))]
    if len(new.shards) >= len(old.shards):
        held = Counter(names.get(owners[0]) for owners in parts)
        minimum = least_moves([held[w] for w in map(WorkerId, workers)], len(new.shards))
        assert moved(old, new, names) == minimum
    elif len(new.shards) <= 32 and len(workers) <= 6:
        gains = [[sum(names.get(owner) == w for owner in owners) for w in workers] for owners in parts]
        assert moved(old, new, names) == least_moves_of_merge(gains, len(workers), len(old.shards))
    held_hosts = Counter(old.workers[w] for w in names if old.workers[w] in hosts)
    rehosted = sum(old.workers[w] != new.workers[names[w]] for w in names)
    gone = sum(old.workers[w] not in hosts for w in names)
    surplus = least_moves([held_hosts[h] for h in hosts], len(new.workers)) - (
        len(new.workers) - sum(held_hosts.values())
    )
    assert rehosted == surplus + gone


@pytest.mark.parametrize(
    ("sharding", "most", "seed"),
    [
        (DynamicSharding(), 14, 1),
        (DynamicSharding(0.25), 6, 2),
        (DynamicSharding(0.5), 12, 3),
        (FixedSharding(60), 24, 4),
        (FixedSharding(5), 9, 5),
    ],
)
def test_scale_changes_are_even_and_minimal(sharding: Sharding, most: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        hosts = rng.sample(HOSTS, rng.randint(1, 3))
        layout = initial_layout(rng.randint(1, most), hosts, sharding)
        assert_even(layout.shards, range(len(layout.workers)))
        for _ in range(20):
            workers = rng.choice([rng.randint(1, most), min(most, len(layout.workers) + 1)])
            if rng.random() < 0.3:
                hosts = rng.sample(HOSTS, rng.randint(1, 4))
            leavers = rng.sample(range(len(layout.workers)), rng.randint(0, len(layout.workers)) // 3)
            remove = [WorkerId(w) for w in leavers if rng.random() < 0.3]
            names = renaming(layout, workers, hosts, remove)
            assert not set(remove) & set(names)
            assert len(names) == min(workers, len(layout.workers) - len(remove))
            assert all(old == new for old, new in names.items() if old < workers)
            following = rescale(layout, workers, hosts, sharding, remove=remove)
            assert len(following.shards) == sharding.shards_for(workers)
            check_change(layout, following, hosts, names)
            layout = following


def test_partition_changes_are_even_and_minimal() -> None:
    rng = random.Random(6)
    for _ in range(60):
        layout = initial_layout(rng.randint(1, 9), HOSTS[: rng.randint(1, 3)])
        for _ in range(20):
            wanted = {
                key: None
                for name in ("orders", "users")
                for key in keys(name, 20)
                if rng.random() < rng.choice([0.2, 0.9])
            }
            before = layout
            if rng.random() < 0.3:
                layout = rescale(layout, rng.randint(1, 9), layout.hosts, visible=wanted)
            else:
                layout = with_partitions(layout, wanted)
            assert set(layout.inputs) == set(wanted)
            for name in ("orders", "users"):
                mine = [key for key in wanted if key[0] == name]
                assert_even([layout.inputs[key] for key in mine], range(len(layout.workers)))
                names = renaming(before, len(layout.workers), layout.hosts)
                stayed = [key for key in mine if key in before.inputs]
                held = Counter(names.get(before.inputs[key]) for key in stayed)
                lost = sum(names.get(before.inputs[key]) != layout.inputs[key] for key in stayed)
                minimum = least_moves([held[WorkerId(w)] for w in range(len(layout.workers))], len(mine))
                assert lost == minimum - (len(mine) - len(stayed))


def test_first_layout_has_runs_of_shards_and_goes_round_the_hosts() -> None:
    layout = initial_layout(3, HOSTS[:2], FixedSharding(8))
    assert layout == Layout(
        LayoutVersion(0),
        tuple(map(WorkerId, (0, 0, 0, 1, 1, 1, 2, 2))),
        (HOSTS[0], HOSTS[1], HOSTS[0]),
    )
    assert layout.hosts == (HOSTS[0], HOSTS[1])
    assert layout.workers_of(HOSTS[0]) == (0, 2)
    assert layout.shards_of(WorkerId(1)) == (3, 4, 5)
    assert layout.host_of_shard(ShardId(4)) == HOSTS[1]


def test_adding_a_worker_takes_a_little_from_each() -> None:
    layout = initial_layout(2, HOSTS[:1], FixedSharding(6))
    assert rescale(layout, 3, HOSTS[:1], FixedSharding(6)).shards == (0, 0, 2, 1, 1, 2)


def test_children_stay_and_merged_shards_stay_with_an_owner() -> None:
    sharding = DynamicSharding(0.5)
    two = initial_layout(2, HOSTS[:1], sharding)
    assert two.shards == (0, 0, 1, 1)
    three = rescale(two, 3, HOSTS[:1], sharding)
    assert len(three.shards) == 8
    assert moved(two, three, {WorkerId(0): WorkerId(0), WorkerId(1): WorkerId(1)}) == 2
    back = rescale(three, 2, HOSTS[:1], sharding)
    assert back.shards == two.shards


def test_a_change_of_nothing_is_the_same_layout() -> None:
    layout = with_partitions(initial_layout(3, HOSTS[:2]), dict.fromkeys(keys("in", 5)))
    assert rescale(layout, 3, HOSTS[:2]) is layout
    assert with_partitions(layout, dict.fromkeys(keys("in", 5))) is layout


def test_scaling_in_prefers_moves_inside_a_host() -> None:
    sharding = FixedSharding(64)
    layout = initial_layout(4, HOSTS[:2], sharding)
    smaller = rescale(layout, 2, HOSTS[:2], sharding)
    assert all(layout.host_of_shard(ShardId(s)) == smaller.host_of_shard(ShardId(s)) for s in range(64))


def test_workers_of_a_lost_host_go_first() -> None:
    layout = initial_layout(4, HOSTS[:2])
    assert renaming(layout, 2, HOSTS[1:2]) == {1: 1, 3: 0}
    assert renaming(layout, 3, HOSTS[:2], remove=[WorkerId(0)]) == {1: 1, 2: 2, 3: 0}


def test_partitions_are_given_only_to_hosts_that_see_them() -> None:
    layout = initial_layout(4, HOSTS[:2])
    wanted: dict[InputPartition, list[HostId] | None] = dict.fromkeys(keys("in", 4))
    wanted |= {
        (name, PartitionId(f"local{i}")): [HOSTS[1], HOSTS[5]]
        for name, i in [("in", 0), ("in", 1), ("in", 2)]
    }
    layout = with_partitions(layout, wanted)
    for (_, partition), worker in layout.inputs.items():
        assert not partition.startswith("local") or layout.workers[worker] == HOSTS[1]
    assert_even(list(layout.inputs.values()), range(4))
    with pytest.raises(ConfigError, match="partition 'x' of input 'in' is visible to hosts"):
        with_partitions(layout, {("in", PartitionId("x")): [HOSTS[4]]})


def test_inputs_of_one_partition_spread_over_workers() -> None:
    wanted = dict.fromkeys([(f"input{i}", PartitionId("only")) for i in range(4)])
    layout = with_partitions(initial_layout(4, HOSTS[:1]), wanted)
    assert sorted(layout.inputs.values()) == [0, 1, 2, 3]
    assert layout.partitions_of(layout.inputs["input2", PartitionId("only")]) == (("input2", "only"),)


def test_json_and_pickle() -> None:
    layout = with_partitions(initial_layout(3, HOSTS[:2]), dict.fromkeys([*keys("b", 3), *keys("a", 2)]))
    text = json.dumps(layout.to_json())
    assert Layout.from_json(json.loads(text)) == layout
    assert json.dumps(Layout.from_json(json.loads(text)).to_json()) == text
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert hash(pickle.loads(pickle.dumps(layout))) == hash(layout)


@pytest.mark.parametrize(
    "change",
    [
        {"shards": [0, 3]},
        {"shards": []},
        {"workers": []},
        {"inputs": {"a": {"p": 9}}},
        {"inputs": 1},
        {"shards": ["x"]},
    ],
)
def test_damaged_json_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(CorruptError):
        Layout.from_json(initial_layout(3, HOSTS[:2]).to_json() | change)


def test_validate_names_the_invariant() -> None:
    one = (WorkerId(0),)
    with pytest.raises(EngineError, match="LAY-1"):
        Layout(LayoutVersion(0), one, ()).validate()
    with pytest.raises(EngineError, match="LAY-2: shard 1"):
        Layout(LayoutVersion(0), (*one, WorkerId(1)), (HOSTS[0],)).validate()
    with pytest.raises(EngineError, match="LAY-3: partition 'p0' of input 'in'"):
        Layout(LayoutVersion(0), one, (HOSTS[0],), {keys("in", 1)[0]: WorkerId(1)}).validate()


def test_wrong_arguments_are_refused() -> None:
    layout = initial_layout(2, HOSTS[:1], FixedSharding(48))
    for workers, hosts, match in [
        (0, HOSTS[:1], "at least one worker"),
        (1, [], "host"),
        (1, HOSTS[:1] * 2, "differ"),
    ]:
        with pytest.raises(ConfigError, match=match):
            initial_layout(workers, hosts)
        with pytest.raises(ConfigError, match=match):
            rescale(layout, workers, hosts)
    with pytest.raises(ConfigError, match="48 shards cannot become 100"):
        rescale(layout, 2, HOSTS[:1], FixedSharding(100))
    with pytest.raises(ConfigError, match=r"cannot remove workers \[7\]"):
        rescale(layout, 2, HOSTS[:1], FixedSharding(48), remove=[WorkerId(7)])
