"""What a checkpoint consists of: a value, and how the next one follows from it.

A checkpoint, or *version*, is the state as of a step, cut by the hash into *recovery partitions* whose number is
fixed for the life of a job.  For each partition its manifest names a chain of *pieces*, immutable files: bases with
every key, then deltas with the keys that changed, oldest first; of two entries for a key the later one holds.
A version shares the pieces that it did not write with the versions before it.

MAN-1  In a chain no piece follows one of a later version, and bases come first.
MAN-2  A version's chains hold pieces of the version that it follows, and its own.  So a piece that no kept version names
       never comes back.

What a version writes anew is decided here, from the manifest before it alone, so that all hosts agree:

* A partition gets a new *base* when its deltas outweigh a part of the base between one half and the whole.  The part
  is another for each partition, so that partitions of equal load take turns and a checkpoint that changes
  little stays small.
* So do all when nearly every key is expected to have changed: a scan is cheaper then than to look each up.
* Otherwise the newest deltas of about equal size are *merged* into one when there are too many: the
  deltas of a key are rewritten a logarithmic number of times, and their number is logarithmic too.

Must not know: files, shards, threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field, fields
from itertools import groupby
from typing import Any, Literal

from anabranch.errors import CorruptError, EngineError
from anabranch.model.ids import Step

FORMAT = 1
Kind = Literal["base", "merged", "delta"]
_ORDER: dict[Kind, int] = {"base": 0, "merged": 1, "delta": 2}
_SMALL = 64 << 10
"""Bytes of deltas in a partition that never are reason enough for a new base."""
_MERGED_AT_ONCE = 3
"""A version does at most this part of the merging that is due, once it has merged an eighth of the partitions."""
_FEWEST_MERGED = 4
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class Piece:
    """One file: keys of one recovery partition."""

    partition: int
    path: str
    """Below the folder of checkpoints."""
    rows: int
    size: int
    digest: str
    """BLAKE2b of the file's bytes."""
    kind: Kind
    """`merged` stands for several deltas of earlier versions."""
    version: int
    """The version that wrote it."""
    low: int
    high: int
    """The smallest and the largest hash in it."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A version: all that is needed to go on from it."""

    version: int
    step: Step
    """The first step that is not in it: the next to run."""
    progress: dict[str, Any]
    """What the steps before add up to: input positions, markers, row counts."""
    layout: dict[str, Any]
    partitions: int
    fingerprint: str
    """Of the flow."""
    engine: str
    time: float
    """When it was made, in seconds since 1970."""
    pieces: tuple[Piece, ...]
    format: int = FORMAT

    def of_partition(self, partition: int) -> tuple[Piece, ...]:
        """The chain of one partition."""
        return tuple(piece for piece in self.pieces if piece.partition == partition)

    def chains(self) -> dict[int, tuple[Piece, ...]]:
        """The chain of each partition that has one."""
        found: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            found.setdefault(piece.partition, []).append(piece)
        return {partition: tuple(chain) for partition, chain in found.items()}

    def to_json(self) -> dict[str, Any]:
        """Plain values; a piece is a list of its fields, because there are thousands."""
        names = [item.name for item in fields(self) if item.name != "pieces"]
        return {name: getattr(self, name) for name in names} | {
            "pieces": [list(astuple(piece)) for piece in self.pieces]
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Manifest:
        """The inverse of `to_json`.  Raises CorruptError."""
        try:
            if value["format"] != FORMAT:
                raise CorruptError(
                    f"checkpoint {value['version']} has format {value['format']}, this release reads {FORMAT}; "
                    "run the release that wrote it"
                )
            pieces = tuple(Piece(*piece) for piece in value["pieces"])
            return cls(**{**value, "pieces": pieces, "step": Step(value["step"])})
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"a checkpoint's manifest does not parse: {error!r}") from error


def empty_manifest(progress: dict[str, Any], fingerprint: str, engine: str) -> Manifest:
    """Version 0: the state before the first step, which is nowhere stored."""
    return Manifest(0, Step(0), progress, {}, 1, fingerprint, engine, 0.0, ())


