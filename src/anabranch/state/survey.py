"""What is on disk of a shard, said without judging and without raising.

Must not know: what the coordinator makes of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import lmdb

from anabranch.errors import AnabranchError, ShardMismatch
from anabranch.model.ids import Epoch, RegionId, ShardId, Step
from anabranch.model.ranges import EVERYTHING, HashRange
from anabranch.state.boot import current_boot_id
from anabranch.state.identity import ShardIdentity
from anabranch.state.store import ShardStore
from anabranch.state.undo import UndoRing, short_name

_START = Step(0)


@dataclass(frozen=True, slots=True)
class ShardFound:
    """What was found of one shard.

    `missing`    there is nothing, or a shard whose creation was cut short.
    `foreign`    it is another shard, or another incarnation of this one.
    `untrusted`  written before the host's last boot and not synced since.
    `damaged`    it cannot be read.
    `there`      it is the one, and `markers` and `floors` are filled.
    """

    shard: ShardId
    state: Literal["missing", "foreign", "untrusted", "damaged", "there"]
    detail: str = ""
    """What is wrong, for people."""
    markers: dict[RegionId, Step] = field(default_factory=dict)
    """The last step that was applied to each region; one that no step has touched is left out."""
    epochs: dict[RegionId, Epoch] = field(default_factory=dict)
    """Of the coordinator whose task applied that step."""
    floors: dict[RegionId, Step] = field(default_factory=dict)
    """The earliest step as of which the undo ring can bring back each region."""

    def reaches(self, step: Step) -> bool:
        """Whether the shard can be taken back to what it was as of `step`."""
        return self.state == "there" and all(floor <= step for floor in self.floors.values())


def survey(
    path: str | os.PathLike[str],
    expected: ShardIdentity,
    regions: Iterable[RegionId],
    hashes: HashRange | None = None,
) -> ShardFound:
    """Look at a shard.  Never raises one of our errors.

    Args:
        path: Where it is.
        expected: Who it must be.
        regions: What to look for besides what is found.
        hashes: Those that are asked of it, None: all.  What arrived of others may be undone, theirs may not.
    """
    ranges = EVERYTHING if hashes is None else (hashes,)
    where = Path(os.path.abspath(path))
    if not (where / "data.mdb").exists():
        return ShardFound(expected.shard, "missing", f"shard {where}: there is none")
    boot = current_boot_id()
    stamped, synced = _stamp(where)
    if stamped != boot and not synced:
        # Not opened: LMDB may fall over a file that lost pages.
        return _untrusted(expected.shard, where)
    try:
        store = ShardStore.open(where)
    except ShardMismatch as error:
        return ShardFound(expected.shard, "missing", str(error))
    except AnabranchError as error:
        return ShardFound(expected.shard, "damaged", str(error))
    if store.identity != expected:
        detail = f"shard {where} is another one: {expected.differences(store.identity)}"
        return ShardFound(expected.shard, "foreign", detail)
    if not store.trusted(boot):
        return _untrusted(expected.shard, where)
    found = ShardFound(expected.shard, "there")
    try:
        with store.begin(write=False) as txn:
            ring = UndoRing(store, txn)
            # A long name that was cut on disk is told by its full name if that was asked for.
            names = {short_name(region): region for region in (*ring.regions(), *regions)}
            for region in names.values():
                marker = ring.marker(region)
                if marker is not None:
                    found.markers[region] = marker.step
                    found.epochs[region] = marker.epoch
                    # Records are dropped from the oldest on, so the oldest that is there begins the chain.
                    oldest = next(ring.records(region, _START), None)
                    base = marker if oldest is None else oldest.before
                    floor = _START if base is None else Step(base.step + 1)
                    found.floors[region] = max(floor, ring.history(region).floor(ranges))
    except AnabranchError as error:
        return ShardFound(expected.shard, "damaged", str(error))
    except lmdb.Error as error:
        return ShardFound(expected.shard, "damaged", str(store.failed(error)))
    return found


def stamped_boot(path: Path) -> str | None:
    """The boot in which a shard was last written, by the file beside it; None if that does not say."""
    return _stamp(path)[0]


def _stamp(path: Path) -> tuple[str | None, bool]:
    """The boot, and whether the shard was synced at its end."""
    try:
        found = json.loads((path / "stamp.json").read_text())
        return str(found["boot"]), found["synced"] is not None
    except (OSError, ValueError, KeyError, TypeError):
        return None, False


def _untrusted(shard: ShardId, where: Path) -> ShardFound:
    return ShardFound(
        shard,
        "untrusted",
        f"shard {where} was written before this machine's last boot and not synced, so some of it may be lost",
    )
