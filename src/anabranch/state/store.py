"""One shard on disk: an LMDB environment that knows who it is.

A shard is never made by accident: only `create` makes one, and `open` refuses a missing, half-made or
foreign one.

Commits are not synced.  A process that dies loses nothing (the pages are the kernel's); a power loss may lose
or tear them, and then checkpoints and replay bring the state back.  So that recovery can tell, a stamp
file beside the data names the boot of the host in which the shard was written, and the transaction at which
it was last synced.  It is a file of its own because a torn LMDB must not be asked whether it is torn.

The memory map starts small and grows by itself, ahead of need where possible.  Growing is a private matter of
each process; the others see MapResizedError when they next begin, and adopt the size.

Must not know: steps, regions, tables.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import lmdb

from anabranch.errors import EngineError, ShardMismatch
from anabranch.model.ids import ShardId
from anabranch.state.boot import current_boot_id
from anabranch.state.environments import OpenEnvironments
from anabranch.state.faults import MapFull, translate, translate_os
from anabranch.state.identity import ShardIdentity

MAP_SIZE = 64 << 20
_QUADRUPLE_BELOW = 4 << 30
MAX_TABLES = 512
MAX_READERS = 512
META = b"_meta"
UNDO = b"_undo"
_IDENTITY = b"identity"


def shard_path(host_dir: str | os.PathLike[str], shard: ShardId) -> Path:
    """Where a host keeps a shard."""
    return Path(host_dir) / f"shard-{shard:05d}"


class ShardStore:
    """A shard's open environment; get one from `create` or `open`, never from the constructor.

    One object per shard and process: LMDB forbids opening an environment twice in a process, and Spark
    reuses its Python processes, so stores are cached (see `environments`).
    """

    def __init__(self, path: Path, env: Any, identity: ShardIdentity) -> None:
        self.path = path
        self.env = env
        self.identity = identity
        self._page = int(env.stat()["psize"])
        self.writing = False
        """True while this process has a write transaction here; then it is not evicted from the cache."""

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], identity: ShardIdentity, *, map_size: int = MAP_SIZE
    ) -> ShardStore:
        """Make an empty shard, or accept one that is there, equal and still empty.

        Raises:
            ShardMismatch: something else is there already.
            StorageFullError: no room.
        """
        where = Path(os.path.abspath(path))
        where.mkdir(parents=True, exist_ok=True)
        _OPEN.forget(str(where))
        env = _environment(where, map_size)
        try:
            with env.begin(write=True) as txn:
                meta = env.open_db(META, txn=txn)
                env.open_db(UNDO, txn=txn)
                found = txn.get(_IDENTITY, db=meta)
                if found is None:
                    txn.put(_IDENTITY, identity.encode(), db=meta)
                else:
                    _check(where, identity, ShardIdentity.decode(found))
                    if txn.stat(meta)["entries"] > 1 or txn.stat()["entries"] > 2:
                        raise ShardMismatch(
                            f"shard {where}: asked to create it, but it already holds state; "
                            "open it, or remove the directory if the state is not needed"
                        )
        except lmdb.Error as error:
            env.close()
            raise translate(error, where) from error
        except BaseException:
            env.close()
            raise
        store = cls(where, env, identity)
        store.stamp(current_boot_id())
        _OPEN.remember(str(where), store)
        return store

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        expected: ShardIdentity | None = None,
        *,
        map_size: int = MAP_SIZE,
    ) -> ShardStore:
        """Open a shard that is there, and is the one expected (None: whoever it is).

        Raises:
            ShardMismatch: it is missing, half-made or another one.
        """
        # Not a Path: taking one apart costs more than all else that opening a cached shard does.
        name = os.path.abspath(path)
        cached = _OPEN.find(name)
        if cached is None:
            where = Path(name)
            if not (where / "data.mdb").exists():
                raise ShardMismatch(
                    f"shard {where}: expected {expected or 'a shard'}, found none there; "
                    "the task is on a wrong host, or the state directory was removed"
                )
            env = _environment(where, max(map_size, 2 * (where / "data.mdb").stat().st_size))
            try:
                cached = cls(where, env, _read_identity(where, env))
            except BaseException:
                env.close()
                raise
            _OPEN.remember(name, cached)
        if expected is not None:
            _check(cached.path, expected, cached.identity)
        return cached

    # --- transactions

    def begin(self, *, write: bool) -> Any:
        """An LMDB transaction; adopts a map that another process has grown, and grows ahead of need.

        A write transaction waits for another process's to end; a process that was killed releases it.
        """
        if write:
            self._grow_ahead()
        for _ in range(16):
            try:
                return self.env.begin(write=write)
            except lmdb.MapResizedError:
                self.env.set_mapsize(0)
            except lmdb.PanicError as error:
                # A failed write of LMDB's own root: this handle is dead, the file is as before it.
                self.close()
                raise translate(error, self.path) from error
            except lmdb.Error as error:
                raise translate(error, self.path) from error
        raise EngineError(f"shard {self.path}: other processes keep changing the size of its map")

    def failed(self, error: lmdb.Error) -> Exception:
        """Our error for one of LMDB's, after the transaction was aborted; a full map is grown here."""
        if isinstance(error, lmdb.MapFullError):
            size = self.grow()
            return MapFull(f"shard {self.path}: its map was full and is now {size:,} bytes")
        return translate(error, self.path)

    def grow(self) -> int:
        """Enlarge the map; no transaction of this process may be open here.  Returns the new size."""
        size = int(self.env.info()["map_size"])
        size *= 4 if size < _QUADRUPLE_BELOW else 2
        self.env.set_mapsize(size)
        return size

    def _grow_ahead(self) -> None:
        # Copy-on-write wants free pages for all that a step touches, so half-full is when growing is due:
        # a full map in the middle of a step costs the step's work.
        info = self.env.info()
        if info["last_pgno"] * self._page * 2 > info["map_size"]:
            self.grow()

    # --- durability

    def sync(self) -> None:
        """Make all commits durable: for an orderly stop."""
        try:
            self.env.sync(True)
        except lmdb.Error as error:
            raise translate(error, self.path) from error

    def stamp(self, boot_id: str) -> None:
        """Say that from now on the shard is written, unsynced, in this boot of the host."""
        self._write_stamp(boot_id, None)

    def stamp_clean(self, boot_id: str) -> None:
        """Sync, and say so: until the next commit the shard can be trusted in any boot."""
        self.sync()
        self._write_stamp(boot_id, int(self.env.info()["last_txnid"]))

    def boot_id(self) -> str | None:
        """The boot in which the shard was last stamped; None if it never was."""
        return self._read_stamp()[0]

    def trusted(self, boot_id: str) -> bool:
        """Whether nothing committed can be missing: written in this boot, or synced since the last commit."""
        stamped, synced = self._read_stamp()
        return stamped == boot_id or synced == int(self.env.info()["last_txnid"])

    def _read_stamp(self) -> tuple[str | None, int | None]:
        try:
            found = json.loads((self.path / "stamp.json").read_text())
            return str(found["boot"]), found["synced"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            # A torn stamp is that of a host that lost power while stamping: nothing to trust.
            return None, None

    def _write_stamp(self, boot_id: str, synced: int | None) -> None:
        temporary = self.path / f"stamp.{os.getpid()}.{threading.get_ident()}"
        try:
            with temporary.open("w") as file:
                json.dump({"boot": boot_id, "synced": synced}, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path / "stamp.json")
            directory = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise translate_os(error, self.path) from error

    def close(self) -> None:
        """Close the environment and forget it; the next `open` opens it anew."""
        _OPEN.forget(str(self.path))


def _environment(path: Path, map_size: int) -> Any:
    try:
        env = lmdb.open(
            str(path),
            map_size=map_size,
            subdir=True,
            sync=False,
            metasync=False,
            readahead=False,
            # Pages are copied whole before they are changed; zeroing them first is work for nothing.
            meminit=False,
            writemap=False,
            lock=True,
            max_dbs=MAX_TABLES,
            max_readers=MAX_READERS,
        )
        # A reader that was killed pins the pages it saw until someone looks.
        env.reader_check()
    except lmdb.Error as error:
        raise translate(error, path) from error
    return env


def _read_identity(path: Path, env: Any) -> ShardIdentity:
    found = None
    try:
        with env.begin() as txn:
            found = txn.get(_IDENTITY, db=env.open_db(META, txn=txn, create=False))
    except lmdb.NotFoundError:
        pass
    except lmdb.Error as error:
        raise translate(error, path) from error
    if found is None:
        raise ShardMismatch(
            f"shard {path}: it has no identity, so its creation was cut short; create it again"
        )
    return ShardIdentity.decode(found)


def _check(path: Path, expected: ShardIdentity, found: ShardIdentity) -> None:
    if expected != found:
        raise ShardMismatch(f"shard {path} is another one: {expected.differences(found)}")


_OPEN: OpenEnvironments[ShardStore] = OpenEnvironments()