@dataclass(frozen=True, slots=True)
class Work:
    """What a version writes anew beside the keys that changed."""

    bases: frozenset[int] = frozenset()
    """Partitions of which every key is written."""
    merges: Mapping[int, tuple[Piece, ...]] = field(default_factory=dict)
    """Of other partitions, the last deltas of the chain, which become one."""


def plan_work(previous: Manifest | None, partitions: int, dense: bool = False) -> Work:
    """What the version after `previous` writes; without one, or when most keys have changed (`dense`), everything."""
    if previous is None or dense:
        return Work(bases=frozenset(range(partitions)))
    bases: set[int] = set()
    merges: dict[int, tuple[Piece, ...]] = {}
    for partition, chain in previous.chains().items():
        base = sum(piece.size for piece in chain if piece.kind == "base")
        deltas = [piece for piece in chain if piece.kind != "base"]
        turn = partition * _GOLDEN % 1
        if sum(piece.size for piece in deltas) > max(_SMALL, base * (0.5 + turn / 2)):
            bases.add(partition)
        elif merged := _to_merge(deltas, _FEWEST_MERGED + int(turn * 2 * _FEWEST_MERGED)):
            merges[partition] = merged
    return Work(frozenset(bases), _in_turn(merges, partitions))


def _in_turn(merges: dict[int, tuple[Piece, ...]], partitions: int) -> dict[int, tuple[Piece, ...]]:
    """Of the merges that are due, those that this version does: the longest chains first, and so many that no version
    rewrites much more than others do."""
    longest = sorted(merges, key=lambda partition: (-len(merges[partition]), partition))
    most = sum(piece.size for pieces in merges.values() for piece in pieces) // _MERGED_AT_ONCE
    taken: dict[int, tuple[Piece, ...]] = {}
    size = 0
    for partition in longest:
        pieces = merges[partition]
        size += sum(piece.size for piece in pieces)
        if taken and size > most and len(taken) >= partitions // 8:
            break
        taken[partition] = pieces
    return taken


def _to_merge(deltas: list[Piece], fewest: int) -> tuple[Piece, ...]:
    """The longest end of the chain in which none is larger than all after it together, if it is long enough."""
    # The deltas of one version, from several hosts, count as one: they have different keys.
    groups = [list(group) for _, group in groupby(deltas, key=lambda piece: (piece.version, piece.kind))]
    sizes = [sum(piece.size for piece in group) for group in groups]
    total = start = 0
    for place in range(len(groups) - 1, -1, -1):
        if total and sizes[place] > total:
            start = place + 1
            break
        total += sizes[place]
    if len(groups) - start < fewest:
        return ()
    return tuple(piece for group in groups[start:] for piece in group)


def is_dense(manifest: Manifest) -> bool | None:
    """Whether half of the keys or more had changed, as far as the deltas that a version wrote tell; None: it wrote none."""
    deltas: Counter[int] = Counter()
    bases: Counter[int] = Counter()
    for piece in manifest.pieces:
        if piece.kind == "delta" and piece.version == manifest.version:
            deltas[piece.partition] += piece.rows
        elif piece.kind == "base":
            bases[piece.partition] += piece.rows
    if not deltas:
        return None
    return 2 * deltas.total() >= sum(bases[partition] for partition in deltas)


def chain_pieces(previous: Manifest | None, work: Work, written: Iterable[Piece]) -> tuple[Piece, ...]:
    """All chains of a version: those before it with what was written.

    Raises:
        EngineError: what was written is not what the work asked for.
    """
    written = list(written)
    for piece in written:
        if (piece.kind == "base") != (piece.partition in work.bases):
            raise EngineError(
                f"piece {piece.path} is a {piece.kind}, against what the checkpoint was to write"
            )
    merged = Counter(piece.partition for piece in written if piece.kind == "merged")
    if merged != Counter(work.merges.keys()):
        raise EngineError(
            f"partitions {sorted(work.merges)} were to be merged, but {sorted(merged.elements())} were"
        )
    replaced = {piece.path for pieces in work.merges.values() for piece in pieces}
    kept = [
        piece
        for piece in (() if previous is None else previous.pieces)
        if piece.partition not in work.bases and piece.path not in replaced
    ]
    written.sort(key=lambda piece: (_ORDER[piece.kind], piece.path))
    return tuple(sorted(kept + written, key=lambda piece: piece.partition))
