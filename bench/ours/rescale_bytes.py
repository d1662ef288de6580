"""How many bytes of state two layouts require to move between hosts: counted in the shards themselves.

The engine's own account of what it moved is compared with this, so none of it is asked: the shards of a job that has stopped
are read key by key, and every key whose hash has another host in the second layout counts with its address and its
value.
"""

from __future__ import annotations

from collections.abc import Mapping

import lmdb
import numpy as np

from anabranch.model.hashing import shard_of
from anabranch.model.ids import LayoutVersion, ShardId
from anabranch.model.layout import Layout
from anabranch.runtime.jobdir import JobDir
from anabranch.state.store import META, UNDO, shard_path

Hashes = np.ndarray[tuple[int], np.dtype[np.uint64]]
Sizes = np.ndarray[tuple[int], np.dtype[np.int64]]


def minimum_bytes(hashes: Hashes, sizes: Sizes, before: Layout, after: Layout) -> int:
    """Bytes of the keys that have another host in the second layout; shards may have split or merged in between."""
    return int(sizes[_hosts(before, hashes) != _hosts(after, hashes)].sum())


def _hosts(layout: Layout, hashes: Hashes) -> np.ndarray[tuple[int], np.dtype[np.str_]]:
    places = np.array([layout.workers[owner] for owner in layout.shards])
    return places[shard_of(hashes, len(places))]


def layouts_of(jobdir: JobDir) -> Mapping[LayoutVersion, Layout]:
    """Every layout that the job has had between migrations, by version."""
    found = [Layout.from_json(one["layout"]) for one in jobdir.layouts()]
    return {layout.version: layout for layout in found}


def keys_of(jobdir: JobDir, layout: Layout) -> tuple[Hashes, Sizes]:
    """The hash and the size of every key in the shards of a job that is not running and in which nothing is under way."""
    hashes: list[bytes] = []
    sizes: list[int] = []
    for shard, owner in enumerate(layout.shards):
        path = shard_path(jobdir.state / layout.workers[owner], ShardId(shard))
        environment = lmdb.open(str(path), readonly=True, lock=False, max_dbs=256)
        try:
            with environment.begin() as txn:
                names = [bytes(name) for name, _ in txn.cursor() if bytes(name) not in (META, UNDO)]
                for name in names:
                    for key, value in txn.cursor(environment.open_db(name, txn=txn, create=False)):
                        hashes.append(key[:8])
                        sizes.append(len(key) + len(value))
        finally:
            environment.close()
    found = np.frombuffer(b"".join(hashes), dtype=">u8").astype(np.uint64)
    return found, np.array(sizes, dtype=np.int64)
