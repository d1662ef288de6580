"""The assignment against every possible one, on cases small enough to enumerate."""

from __future__ import annotations

import itertools
import random

import pytest

from anabranch.model.assign import Item, Part, assign
from anabranch.model.ids import HostId, WorkerId

A, B, C = HostId("a"), HostId("b"), HostId("c")


def price(
    items: list[Item], hosts: list[HostId], crowding: list[int], chosen: tuple[int, ...]
) -> tuple[int, int, int, int]:
    loads = [chosen.count(worker) for worker in range(len(hosts))]
    moved = sum(part.worker != w for item, w in zip(items, chosen, strict=True) for part in item.parts)
    crossed = sum(part.host != hosts[w] for item, w in zip(items, chosen, strict=True) for part in item.parts)
    return sum(load * load for load in loads), moved, crossed, sum(crowding[w] for w in chosen)


def random_case(rng: random.Random, restricted: bool) -> tuple[list[Item], list[HostId], list[int]]:
    hosts = [rng.choice([A, B, C]) for _ in range(rng.randint(1, 4))]
    crowding = [rng.randint(0, 3) for _ in hosts]
    items = []
    for _ in range(rng.randint(1, 9 - len(hosts))):
        parts = []
        for _ in range(rng.choice([0, 1, 1, 2, 2, 4])):
            worker = rng.choice([None, *range(len(hosts))])
            moved_away = rng.random() < 0.3
            host = rng.choice([A, B, C]) if worker is None or moved_away else hosts[worker]
            parts.append(Part(None if worker is None else WorkerId(worker), host))
        visible = None
        if restricted and rng.random() < 0.6:
            visible = frozenset(rng.sample([A, B, C], rng.randint(1, 2))) | {rng.choice(hosts)}
        items.append(Item(tuple(parts), visible))
    return items, hosts, crowding


@pytest.mark.parametrize("restricted", [False, True])
def test_no_assignment_is_better(restricted: bool) -> None:
    rng = random.Random(1)
    for _ in range(250):
        items, hosts, crowding = random_case(rng, restricted)
        allowed = [
            [w for w, host in enumerate(hosts) if item.visible is None or host in item.visible]
            for item in items
        ]
        best = min(price(items, hosts, crowding, chosen) for chosen in itertools.product(*allowed))
        found = assign(items, hosts, crowding)
        assert all(worker in choices for worker, choices in zip(found, allowed, strict=True))
        assert price(items, hosts, crowding, tuple(found)) == best


def test_no_items() -> None:
    assert assign([], [A, B]) == []


def test_new_items_come_in_runs() -> None:
    assert assign([Item(())] * 7, [A, A, B]) == [0, 0, 0, 1, 1, 2, 2]


def test_a_move_inside_a_host_is_preferred() -> None:
    on_a, on_b = Item((Part(WorkerId(0), A),)), Item((Part(WorkerId(1), B),))
    found = assign([on_a] * 4 + [on_b] * 4, [A, B, A, B])
    assert found == [0, 0, 2, 2, 1, 1, 3, 3]
