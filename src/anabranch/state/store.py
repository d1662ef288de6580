"""One shard on disk: an LMDB environment that knows who it is.

A shard is never made by accident: only `create` makes one, and `open` refuses a missing, half-made or
foreign one.

Commits are not synced.  A process that dies loses nothing (the pages are the kernel's); a power loss may lose
or tear them, and then checkpoints and replay bring the state back.  So that recovery can tell, a stamp
file beside the data names the boot of the host in which the shard was written, and the transaction at which
it was last synced.  It is a file of its own because a torn LMDB must not be asked whether it is torn.

The memory map, and with it the file (see `mapping`), starts small, because a job has hundreds of shards, and grows
by itself, ahead of need where possible: by what the last transaction took from the end of the file, by what a
transaction that found it full was about to write, by keys that are to be loaded, or, while the shard is small, by the keys
that a stage asks for.
Growing needs the process to have no transaction open, so a map that is full in the middle of a step costs the step's
work.  LMDB never overwrites a page that the last commit or a reader refers to, so a shard that steps change all over
takes about three times its data; beyond that the file is larger than what was ever in use by a third or so (a job of
3 million keys took 885 MB of disk, and 676 without growing ahead).  Other processes see MapResizedError when they
next begin, and adopt the size.

Must not know: steps, regions, tables.
"""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import lmdb

from anabranch.errors import EngineError, ShardMismatch, StorageFullError
from anabranch.model.ids import ShardId
from anabranch.state.boot import current_boot_id
from anabranch.state.environments import OpenEnvironments
from anabranch.state.faults import MapFull, translate, translate_os
from anabranch.state.identity import ShardIdentity
from anabranch.state.mapping import open_environment, remap

MAP_SIZE = 256 << 10
_LEAST_ROOM = 32
_LEAST_GROWTH = 64
"""Pages: an empty shard's step fits into the one, and the other is not worth growing for twice."""
_MOST_AHEAD = 4096
"""Pages by which a shard grows for no other reason than its size: what a step pays for must not follow from that."""
_KEY_BYTES = 200
"""What a key of a stage is taken to need in a young shard: three times a short key, a short value and an old one."""
_LOADED_BYTES = 40
"""What a key that is loaded needs besides itself and its value: LMDB's 10 bytes, and a place among the marks."""
META = b"_meta"
UNDO = b"_undo"
_IDENTITY = b"identity"


