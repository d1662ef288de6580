"""What tests of moving state run in a process that is to be killed."""

from __future__ import annotations

from pathlib import Path

from shard_helpers import fence, identity
from transfer_helpers import ALL, TABLES, address, owned, run, take

from anabranch.model.ids import Epoch, Step
from anabranch.state.copying import Filler
from anabranch.state.removal import drop_shard
from anabranch.state.store import ShardStore
from anabranch.state.transaction import marker_of
from anabranch.state.transfer import Arrival, copy_in, copy_out

ROWS = {("q.a", address(n << 56, b"L" * 700 if n % 7 == 0 else b"k")): b"v%d" % n for n in range(200)}
LAST = {("r.t", address(1)): b"last"}


def prepare(root: Path) -> None:
    ShardStore.create(root / "old", identity())
    run(owned(root / "old"), 0, ROWS)


def move(root: Path, attempt: int) -> None:
    """A whole shard in step 1."""
    cargos = take(root / "old", 1, attempt=attempt)
    run(owned(root / "new", 1, arriving=Arrival(cargos, True)), 1, LAST, attempt=attempt)
    drop_shard(root / "old", identity())


def copy(root: Path, attempt: int) -> None:
    """A copy as of step 1, and the switch."""
    store = ShardStore.open(root / "old")
    markers = {r: s for r in TABLES if (s := marker_of(store, r)) is not None}
    pieces = copy_out(store, Step(1), Epoch(0), markers, ALL, TABLES, Step(0), None)
    filler = Filler(Epoch(0), attempt, b"")
    copy_in(root / "new", identity(incarnation=1), pieces, fence(1, attempt), Step(1), True, filler)
    cargos = take(root / "old", 1, attempt=attempt, since=1)
    run(owned(root / "new", 1, arriving=Arrival(cargos, False)), 1, LAST, attempt=attempt)
