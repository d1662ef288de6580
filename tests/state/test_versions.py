"""Versions in storage: committed once, trimmed without losing a file that is needed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from anabranch.errors import CorruptError, Fenced
from anabranch.model.ids import Step
from anabranch.state.manifest import Manifest, Piece
from anabranch.state.versions import Usage, Versions
from anabranch.storage.local import LocalStorage


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "checkpoints")


@pytest.fixture
def versions(storage: LocalStorage) -> Versions:
    return Versions(storage)


def piece(storage: LocalStorage, version: int, name: str, size: int = 10) -> Piece:
    path = f"{version:09d}/{name}.parquet"
    data = b"x" * size
    storage.create(path, data)
    return Piece(0, path, 1, size, hashlib.blake2b(data).hexdigest(), "delta", version, 0, 1)


def manifest(version: int, *pieces: Piece) -> Manifest:
    return Manifest(version, Step(version), {}, {}, 1, "f", "0", 0.0, pieces)


def files(storage: LocalStorage) -> set[str]:
    return {str(path.relative_to(storage.local)) for path in storage.local.rglob("*") if path.is_file()}


def test_nothing_yet(versions: Versions) -> None:
    assert versions.list() == []
    assert versions.newest_usable() == (None, [])
    assert versions.trim() == 0
    assert versions.usage() == []


def test_commit_and_read_back(versions: Versions, storage: LocalStorage) -> None:
    one = manifest(1, piece(storage, 1, "a"))
    versions.commit(one)
    piece(storage, 2, "under-way")
    assert versions.list() == [1]
    assert versions.manifest(1) == one
    assert versions.newest_usable() == (one, [])
    with pytest.raises(Fenced, match="another coordinator"):
        versions.commit(one)
    with pytest.raises(CorruptError, match="checkpoint 2 is missing"):
        versions.manifest(2)


def test_trimming_keeps_what_kept_versions_name(versions: Versions, storage: LocalStorage) -> None:
    base, gone = piece(storage, 1, "base", 100), piece(storage, 1, "gone", 30)
    second, third = piece(storage, 2, "delta", 20), piece(storage, 3, "delta", 5)
    given_up, under_way = piece(storage, 3, "given-up", 7), piece(storage, 4, "under-way")
    versions.commit(manifest(1, base, gone))
    versions.commit(manifest(2, base, second))
    versions.commit(manifest(3, base, second, third))
    assert versions.usage() == [Usage(1, 130, 130), Usage(2, 20, 120), Usage(3, 5, 125)]
    assert versions.trim(2) == gone.size + given_up.size
    assert versions.list() == [2, 3]
    assert files(storage) == {
        base.path,
        second.path,
        third.path,
        under_way.path,
        "000000002/manifest",
        "000000003/manifest",
    }
    assert versions.trim(2) == 0
    assert versions.newest_usable() == (manifest(3, base, second, third), [])


def test_trimming_that_was_cut_short_after_a_manifest_is_finished(
    versions: Versions, storage: LocalStorage
) -> None:
    old, new = piece(storage, 1, "old"), piece(storage, 2, "new")
    versions.commit(manifest(1, old))
    versions.commit(manifest(2, new))
    storage.delete("000000001/manifest")
    assert versions.trim(1) == old.size
    assert files(storage) == {new.path, "000000002/manifest"}
    assert storage.list() == ["000000002/"]


def test_the_newest_usable_version_and_why_not_those_above(versions: Versions, storage: LocalStorage) -> None:
    whole = manifest(1, piece(storage, 1, "a"))
    short = manifest(2, piece(storage, 2, "b"))
    for one in (whole, short, manifest(3)):
        versions.commit(one)
    (storage.local / short.pieces[0].path).write_bytes(b"x")
    (storage.local / "000000003/manifest").write_bytes(b"nonsense")
    found, problems = versions.newest_usable()
    assert found == whole
    assert len(problems) == 2
    assert "000000003/manifest" in problems[0]
    assert "has 1 bytes instead of 10" in problems[1]
    assert versions.newest_usable(below=1) == (None, [])


def test_damaged_and_unusable_versions_do_not_count_among_the_kept(
    versions: Versions, storage: LocalStorage
) -> None:
    made = [manifest(v, piece(storage, v, "a")) for v in range(1, 5)]
    for one in made:
        versions.commit(one)
    (storage.local / "000000003/manifest").write_bytes(b"nonsense")
    versions.trim(2, unusable=[2])
    assert versions.list() == [1, 4]


def test_a_trimming_that_finds_no_readable_version_touches_nothing(
    versions: Versions, storage: LocalStorage
) -> None:
    versions.commit(manifest(1, piece(storage, 1, "a")))
    (storage.local / "000000001/manifest").write_bytes(b"nonsense")
    before = files(storage)
    assert versions.trim() == 0
    assert files(storage) == before


def test_a_manifest_in_a_wrong_place_is_refused(versions: Versions, storage: LocalStorage) -> None:
    versions.commit(manifest(1))
    storage.create("000000007/manifest", storage.read("000000001/manifest"))
    with pytest.raises(CorruptError, match="manifest of checkpoint 1"):
        versions.manifest(7)
