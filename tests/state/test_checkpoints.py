"""Checkpoints written beside a flow and restored to other shards, against a plain dictionary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_helpers import dump, fence

from anabranch.errors import CorruptError, EngineError, Fenced
from anabranch.model.ids import Epoch, HostId, Incarnation, RegionId, ShardId, Step
from anabranch.model.ranges import hash_range
from anabranch.state import asof, manifest
from anabranch.state.asof import AsOf
from anabranch.state.identity import ShardIdentity
from anabranch.state.manifest import Manifest, Piece, Work, chain_pieces, plan_work
from anabranch.state.restore import Target, restore_shards
from anabranch.state.snapshot import Snapshot, Source, write_snapshot
from anabranch.state.store import ShardStore, shard_path
from anabranch.state.survey import survey
from anabranch.state.transaction import StageTransaction, rollback_shard
from anabranch.state.undo import short_name
from anabranch.state.versions import Versions
from anabranch.storage.base import Storage
from anabranch.storage.local import LocalStorage
from anabranch.storage.opening import open_storage

TABLES = {"r": ["r.a", "r." + "é" * 120], "q": ["q.t"]}
State = dict[tuple[str, bytes], bytes]
Rows = dict[tuple[str, bytes], bytes | None]

HASHES = [n << 60 for n in range(16)] + [(1 << 64) - 1]
ADDRESSES = [h.to_bytes(8, "big") + b"\0" + k for h in HASHES for k in (b"", b"k", b"L" * 600)]
ROWS = st.dictionaries(
    st.tuples(st.sampled_from([t for many in TABLES.values() for t in many]), st.sampled_from(ADDRESSES)),
    st.none() | st.binary(max_size=3),
    max_size=10,
)


class Flow:
    """Shards on hosts, steps over them, and what they should hold."""

    def __init__(self, root: Path, shards: int, hosts: int) -> None:
        self.of, self.hosts = shards, hosts
        self.paths = [shard_path(root / f"h{s % hosts}", ShardId(s)) for s in range(shards)]
        self.ids = [self.identity(s) for s in range(shards)]
        for path, who in zip(self.paths, self.ids, strict=True):
            ShardStore.create(path, who)
        self.step = 0
        self.states: list[State] = [{}]
        self.markers: list[list[dict[RegionId, Step]]] = [[{} for _ in range(shards)]]
        self.keep = 0

    def identity(self, shard: int, incarnation: int = 0) -> ShardIdentity:
        return ShardIdentity(
            "job", ShardId(shard), self.of, Incarnation(incarnation), HostId(f"h{shard % self.hosts}")
        )

    def run(self, rows: Rows, attempt: int = 0, epoch: int = 0) -> None:
        """Apply the next step, unless it is an attempt in vain (attempt −1)."""
        markers = [dict(known) for known in self.markers[-1]]
        for shard, path in enumerate(self.paths):
            low, end = hash_range(shard, self.of)
            for region, tables in TABLES.items():
                now = fence(self.step, max(0, attempt), epoch)
                with StageTransaction(
                    ShardStore.open(path), now, [RegionId(region)], keep_undo_from=Step(self.keep)
                ) as transaction:
                    for table in tables:
                        mine = {
                            a: v
                            for (t, a), v in rows.items()
                            if t == table and low <= int.from_bytes(a[:8], "big") < end
                        }
                        if mine:
                            markers[shard][RegionId(region)] = Step(self.step)
                            addresses = sorted(mine)
                            olds = transaction.get(table, addresses, True)
                            values = [mine[a] for a in addresses]
                            transaction.put(RegionId(region), table, addresses, values, olds, True)
                    transaction.commit()
        if attempt >= 0:
            after = {**self.states[-1], **rows}
            self.states.append({place: value for place, value in after.items() if value is not None})
            self.markers.append(markers)
            self.step += 1

    def checkpoint(
        self, storage: Storage, partitions: int, between: list[Rows] | None = None
    ) -> tuple[Manifest, Work]:
        """A version as of now, while the steps in `between` are run."""
        versions = Versions(storage)
        there = versions.list()
        before = versions.manifest(there[-1]) if there else None
        work = plan_work(before, partitions)
        at = self.step
        version = (there[-1] if there else 0) + 1
        since = None if before is None else before.step
        snapshot = Snapshot(version, Step(at), since, Epoch(0), partitions, work)
        todo = list(between or ())

        def go_on() -> None:
            if todo:
                rows = todo.pop(0)
                self.run(dict.fromkeys(rows, b"in vain"), attempt=-1)
                self.run(rows, attempt=1)

        written: list[Piece] = []
        for host in range(self.hosts):
            mine = [s for s in range(self.of) if s % self.hosts == host]
            sources = [Source(str(self.paths[s]), self.ids[s], self.markers[at][s]) for s in mine]
            merges = [p for p in work.merges if p % self.hosts == host]
            written += write_snapshot(storage, snapshot, sources, merges, f"h{host}", go_on)
        pieces = chain_pieces(before, work, written)
        made = Manifest(version, Step(at), {}, {}, partitions, "f", "0", 0.0, pieces)
        versions.commit(made)
        versions.trim(2)
        self.keep = at
        return made, work


def content(targets: Sequence[Target]) -> dict[tuple[bytes, bytes], bytes]:
    """Everything in some shards, by the reader that has a test of its own."""
    found: dict[tuple[bytes, bytes], bytes] = {}
    for target in targets:
        low, end = target.hashes
        for rows in AsOf(ShardStore.open(target.path), Step(1 << 40), Epoch(99)).scan():
            for address, value in zip(rows.addresses, rows.values, strict=True):
                assert value is not None
                assert low <= int.from_bytes(address[:8], "big") < end
                found[rows.table, address] = value
    return found


def on_disk(state: State) -> dict[tuple[bytes, bytes], bytes]:
    return {(short_name(table), address): value for (table, address), value in state.items()}


def targets_at(root: Path, shards: Sequence[int], of: int, **markers: int) -> list[Target]:
    known = {RegionId(region): Step(step) for region, step in markers.items()}
    return [
        Target(
            shard_path(root, ShardId(s)),
            ShardIdentity("job", ShardId(s), of, Incarnation(1), HostId("new")),
            known,
        )
        for s in shards
    ]


@settings(max_examples=12)
@given(
    rounds=st.lists(
        st.tuples(st.lists(ROWS, max_size=3), st.lists(ROWS, max_size=4)), min_size=1, max_size=7
    ),
    layout=st.sampled_from([(3, 2, 4), (4, 1, 4), (2, 2, 7), (5, 3, 2)]),
    new=st.sampled_from([1, 2, 4, 6]),
    small=st.sampled_from([0, 3_000, 64_000]),
)
def test_a_chain_of_checkpoints_restores_the_state_as_of_each(
    tmp_path_factory: pytest.TempPathFactory, rounds: list, layout: tuple[int, int, int], new: int, small: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asof, "FIRST", 3)
        patch.setattr(asof, "MOST", 3)
        patch.setattr(manifest, "_FEWEST_MERGED", 2)
        patch.setattr(manifest, "_SMALL", small)
        root = tmp_path_factory.mktemp("chain")
        shards, hosts, partitions = layout
        flow = Flow(root, shards, hosts)
        storage = LocalStorage(root / "checkpoints")
        made = []
        for before, between in rounds:
            for rows in before:
                flow.run(rows)
            made.append(flow.checkpoint(storage, partitions, between)[0])
        for number, version in enumerate(made[-2:]):
            # Two workers, each with every other shard, share the new layout.
            for worker in range(2):
                mine = list(range(worker, new, 2))
                targets = targets_at(root / f"new{number}", mine, new)
                rows = restore_shards(storage, version, targets, fence(version.step, epoch=1))
                expected = {
                    place: value
                    for place, value in on_disk(flow.states[version.step]).items()
                    if int.from_bytes(place[1][:8], "big") * new >> 64 in mine
                }
                assert content(targets) == expected
                assert rows == len(expected)


def rows(*keys: int, value: bytes = b"v", table: str = "r.a") -> Rows:
    return {(table, (k << 56).to_bytes(8, "big") + b"\0k"): value for k in keys}


@pytest.fixture
def flow(tmp_path: Path) -> Flow:
    return Flow(tmp_path, 2, 1)


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "checkpoints")


def restored(flow: Flow, version: Manifest, incarnation: int = 1) -> list[Target]:
    return [
        Target(flow.paths[s], flow.identity(s, incarnation), flow.markers[version.step][s])
        for s in range(flow.of)
    ]


@pytest.mark.parametrize("place", ["local", "s3"])
def test_a_restored_shard_is_as_if_rolled_back(
    flow: Flow, tmp_path: Path, place: str, request: pytest.FixtureRequest
) -> None:
    where = tmp_path / "checkpoints" if place == "local" else request.getfixturevalue("object_url")
    storage = open_storage(where).child("checkpoints")
    flow.run(rows(1, 2, 200) | rows(1, table="q.t"))
    flow.run(rows(2, value=b"w"))
    version, _ = flow.checkpoint(storage, 4)
    flow.run(rows(1, 3, value=b"later"))
    flow.run(rows(200, value=b"later"))
    for shard, path in enumerate(flow.paths):
        rollback_shard(ShardStore.open(path), fence(2, epoch=1), flow.markers[2][shard])
    back = [dump(ShardStore.open(path), meta=False) for path in flow.paths]
    targets = restored(flow, version)
    restore_shards(storage, version, targets, fence(2, epoch=2))
    assert [dump(ShardStore.open(path), meta=False) for path in flow.paths] == back
    for target in targets:
        found = survey(target.path, target.identity, [RegionId("r"), RegionId("other")])
        assert found.state == "there"
        assert found.markers == target.markers
        assert found.floors == {region: step + 1 for region, step in target.markers.items()}
    # And the flow goes on from there.
    flow.ids = [target.identity for target in targets]
    flow.step, flow.states, flow.markers = 2, flow.states[:3], flow.markers[:3]
    flow.run(rows(1, value=b"again"), epoch=2)
    assert content(targets) == on_disk(flow.states[3])


def test_restoring_again_changes_nothing_and_an_older_restorer_is_refused(
    flow: Flow, storage: Storage
) -> None:
    flow.run(rows(1, 200))
    version, _ = flow.checkpoint(storage, 4)
    targets = restored(flow, version)
    assert restore_shards(storage, version, targets, fence(1, epoch=2)) == 2
    flow.ids = [target.identity for target in targets]
    flow.run(rows(1, value=b"new"), epoch=2)
    assert restore_shards(storage, version, targets, fence(1, epoch=2)) == 0
    assert content(targets) == on_disk(flow.states[2])
    with pytest.raises(Fenced, match="too late"):
        restore_shards(storage, version, restored(flow, version, incarnation=7), fence(1, epoch=1))
    assert content(targets) == on_disk(flow.states[2])
    assert not list(flow.paths[0].parent.glob("*~*"))


def test_what_is_in_the_way_is_replaced(flow: Flow, storage: Storage) -> None:
    flow.run(rows(1, 200))
    version, _ = flow.checkpoint(storage, 4)
    for path in flow.paths:
        ShardStore.open(path).close()
    (flow.paths[0] / "data.mdb").write_bytes(b"garbage")
    (flow.paths[1] / "stamp.json").unlink()
    left = flow.paths[0].with_name(f"{flow.paths[0].name}~restoring-crashed")
    left.mkdir()
    found = [survey(path, who, []).state for path, who in zip(flow.paths, flow.ids, strict=True)]
    assert found == ["damaged", "untrusted"]
    targets = restored(flow, version)
    restore_shards(storage, version, targets, fence(1, epoch=1))
    assert content(targets) == on_disk(flow.states[1])
    assert not left.exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_a_damaged_piece_is_named_and_the_shards_stay(flow: Flow, storage: LocalStorage, damage: str) -> None:
    flow.run(rows(1, 200))
    flow.checkpoint(storage, 4)
    version, _ = flow.checkpoint(storage, 4)
    file = storage.local / version.pieces[-1].path
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "delete":
        file.unlink()
    else:
        file.write_bytes(data if damage == "flip" else data[:-1])
    before = [dump(ShardStore.open(path)) for path in flow.paths]
    with pytest.raises(CorruptError, match=rf"{file.name}.*checkpoint 2 .*another version"):
        restore_shards(storage, version, restored(flow, version), fence(1, epoch=1))
    assert [dump(ShardStore.open(path)) for path in flow.paths] == before
    assert not list(flow.paths[0].parent.glob("*~*"))
    usable, problems = Versions(storage).newest_usable()
    if damage == "flip":
        assert (usable, problems) == (version, [])
    else:
        assert usable is None
        assert file.name in problems[0]


def test_survey_says_what_is_there(flow: Flow) -> None:
    region = RegionId("r")
    flow.run(rows(1))
    flow.run(rows(2))
    flow.keep = 2
    flow.run(rows(3))
    found = survey(flow.paths[0], flow.ids[0], [region])
    assert (found.state, found.markers, found.floors) == ("there", {region: 2}, {region: 2})
    assert found.reaches(Step(2))
    assert not found.reaches(Step(1))
    assert survey(flow.paths[1], flow.ids[1], [region]).markers == {}
    assert survey(flow.paths[1], flow.ids[0], [region]).state == "foreign"
    assert survey(flow.paths[0] / "nowhere", flow.ids[0], [region]).state == "missing"


def test_a_checkpoint_that_follows_none_must_be_full() -> None:
    with pytest.raises(EngineError, match="follows none"):
        Snapshot(1, Step(1), None, Epoch(0), 4, Work(frozenset({0, 1, 2})))
