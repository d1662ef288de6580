"""The layout that a run starts with."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import ConfigError, JobDirError
from anabranch.model.ids import HostId, ShardId
from anabranch.model.layout import DynamicSharding, FixedSharding, Layout
from anabranch.model.placement import Placement
from anabranch.runtime.hosts import RollCall, find_hosts, starting_placement, wait_for_hosts
from anabranch.runtime.settings import Settings


def names(hosts: int) -> list[HostId]:
    return [HostId(f"host-{number}") for number in range(hosts)]


def start(before: Layout | None, hosts: int, **settings: int) -> Layout:
    placed = None if before is None else Placement(before, (0,) * len(before.shards))
    sharding = FixedSharding(settings["shards"]) if "shards" in settings else DynamicSharding()
    if before is not None:
        sharding = FixedSharding(len(before.shards))
    return starting_placement(names(hosts), Settings(**settings), placed, sharding).layout  # type: ignore[arg-type]


def test_a_new_job_has_a_worker_for_each_core_and_host() -> None:
    layout = start(None, 5, workers=7)
    assert len(layout.workers) == 7
    assert set(layout.workers) == set(names(5))
    assert len(start(None, 64).workers) >= 64


def test_a_fixed_number_of_shards_stays() -> None:
    before = start(None, 1, workers=2, shards=12)
    assert len(before.shards) == 12
    assert len(start(before, 1, workers=3).shards) == 12
    assert start(before, 1, workers=2, shards=12) is before
    with pytest.raises(JobDirError, match=r"--shards 16: the job was made with 12 shards"):
        start(before, 1, shards=16)


@pytest.mark.parametrize(
    ("before", "hosts", "wanted", "message"),
    [
        (None, 3, {"workers": 2}, r"--workers 2: each of the 3 hosts needs a worker"),
        (None, 1, {"workers": 4, "shards": 3}, r"--shards 3: fewer than the 4 workers"),
        ({"workers": 3, "shards": 8}, 3, {"workers": 9}, r"--workers 9: the job has 8 shards"),
    ],
)
def test_what_cannot_be(
    before: dict[str, int] | None, hosts: int, wanted: dict[str, int], message: str
) -> None:
    layout = None if before is None else start(None, hosts, **before)
    with pytest.raises(ConfigError, match=message):
        start(layout, hosts, **wanted)


@pytest.mark.parametrize(("hosts", "workers"), [(1, 2), (3, 3), (4, 6), (2, 1)])
def test_on_other_hosts_as_few_shards_move_as_can_be(hosts: int, workers: int) -> None:
    before = start(None, 2, workers=2, shards=16)
    after = start(before, hosts, workers=workers)
    assert after.version == before.version + 1
    assert len(after.workers) == workers
    assert set(after.workers) == set(names(min(hosts, workers)))
    gone = set(before.workers) - set(after.workers)
    for shard, owner in enumerate(before.shards):
        if before.workers[owner] in gone:
            continue
        # A shard leaves a host that stays only to fill one that came.
        assert after.host_of_shard(ShardId(shard)) == before.workers[owner] or hosts > 2


@settings(max_examples=100)
@given(st.integers(1, 5), st.lists(st.integers(1, 24), min_size=1, max_size=6), st.integers(24, 200))
def test_shards_stay_on_their_host_and_are_even_there(hosts: int, workers: list[int], shards: int) -> None:
    layout = start(None, hosts, workers=max(hosts, workers[0]), shards=shards)
    for count in workers[1:]:
        count = max(hosts, count)
        after = start(layout, hosts, workers=count)
        after.validate()
        if count == len(layout.workers):
            assert after is layout
            continue
        assert after.version == layout.version + 1
        assert len(after.workers) == count
        homes = [layout.workers[owner] for owner in layout.shards]
        assert [after.workers[owner] for owner in after.shards] == homes
        crowds = Counter(after.workers)
        assert max(crowds.values()) - min(crowds.values()) <= 1
        for host in names(hosts):
            loads = [len(after.shards_of(worker)) for worker in after.workers_of(host)]
            assert max(loads) - min(loads) <= 1
        layout = after


class TestRollCall:
    """Hosts that do not come are waited for once."""

    @pytest.fixture
    def waited(self, monkeypatch: pytest.MonkeyPatch) -> list[set[HostId]]:
        asked: list[set[HostId]] = []

        def wait(context: object, wanted: set[HostId]) -> list[str]:
            asked.append(wanted)
            return ["host-0", "host-1"]

        monkeypatch.setattr("anabranch.runtime.hosts._wait_for_executors", wait)
        return asked

    def test_a_recovery_does_not_wait_again(self, waited: list[set[HostId]]) -> None:
        before = Placement(start(None, 3, workers=3), (0,) * 16)
        cluster = Settings(master="spark://there:7077")
        roll = RollCall(None)  # type: ignore[arg-type]
        assert not wait_for_hosts(roll, cluster, before.layout)
        assert find_hosts(roll, cluster, before) == names(2)
        assert waited == [set(names(3)), set(names(2))]
        # But the next time it is patient.
        assert find_hosts(roll, cluster, before) == names(2)
        assert waited[-1] == set(names(3))

    def test_embedded_nobody_waits(self, waited: list[set[HostId]]) -> None:
        assert wait_for_hosts(RollCall(None), Settings(), start(None, 3, workers=3))  # type: ignore[arg-type]
        assert waited == []
