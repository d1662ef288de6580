"""Where copies of shards are, and how that changes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import CorruptError, EngineError
from anabranch.model.ids import HostId, ShardId, WorkerId
from anabranch.model.layout import FixedSharding, Layout, initial_layout, rescale
from anabranch.model.placement import (
    Cut,
    Intent,
    Placement,
    anew,
    joined,
    moved,
    next_version,
    overlaps,
    resharded,
    spread,
)
from anabranch.model.ranges import hash_range


def hosts(count: int) -> list[HostId]:
    return [HostId(f"host-{number}") for number in range(count)]


def placed(workers: int, count: int, shards: int = 8) -> Placement:
    return Placement(initial_layout(workers, hosts(count), FixedSharding(shards)), (0,) * shards)


def intent(placement: Placement, target: Layout) -> Intent:
    return Intent(1, placement.layout, target, "fluid", "auto", budget=5)


def covered(placement: Placement) -> bool:
    """Whether every hash is in exactly one copy."""
    ranges = sorted((copy.low, copy.end) for copy in placement.copies())
    bounds = [0, *(bound for each in ranges for bound in each), 1 << 64]
    return bounds[::2] == bounds[1::2]


layouts = st.tuples(st.integers(1, 6), st.integers(1, 4)).filter(lambda pair: pair[0] >= pair[1])


@given(layouts, layouts)
def test_a_migration_begins_with_every_shard_on_its_host(
    before: tuple[int, int], after: tuple[int, int]
) -> None:
    start = placed(*before)
    target = rescale(start.layout, after[0], hosts(after[1]), FixedSharding(8))
    begun, journeys = joined(start, intent(start, target), target)
    begun.validate()
    assert begun.version == start.version + 1
    assert begun.layout.workers[: len(target.workers)] == target.workers
    assert set(begun.layout.workers) == set(start.layout.workers) | set(target.workers)
    for number in range(8):
        shard = ShardId(number)
        assert begun.layout.host_of_shard(shard) == start.layout.host_of_shard(shard)
        stays = start.layout.host_of_shard(shard) == target.host_of_shard(shard)
        assert (shard in journeys) == (not stays)
        assert (begun.layout.shards[shard] if stays else journeys[shard]) == target.shards[shard]


def test_on_one_host_nothing_has_to_move() -> None:
    start = placed(2, 1)
    target = rescale(start.layout, 5, hosts(1), FixedSharding(8))
    begun, journeys = joined(start, intent(start, target), target)
    assert journeys == {}
    assert begun.layout.shards == target.shards


def test_a_shard_moves_piece_by_piece_and_back() -> None:
    start = placed(2, 2)
    low, end = hash_range(0, 8)
    half = (low + end) // 2
    worker = WorkerId(1)
    cut = moved(start, ShardId(0), worker, low, half, back=False)
    cut.validate()
    assert cut.cuts == {0: Cut(half, worker, 1)}
    assert covered(cut)
    assert next((c.slot, c.incarnation, c.low, c.end) for c in cut.copies_of(worker)) == (8, 1, low, half)
    assert cut.layout == start.layout
    whole = moved(cut, ShardId(0), worker, half, end, back=False)
    assert whole.cuts == {}
    assert whole.layout.shards[0] == worker
    assert whole.incarnations[0] == 1
    assert covered(whole)
    quarter = (low + half) // 2
    returning = moved(cut, ShardId(0), start.layout.shards[0], quarter, half, back=True)
    assert returning.cuts[ShardId(0)].cursor == quarter
    assert moved(returning, ShardId(0), start.layout.shards[0], low, quarter, back=True) == start


def test_pieces_that_do_not_follow_are_refused() -> None:
    start = placed(2, 2)
    low, end = hash_range(0, 8)
    with pytest.raises(EngineError, match="cannot go on from"):
        moved(start, ShardId(0), WorkerId(1), low + 5, end, back=False)
    with pytest.raises(EngineError, match="cannot go back from"):
        moved(start, ShardId(0), WorkerId(0), low, end, back=True)
    cut = moved(start, ShardId(0), WorkerId(1), low, low + 5, back=False)
    with pytest.raises(EngineError, match="cannot go on from"):
        moved(cut, ShardId(0), WorkerId(0), low + 5, end, back=False)


def test_as_json() -> None:
    start = placed(3, 3)
    target = rescale(start.layout, 2, hosts(2), FixedSharding(8))
    begun, journeys = joined(start, intent(start, target), target)
    shard, worker = next(iter(journeys.items()))
    low, end = hash_range(shard, 8)
    cut = moved(begun, shard, worker, low, (low + end) // 2, back=False)
    assert Placement.from_json(json.loads(json.dumps(cut.to_json()))) == cut
    assert not cut.settled
    assert next_version(start, start.layout).version == 1
    with pytest.raises(CorruptError, match="a placement does not parse"):
        Placement.from_json({**cut.to_json(), "incarnations": [0]})
    with pytest.raises(CorruptError, match="PLC-1"):
        Placement.from_json({**cut.to_json(), "cuts": {str(shard): [end, worker, 1]}})


@pytest.mark.parametrize("shards", [2, 4, 8, 16, 64])
def test_shards_split_and_merge_where_they_are(shards: int) -> None:
    # Siblings are on one host: 8 shards in two runs of four.
    start = placed(4, 1) if shards < 8 else placed(3, 3)
    after = resharded(start, shards)
    after.validate()
    assert covered(after)
    assert len(after.layout.shards) == shards
    if shards == 8:
        return
    assert after.generation == 1
    assert set(after.incarnations) == {1}
    for source, target, low, end in overlaps(start, after):
        assert source.host == target.host
        assert (low, end) == ((target.low, target.end) if shards > 8 else (source.low, source.end))
    assert anew(start, after.layout) == Placement(after.layout, after.incarnations, generation=1)


def test_shards_of_two_hosts_do_not_merge() -> None:
    with pytest.raises(EngineError, match="not on the host of those that it merges with"):
        resharded(placed(2, 2), 1)
    with pytest.raises(EngineError, match="cannot become 12"):
        resharded(placed(2, 2), 12)
    assert spread(placed(2, 2).layout, 16).shards == (0,) * 8 + (1,) * 8
