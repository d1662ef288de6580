"""LMDB's errors in our words."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import lmdb
import pytest

from anabranch.errors import CorruptError, EngineError, StorageFullError
from anabranch.state.faults import MapFull, translate, translate_os, with_growth


def _error(code: int) -> lmdb.Error:
    error = lmdb.Error("mdb_txn_commit")
    error.code = code
    return error


def _free(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    real = os.statvfs("/")
    fields = list(real)
    fields[4] = blocks  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_codes_that_mean_a_full_disk(tmp_path: Path, code: int) -> None:
    found = translate(_error(code), tmp_path)
    assert isinstance(found, StorageFullError)
    assert str(tmp_path) in str(found)
    assert isinstance(translate_os(OSError(code, "full"), tmp_path), StorageFullError)


def test_an_io_error_is_a_full_disk_only_when_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = _error(errno.EIO)
    assert not isinstance(translate(error, tmp_path), StorageFullError)
    _free(monkeypatch, 3)
    assert isinstance(translate(error, tmp_path), StorageFullError)


def test_damage_and_the_rest_keep_the_path(tmp_path: Path) -> None:
    assert isinstance(translate(lmdb.CorruptedError("x"), tmp_path), CorruptError)
    for found in (translate(lmdb.BadValsizeError("x"), tmp_path), translate_os(OSError(13, "no"), tmp_path)):
        assert type(found) is EngineError
        assert str(tmp_path) in str(found)


def test_growth_is_tried_again_but_not_for_ever() -> None:
    calls: list[int] = []

    def sometimes() -> str:
        calls.append(1)
        if len(calls) < 3:
            raise MapFull("small")
        return "done"

    def never() -> None:
        raise MapFull("too small")

    assert with_growth(sometimes) == "done"
    assert len(calls) == 3
    with pytest.raises(EngineError, match="too small"):
        with_growth(never)