def shard_path(host_dir: str | os.PathLike[str], shard: ShardId, generation: int = 0) -> Path:
    """Where a host keeps a shard.  `generation` counts how often the number of shards has changed: the shards of one must
    not be in the way of those of the next, into which they are split or merged."""
    return Path(host_dir) / (f"shard-{shard:05d}.{generation}" if generation else f"shard-{shard:05d}")


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
        self._used = self._pages()[0]
        self._taken = 0
        """Pages that recent transactions took from the end of the file; halved by each that took none."""
        self._expected = 0
        """Pages that a transaction wanted that found the map full; 0 after the next has begun."""
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
        _OPEN.forget(str(where))
        env = _environment(where, map_size, create=True)
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
            store = cls(where, env, identity)
            store.stamp(current_boot_id())
            if not _OPEN.remember(str(where), store):
                raise _removed(where)
        except lmdb.Error as error:
            env.close()
            raise translate(error, where) from error
        except BaseException:
            env.close()
            raise
        return store

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        expected: ShardIdentity | None = None,
    ) -> ShardStore:
        """Open a shard that is there, and is the one expected (None: whoever it is).

        Raises:
            ShardMismatch: it is missing, half-made or another one, or is being removed.
        """
        # Not a Path: taking one apart costs more than all else that opening a cached shard does.
        name = os.path.abspath(path)
        cached = _OPEN.find(name)
        if cached is None:
            where = Path(name)
            try:
                data = (where / "data.mdb").stat()
            except FileNotFoundError:
                raise ShardMismatch(
                    f"shard {where}: expected {expected or 'a shard'}, found none there; "
                    "the task is on a wrong host, or the state directory was removed"
                ) from None
            if not data.st_size:
                raise ShardMismatch(
                    f"shard {where}: it is empty, so its creation was cut short; create it again"
                )
            env = _environment(where, 0, create=False)
            try:
                cached = cls(where, env, _read_identity(where, env))
                if not _OPEN.remember(name, cached, (data.st_dev, data.st_ino)):
                    raise _removed(where)
            except BaseException:
                env.close()
                raise
        if expected is not None:
            _check(cached.path, expected, cached.identity)
        return cached

    @classmethod
    def ensure(cls, path: str | os.PathLike[str], identity: ShardIdentity) -> ShardStore:
        """Open a shard with whatever it holds, or make it if it is missing or half-made.

        Raises:
            ShardMismatch: another one is there.
            StorageFullError: no room.
        """
        try:
            return cls.open(path, identity)
        except ShardMismatch:
            try:
                return cls.create(path, identity)
            except ShardMismatch:
                # Another process has made it, and filled it, meanwhile.
                return cls.open(path, identity)

    @staticmethod
    def forget(path: str | os.PathLike[str]) -> None:
        """Close what this process has open at a path, without looking at the files there."""
        _OPEN.forget(os.path.abspath(path))

    @staticmethod
    def forget_gone() -> None:
        """Close what this process has open of shards that were dropped; costs nothing but every few seconds."""
        _OPEN.forget_gone()

    # --- transactions

    def empty(self, txn: Any) -> None:
        """Leave nothing but the identity, and tables without keys, in a write transaction.

        The file keeps its size, and what is put next finds room in it.
        """
        meta = self.env.open_db(META, txn=txn)
        for name in list(txn.cursor().iternext(values=False)):
            if name != META:
                txn.drop(self.env.open_db(name, txn=txn), delete=False)
        for key in list(txn.cursor(db=meta).iternext(values=False)):
            if key != _IDENTITY:
                txn.delete(key, db=meta)

    def begin(self, *, write: bool) -> Any:
        """An LMDB transaction; adopts a map that another process has grown, and grows ahead of need.

        A write transaction waits for another process's to end; a process that was killed releases it.
        """
        if write:
            self._make_room()
        for _ in range(16):
            try:
                return self.env.begin(write=write)
            except lmdb.MapResizedError:
                self._remap(0)
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
            try:
                size = self.grow()
            except StorageFullError as full:
                return full
            return MapFull(f"shard {self.path}: its map was full and is now {size:,} bytes")
        return translate(error, self.path)

    def expect(self, rows: int, size: int) -> None:
        """Say what the next write transaction will put besides what had room: one like it was aborted.

        A map that is full belongs to one shard of many that a task writes alike; told what awaits them, they
        all grow before the task runs again, and it does so once instead of once for each.

        Args:
            rows: How many keys.
            size: The bytes of keys, values and old values.
        """
        used, room = self._pages()
        # Each row may lie in a page of its own, which is copied (about half of the file is in use, the rest is
        # free); what is new may fill its pages by half; and once more for the undo record.
        pages = min(rows, used // 2) + 3 * size // self._page + _LEAST_ROOM
        # More than the room there was, since others of its kind found that too small; but not where it is ample: a task that
        # is repeated for the sake of one shard would let all the others grow, each time by half.
        self._expected = max(self._expected + pages, min(room + room // 2, 2 * pages))

    def foresee(self, keys: int) -> None:
        """Say how many keys the next write transaction will read, and perhaps put.

        Only a shard that is small for so many keys makes room for them: it is being filled, or changed all over for the
        first times, and has few free pages.  What an earlier process learnt of it does not help: tasks change places.
        Elsewhere such room would be for nothing.  Measured with 50,000 keys that all change in every step: steps 0 to 2
        of a new job run once each, and not twice, and the files end at the same size.
        """
        used, _ = self._pages()
        pages = keys * _KEY_BYTES // self._page
        if used < pages:
            self._expected = max(self._expected, pages + used // 2 + _LEAST_ROOM)

    def reserve(self, keys: int, size: int) -> None:
        """Say that the next write transaction will load so many keys, besides its usual.

        A shard into which keys are loaded has no free pages yet: what its usual work changes of the keys that are there
        is copied to the end of the file.

        Args:
            keys: How many.
            size: The bytes of keys and values.
        """
        used, _ = self._pages()
        self._expected += (size + keys * _LOADED_BYTES) * 5 // 4 // self._page + used + _LEAST_ROOM

    def grow(self) -> int:
        """At least double the room in the map; no transaction of this process may be open here.

        Returns:
            The new size.

        Raises:
            StorageFullError: no room; the map is as it was.
        """
        used, room = self._pages()
        self._remap(used + max(2 * room, _ahead(used)))
        return int(self.env.info()["map_size"])

    def _make_room(self) -> None:
        used, room = self._pages()
        taken, expected = used - self._used, self._expected
        self._used, self._taken, self._expected = used, max(taken, self._taken // 2), 0
        if room >= max(self._taken, expected, _LEAST_ROOM):
            return
        # No room is no error yet: the transaction may find free pages within the file.
        with suppress(StorageFullError):
            self._remap(used + max(2 * self._taken, expected, _ahead(used)))

    def _pages(self) -> tuple[int, int]:
        """Pages that were ever in use, and pages of the map after them."""
        info = self.env.info()
        used = int(info["last_pgno"]) + 1
        return used, int(info["map_size"]) // self._page - used

    def _remap(self, pages: int) -> None:
        try:
            remap(self.env, self.path, pages * self._page)
        except lmdb.Error as error:
            self.close()
            raise translate(error, self.path) from error
        except OSError as error:
            raise translate_os(error, self.path) from error

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


def _ahead(used: int) -> int:
    return min(max(used // 4, _LEAST_GROWTH), _MOST_AHEAD)


def _environment(path: Path, map_size: int, *, create: bool) -> Any:
    try:
        if create:
            path.mkdir(parents=True, exist_ok=True)
        return open_environment(path, map_size, create=create)
    except lmdb.Error as error:
        raise translate(error, path) from error
    except OSError as error:
        raise translate_os(error, path) from error


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


def _removed(path: Path) -> ShardMismatch:
    return ShardMismatch(f"shard {path}: another process has removed it while it was opened")


def _check(path: Path, expected: ShardIdentity, found: ShardIdentity) -> None:
    if expected != found:
        raise ShardMismatch(f"shard {path} is another one: {expected.differences(found)}")


_OPEN: OpenEnvironments[ShardStore] = OpenEnvironments()
