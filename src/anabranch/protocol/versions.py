"""Versions of the state that a worker can open, and the choice of one that all of them can.

A version is a checkpoint's number, or `LIVE`: the state on the worker's own disk, when it matches the last
commit record, so that nothing has to be replayed.  `LIVE` is above every number, so that "the maximum of
the intersection" says both rules at once: go on from the disks when all of them survived, and otherwise
from the newest checkpoint that everybody can open.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import total_ordering

from anabranch.model.ids import WorkerId


@total_ordering
@dataclass(frozen=True, slots=True)
class Version:
    """A checkpoint by its number; `number=None` is `LIVE`.

    >>> max(Version(3), Version(12)) == Version(12) and LIVE > Version(12)
    True
    """

    number: int | None

    def __lt__(self, other: Version) -> bool:
        if self.number is None:
            return False
        return other.number is None or self.number < other.number

    def __str__(self) -> str:
        return "the live state" if self.number is None else f"version {self.number}"


LIVE = Version(None)
"""The state on disk, at the last committed step."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one worker can open, and what keeps it from opening the rest.

    An obstacle names the piece that is in the way: a file and what is wrong with it, a shard, a directory.
    """

    versions: frozenset[Version]
    obstacles: tuple[tuple[Version, str], ...] = ()

    @staticmethod
    def of(versions: Iterable[Version], obstacles: Mapping[Version, str] | None = None) -> Answer:
        """The same answer for the same versions and obstacles, in whatever order they came."""
        return Answer(frozenset(versions), tuple(sorted((obstacles or {}).items())))


def newest_common(answers: Mapping[WorkerId, Answer]) -> Version | None:
    """The maximum of the intersection, or None when it is empty."""
    common = frozenset.intersection(*(answer.versions for answer in answers.values()))
    return max(common, default=None)


def explain_nothing_common(answers: Mapping[WorkerId, Answer]) -> str:
    """Why no version can be opened by all: who has what, what is in the way, and what to do about it."""
    workers = sorted(answers)
    lines = ["No version of the state can be opened by every worker; nothing was started or changed."]
    for worker in workers:
        has = ", ".join(str(version) for version in sorted(answers[worker].versions, reverse=True))
        lines.append(f"  worker {worker} can open: {has or 'nothing'}")
    known = {version for answer in answers.values() for version in answer.versions}
    known.update(version for answer in answers.values() for version, _ in answer.obstacles)

    def lacking(version: Version) -> list[WorkerId]:
        return [worker for worker in workers if version not in answers[worker].versions]

    # The version that the fewest workers lack is the one that the least repair brings back.
    for version in sorted(known, key=lambda v: (-len(lacking(v)), v), reverse=True):
        whys: dict[str, list[str]] = {}
        for worker in lacking(version):
            why = dict(answers[worker].obstacles).get(version, "it is not there")
            whys.setdefault(why, []).append(str(worker))
        # A damaged file is in the way of all who read it, and of every version that is built upon it.
        lines += [
            f"  in the way of {version}: worker {', '.join(names)}: {why}" for why, names in whys.items()
        ]
    if known:
        best = max(known, key=lambda v: (-len(lacking(v)), v))
        names = ", ".join(str(worker) for worker in lacking(best))
        lines.append(
            f"What to do: bring back what worker {names} lacks of {best} (from a backup, or by attaching the "
            "disk that holds it), then run again. To give the state up and begin at step 0, use a new job directory."
        )
    else:
        lines.append(
            "What to do: bring back the checkpoints folder of the job directory from a backup, then run again. "
            "To give the state up and begin at step 0, use a new job directory."
        )
    return "\n".join(lines)
