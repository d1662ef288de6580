"""Write one host's share of a checkpoint: its shards as of a step, cut into pieces by recovery partition.

Shards and partitions are both ranges of the hash, so shards are read in ascending order and a partition is written
as soon as the last shard that overlaps it has been read: what is held in memory is a shard, or a partition.

Must not know: Spark, which host this is, how the version is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from anabranch import crash
from anabranch.errors import EngineError
from anabranch.model.ids import Epoch, RegionId, Step
from anabranch.model.ranges import HashRange, hash_range
from anabranch.state.asof import AsOf
from anabranch.state.chains import merge_deltas
from anabranch.state.identity import ShardIdentity
from anabranch.state.manifest import Kind, Piece, Work
from anabranch.state.pieces import Part, WriteFiles, call, cut, version_folder, write_piece
from anabranch.state.store import ShardStore
from anabranch.storage.base import Storage

SHARD_READ = crash.declare("snapshot.shard", "after a shard was read for a checkpoint")


@dataclass(frozen=True, slots=True)
class Source:
    """A shard to be read."""

    path: str
    identity: ShardIdentity
    markers: Mapping[RegionId, Step]
    """The step of each region as of the checkpoint."""
    hashes: HashRange | None = None
    """Those that are valid in it; None: all of the shard's."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What all hosts are told alike: which version, of when, cut how."""

    version: int
    at: Step
    since: Step | None
    """The step of the version that this one follows; None: there is none, and the work is all bases."""
    epoch: Epoch
    partitions: int
    work: Work

    def __post_init__(self) -> None:
        if self.since is None and len(self.work.bases) != self.partitions:
            raise EngineError(
                f"checkpoint {self.version} follows none, so it needs a base of each of {self.partitions} partitions"
            )


def write_snapshot(
    storage: Storage,
    snapshot: Snapshot,
    shards: Sequence[Source],
    merges: Sequence[int],
    writer: str,
    between: Callable[[], None] | None = None,
    write_files: WriteFiles = call,
) -> list[Piece]:
    """Write the pieces of these shards, and merge the old deltas of the partitions in `merges`.

    Args:
        storage: The folder of checkpoints.
        snapshot: What is made.
        shards: All of this host.
        merges: Partitions whose merging this host does.
        writer: Names the host in the names of files.
        between: Called before each read transaction.
        write_files: Called with all that changes files.

    Raises:
        ShardMismatch: a shard is not as the step log says, or an undo record is missing.
        Fenced: a later coordinator has a shard.
        CorruptError: a delta to be merged is damaged.  A full snapshot does not need it.
        StorageFullError: no room.
    """
    written = [
        write_piece(
            storage,
            snapshot.version,
            partition,
            "merged",
            writer,
            merge_deltas(storage, snapshot.work.merges[partition], snapshot.version),
            write_files,
        )
        for partition in merges
    ]
    waiting: dict[int, list[Part]] = {}
    ordered = sorted(shards, key=lambda source: source.identity.shard)
    for place, source in enumerate(ordered):
        for partition, part in _parts(snapshot, source, between):
            waiting.setdefault(partition, []).append(part)
        crash.point(SHARD_READ)
        # Partitions that reach into this host's next shard wait for it.
        upcoming = _hashes(ordered[place + 1])[0] if place + 1 < len(ordered) else 1 << 64
        for partition in sorted(waiting):
            if hash_range(partition, snapshot.partitions)[1] <= upcoming:
                kind: Kind = "base" if partition in snapshot.work.bases else "delta"
                parts = waiting.pop(partition)
                written.append(
                    write_piece(storage, snapshot.version, partition, kind, writer, parts, write_files)
                )
    if written:
        # Once for all: steps that make their own few bytes durable meanwhile wait behind each of these.
        write_files(partial(storage.sync, version_folder(snapshot.version)))
    return written


def _parts(
    snapshot: Snapshot, source: Source, between: Callable[[], None] | None
) -> Iterator[tuple[int, Part]]:
    store = ShardStore.open(source.path, source.identity)
    reader = AsOf(store, snapshot.at, snapshot.epoch, source.markers, between)
    bases = snapshot.work.bases
    ranges = _ranges(snapshot, _hashes(source))
    for rows in reader.scan(ranges) if ranges else ():
        yield from cut(rows, snapshot.partitions)
    if snapshot.since is not None and len(bases) < snapshot.partitions:
        for rows in reader.changed(snapshot.since, [_hashes(source)]):
            for partition, part in cut(rows, snapshot.partitions):
                if partition not in bases:
                    yield partition, part


def _ranges(snapshot: Snapshot, shard: HashRange) -> list[HashRange]:
    """The hashes of a shard that lie in partitions which get a base; neighbours are one range."""
    found: list[HashRange] = []
    for partition in sorted(snapshot.work.bases):
        all_of_it = hash_range(partition, snapshot.partitions)
        low, end = max(shard[0], all_of_it[0]), min(shard[1], all_of_it[1])
        if low < end:
            if found and found[-1][1] == low:
                low = found.pop()[0]
            found.append((low, end))
    return found


def _hashes(source: Source) -> HashRange:
    return source.hashes or hash_range(source.identity.shard, source.identity.of)
