"""Remove stores that count no more.

A store is first renamed, then deleted, so that whoever opens its path finds all of it or nothing:

    SHARD~dropped-NONCE   being deleted

Must not know: which stores count.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from anabranch import crash
from anabranch.errors import AnabranchError
from anabranch.state.boot import current_boot_id
from anabranch.state.faults import translate_os
from anabranch.state.identity import Fence, ShardIdentity
from anabranch.state.store import ShardStore, shard_path
from anabranch.state.survey import stamped_boot
from anabranch.state.transaction import read_fence

RENAMED = crash.declare("drop.renamed", "a store that counts no more is out of the way, and not yet deleted")
_SHARD = re.compile(r"shard-\d+(\.\d+)?")


def drop_shard(path: str | os.PathLike[str], identity: ShardIdentity) -> int:
    """Remove a store if it is this one, and what is left of others that were being removed there; returns the bytes of disk
    that the store takes.

    One that is missing, is another, or was written before the last boot (so that it cannot be asked) stays as it is.
    """
    where = Path(os.path.abspath(path))
    for left in where.parent.glob(f"{where.name}~dropped-*"):
        shutil.rmtree(left, ignore_errors=True)
    store = _trusted(where)
    if store is None or store.identity != identity:
        return 0
    return _remove(where)


def sweep_host(
    host_dir: str | os.PathLike[str], keep: Collection[ShardIdentity], fence: Fence, generation: int = 0
) -> list[str]:
    """Remove every store of a host that is not to be kept, and what was left half-deleted or half-restored.

    A store that a writer newer than `fence` has written stays, and so does one that cannot be asked who it is at the place
    of one to be kept.

    Returns:
        The names of the directories that were removed.
    """
    root = Path(os.path.abspath(host_dir))
    kept = {shard_path(root, identity.shard, generation): identity for identity in keep}
    removed = []
    for where in sorted(root.iterdir()) if root.is_dir() else ():
        name, _, rest = where.name.partition("~")
        if not _SHARD.fullmatch(name) or not where.is_dir():
            continue
        if rest:
            shutil.rmtree(where, ignore_errors=True)
        elif _stays(where, kept, fence):
            continue
        else:
            _remove(where)
        removed.append(where.name)
    return removed


def _stays(where: Path, kept: Mapping[Path, ShardIdentity], fence: Fence) -> bool:
    store = _trusted(where)
    if store is None:
        return where in kept
    if kept.get(where) == store.identity:
        return True
    with store.begin(write=False) as txn:
        stored = read_fence(store, txn)
    return stored is not None and stored > fence


def _trusted(where: Path) -> ShardStore | None:
    """The store at a path, None if there is none or it may be torn: LMDB may fall over a file that lost pages."""
    if stamped_boot(where) != current_boot_id():
        return None
    try:
        return ShardStore.open(where)
    except AnabranchError:
        return None


def _remove(where: Path) -> int:
    ShardStore.forget(where)
    gone = where.with_name(f"{where.name}~dropped-{secrets.token_hex(6)}")
    try:
        where.rename(gone)
        crash.point(RENAMED)
        freed = sum(file.stat().st_blocks * 512 for file in gone.iterdir())
        shutil.rmtree(gone, ignore_errors=True)
    except FileNotFoundError:
        # Another has removed it meanwhile.
        return 0
    except OSError as error:
        raise translate_os(error, where) from error
    return freed
