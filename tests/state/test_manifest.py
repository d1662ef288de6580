"""What a checkpoint writes anew, and the chains that come of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import CorruptError, EngineError
from anabranch.model.ids import Step
from anabranch.state.manifest import Kind, Manifest, Piece, Work, chain_pieces, is_dense, plan_work


def piece(
    partition: int, version: int, kind: Kind = "delta", size: int = 100_000, writer: str = "h"
) -> Piece:
    path = f"{version}/{partition}-{kind}-{writer}"
    return Piece(partition, path, size // 10, size, "d", kind, version, 0, 1)


def manifest(version: int, pieces: Sequence[Piece], partitions: int = 4) -> Manifest:
    return Manifest(
        version,
        Step(version * 10),
        {"next_step": version * 10},
        {},
        partitions,
        "f",
        "0.1",
        1.5,
        tuple(pieces),
    )


def test_a_manifest_survives_json() -> None:
    before = manifest(3, [piece(0, 1, "base"), piece(0, 3)])
    assert Manifest.from_json(json.loads(json.dumps(before.to_json()))) == before


@pytest.mark.parametrize("damage", [{"pieces": [[1]]}, {"format": 99}, {"pieces": None}, {"extra": 1}])
def test_a_manifest_that_is_not_one_is_corrupt(damage: dict) -> None:
    with pytest.raises(CorruptError):
        Manifest.from_json({**manifest(1, []).to_json(), **damage})


def test_the_first_version_writes_everything() -> None:
    assert plan_work(None, 3) == Work(frozenset({0, 1, 2}), {})


def test_small_changes_go_on_as_deltas_and_large_ones_make_a_base() -> None:
    small = [piece(0, 1, "base", 10_000_000), piece(0, 2)]
    large = [piece(1, 1, "base", 10_000_000), piece(1, 2, size=10_000_001)]
    assert plan_work(manifest(2, small + large), 4) == Work(frozenset({1}), {})


def test_deltas_of_equal_size_are_merged_and_a_much_larger_one_is_left() -> None:
    base, old = piece(0, 1, "base", 100_000_000), piece(0, 2, size=5_000_000)
    new = [piece(0, v) for v in range(3, 8)]
    before = manifest(7, [base, old, *new])
    work = plan_work(before, 4)
    assert work.merges == {0: tuple(new)}
    merged, delta = piece(0, 8, "merged"), piece(0, 8)
    assert chain_pieces(before, work, [delta, merged]) == (base, old, merged, delta)


def test_the_deltas_of_several_hosts_count_as_one() -> None:
    base = piece(0, 1, "base", 100_000_000)
    new = [piece(0, v, writer=host) for v in range(2, 5) for host in "ab"]
    assert plan_work(manifest(4, [base, *new]), 4).merges == {}


def test_a_base_replaces_the_chain_even_when_nothing_is_left_of_the_partition() -> None:
    before = manifest(2, [piece(0, 1, "base"), piece(0, 2), piece(1, 1, "base")])
    assert chain_pieces(before, Work(frozenset({0})), []) == (piece(1, 1, "base"),)


@pytest.mark.parametrize(
    ("work", "written"),
    [
        (Work(frozenset({0})), [piece(0, 3)]),
        (Work(), [piece(0, 3, "base")]),
        (Work(), [piece(0, 3, "merged")]),
        (Work(merges={0: (piece(0, 2),)}), []),
        (Work(merges={0: (piece(0, 2),)}), [piece(0, 3, "merged"), piece(0, 3, "merged", writer="b")]),
    ],
)
def test_pieces_that_were_not_asked_for_are_refused(work: Work, written: list[Piece]) -> None:
    before = manifest(2, [piece(0, 1, "base"), piece(0, 2)])
    with pytest.raises(EngineError):
        chain_pieces(before, work, written)


@settings(max_examples=20)
@given(share=st.floats(0.0005, 0.6), versions=st.integers(2, 120))
def test_chains_stay_short_and_what_is_written_follows_what_changed(share: float, versions: int) -> None:
    partitions, size = 16, 10_000_000
    before: Manifest | None = None
    most = total = 0
    for version in range(1, versions + 1):
        work = plan_work(before, partitions)
        written = []
        for p in range(partitions):
            if p in work.bases:
                written.append(piece(p, version, "base", size))
            else:
                if p in work.merges:
                    written.append(piece(p, version, "merged", sum(x.size for x in work.merges[p])))
                written.append(piece(p, version, size=int(size * share)))
        pieces = chain_pieces(before, work, written)
        before = replace(manifest(version, pieces, partitions))
        if version > 1:
            wrote = sum(x.size for x in written)
            most, total = max(most, wrote), total + wrote
        longest = max(len(before.of_partition(p)) for p in range(partitions))
        assert longest <= 30
    full = partitions * size
    # Each changed byte is written once, in at most a few merges, and its share of a base.
    assert total <= versions * share * full * 10 + full
    if share * versions < 0.4:
        # Nothing is due for a base, and partitions take turns at merging.
        assert most <= full * max(share * 14, 0.03)


def test_a_version_tells_whether_most_keys_had_changed() -> None:
    def made(*rows: tuple[int, Kind, int, int]) -> Manifest:
        return manifest(2, [replace(piece(p, v, kind), rows=count) for p, kind, v, count in rows])

    assert is_dense(made((0, "base", 2, 100))) is None
    assert is_dense(made((0, "base", 1, 100), (0, "delta", 1, 100), (1, "base", 2, 100))) is None
    assert is_dense(made((0, "base", 1, 60), (0, "base", 1, 40), (0, "delta", 2, 50))) is True
    assert is_dense(made((0, "base", 1, 100), (0, "delta", 2, 49))) is False
    assert plan_work(made((0, "base", 1, 100)), 3, dense=True) == Work(frozenset({0, 1, 2}), {})
