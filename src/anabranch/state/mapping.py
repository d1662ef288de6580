"""A shard's data file and the memory map over it: LMDB never writes where the file has a hole.

LMDB runs with WRITEMAP: it changes pages in the map itself.  Without it every page that a step touches is copied into
memory of the process until the commit writes it: 100,000 keys at random among 10 million then cost 700 MB of
memory, and a commit took 361 ms that takes 14 with it.  The price of WRITEMAP is that the kernel answers a write
into a hole of the file, when the disk is full, by killing the process (SIGBUS).  So there are no holes:

    MAP-1  Every byte that any process has mapped is allocated on disk before it is mapped.
    MAP-2  The file never becomes shorter than what any process has mapped.

LMDB itself holds neither: whenever it maps, it sets the file's length to the size of its map, which makes a hole at
the end or cuts off what another process has just added.  So every mapping, when opening and when growing, is done
here: under an exclusive `flock` of the data file, over the whole of the file, after `fallocate`.  No room is then an
errno in a place where nothing is open, and what was allocated in vain is given back.  A process that is killed in
the middle leaves a file that is longer than the maps, and the lock free.

To ext4 and xfs, what was allocated and never written is no data yet: a worker of the kernel makes it data when it has
reached the disk, page by page where pages were written here and there, as those of an LMDB are.  For the shards that
arrive in a migration that was up to 290 ms of a processor in one go, the more the larger the shards, in the middle of a
step.  So zeros are written behind `fallocate`, and reach the disk in one piece.  On ext4, where pages of a new file are
changed at random and synced, the first change of a page takes 9 µs and its way to the disk 16; with zeros 3 and 6, and 3 for
the zeros.  They are written page by page: what is written in one call may become one folio of the page cache, and with a
megabyte at a time 100 changed pages of 32 MB were 32 MB to be written.

`fallocate` is the system call and not `posix_fallocate`, whose stand-in for file systems without it writes zeros
while another process may write to the same page.  Where it is missing, or promises nothing because every
write goes to new blocks (btrfs, ZFS), LMDB runs without WRITEMAP: slower, and a full disk is an error of its commit.

The lock file is mapped and written as well, by readers too, so it is allocated before LMDB first sees it.

Must not know: what a shard is.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

MAX_TABLES = 512
MAX_READERS = 512
_LOCK_BYTES = 64 * (MAX_READERS + 8)
"""At least what LMDB makes of it: a cache line for each reader, and a few in front."""
_IN_PLACE = {"ext4", "xfs", "tmpfs", "overlay"}
"""File systems that rewrite an allocated block in place; an overlay is as good as what lies under it, which
cannot be seen from inside a container and is mostly one of the others."""
_ZEROS = bytes(mmap.PAGESIZE)
_LIBC = ctypes.CDLL(None, use_errno=True)


def open_environment(path: Path, map_size: int, *, create: bool) -> Any:
    """Open the environment in a directory, with all of its file mapped and at least `map_size`.

    `create` makes the files where there are none, and where making them was cut short before.

    Raises:
        OSError: no room, or no files.
        lmdb.Error: LMDB refused.
    """
    with _locked(path, create=create) as data:
        _allocate_lock_file(path)
        if create and os.fstat(data).st_size < 2 * mmap.PAGESIZE:
            # LMDB takes a file for new only while it is empty, so it writes its first pages before we allocate.
            os.ftruncate(data, 0)
            _open(path, map_size, writemap=False).close()
        size = _whole(data, map_size)
        env = _open(path, size, writemap=_updates_in_place(path) and _allocate(data, size))
    # A reader that was killed pins the pages it saw until someone looks.
    env.reader_check()
    return env


def remap(env: Any, path: Path, map_size: int = 0) -> None:
    """Map all of the file and at least `map_size`; no transaction of this process may be open.

    Raises:
        OSError: no room; file and map are as before.
        lmdb.Error: LMDB refused; the environment must be closed.
    """
    with _locked(path) as data:
        size = _whole(data, map_size)
        if env.flags()["writemap"]:
            _allocate(data, size)
        env.set_mapsize(size)


def _open(path: Path, map_size: int, *, writemap: bool) -> Any:
    return lmdb.open(
        str(path),
        map_size=map_size,
        subdir=True,
        # The directory is there, or another process has removed it since, and LMDB would make an empty shard in its place.
        create=False,
        sync=False,
        metasync=False,
        readahead=False,
        # Pages are copied whole before they are changed; zeroing them first is work for nothing.
        meminit=False,
        writemap=writemap,
        lock=True,
        max_dbs=MAX_TABLES,
        max_readers=MAX_READERS,
    )


@contextmanager
def _locked(path: Path, *, create: bool = False) -> Iterator[int]:
    file = os.open(path / "data.mdb", os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)


def _whole(file: int, least: int) -> int:
    size = max(os.fstat(file).st_size, least)
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _allocate(file: int, size: int) -> bool:
    """Give the first `size` bytes of a file blocks of their own; False if the file system cannot.

    What that makes the file longer by is filled with zeros; nobody has mapped it, since mapping needs the lock.
    """
    before = os.fstat(file).st_size
    try:
        while _LIBC.fallocate(file, 0, ctypes.c_long(0), ctypes.c_long(size)):
            code = ctypes.get_errno()
            if code == errno.EOPNOTSUPP:
                # Nothing was added.  LMDB makes the file longer without asking for the lock then, so nothing may be cut off.
                return False
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
        for place in range(-(-before // len(_ZEROS)) * len(_ZEROS), size, len(_ZEROS)):
            os.pwrite(file, _ZEROS, place)
    except OSError:
        # Some of it may have been added before the room ran out.
        os.ftruncate(file, before)
        raise
    return True


def _allocate_lock_file(path: Path) -> None:
    # Only while it lacks something: closing it would release the locks of an environment that this process
    # has open there, and LMDB says only afterwards that there is one.
    file = path / "lock.mdb"
    if file.exists() and file.stat().st_blocks * 512 >= _LOCK_BYTES:
        return
    lock = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, 0o644)
    try:
        _allocate(lock, _LOCK_BYTES)
    finally:
        os.close(lock)


def _updates_in_place(path: Path) -> bool:
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text()
    except OSError:
        return False
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0] in _IN_PLACE
    return False
