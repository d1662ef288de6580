"""The contract of a versioned database, run over every implementation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shard_helpers import identity

from anabranch.errors import AnabranchError, EngineError, Fenced, ShardMismatch
from anabranch.model.ids import Step
from anabranch.state.database import Database, Version, VersionedDatabase
from anabranch.state.store import ShardStore

Reopen = Callable[[], VersionedDatabase]


def shard_database(directory: Path) -> Reopen:
    ShardStore.create(directory / "db", identity()).close()

    def reopen() -> VersionedDatabase:
        ShardStore.open(directory / "db").close()
        return Database(directory / "db", identity())

    return reopen


IMPLEMENTATIONS: dict[str, Callable[[Path], Reopen]] = {"shard": shard_database}


@pytest.fixture(params=sorted(IMPLEMENTATIONS))
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Reopen:
    """Opens the same database again, as after a restart of the process."""
    return IMPLEMENTATIONS[request.param](tmp_path)


def test_new_database_has_one_empty_version(reopen: Reopen) -> None:
    database = reopen()
    assert database.versions() == range(1)
    opened = database.open(Version(0))
    assert opened.get("t", b"k") is None
    assert opened.get_step() == 0


def test_commit_makes_the_next_version_and_keeps_the_old(reopen: Reopen) -> None:
    opened = reopen().open(Version(0))
    opened.put("t", b"k", b"one")
    opened.set_step(Step(7))
    assert opened.get("t", b"k") == b"one"
    opened.commit()
    assert reopen().versions() == range(2)
    newer = reopen().open(Version(1))
    assert (newer.get("t", b"k"), newer.get_step()) == (b"one", 7)


def test_opening_the_older_version_discards_the_newer(reopen: Reopen) -> None:
    for value in (b"one", b"two"):
        database = reopen()
        opened = database.open(Version(database.versions()[-1]))
        opened.put("t", b"k", value)
        opened.set_step(Step(int.from_bytes(value[:1], "big")))
        opened.commit()
    assert list(reopen().versions()) == [1, 2]
    older = reopen().open(Version(1))
    assert (older.get("t", b"k"), older.get_step()) == (b"one", ord("o"))
    assert list(reopen().versions()) == [1]
    with pytest.raises(AnabranchError):
        reopen().open(Version(2))


def test_opening_the_newer_version_discards_the_older(reopen: Reopen) -> None:
    reopen().open(Version(0)).commit()
    reopen().open(Version(1))
    assert list(reopen().versions()) == [1]


def test_closing_without_commit_retains_the_opened_version(reopen: Reopen) -> None:
    first = reopen().open(Version(0))
    first.put("t", b"k", b"kept")
    first.commit()
    second = reopen().open(Version(1))
    second.put("t", b"k", b"lost")
    second.close()
    third = reopen().open(Version(1))
    assert third.get("t", b"k") == b"kept"


def test_commit_without_a_put_makes_a_version(reopen: Reopen) -> None:
    reopen().open(Version(0)).commit()
    reopen().open(Version(1)).commit()
    assert list(reopen().versions()) == [1, 2]


def test_tables_are_apart_and_the_step_is_no_key(reopen: Reopen) -> None:
    opened = reopen().open(Version(0))
    opened.set_step(Step(3))
    opened.put("a", b"", b"A")
    opened.put("step", b"", b"S")
    opened.commit()
    again = reopen().open(Version(1))
    assert (again.get("a", b""), again.get("b", b""), again.get("step", b"")) == (b"A", None, b"S")
    assert again.get_step() == 3


@pytest.mark.parametrize("version", [1, 2, 99])
def test_a_version_that_is_not_there_is_refused_by_number(reopen: Reopen, version: int) -> None:
    with pytest.raises(ShardMismatch, match=f"version {version}"):
        reopen().open(Version(version))


def test_a_closed_database_is_not_used(reopen: Reopen) -> None:
    opened = reopen().open(Version(0))
    opened.commit()
    with pytest.raises(EngineError, match="closed"):
        opened.put("t", b"k", b"v")


def test_of_two_that_have_it_open_the_later_one_wins(reopen: Reopen) -> None:
    database = reopen()
    zombie = database.open(Version(0))
    zombie.put("t", b"k", b"zombie")
    living = database.open(Version(0))
    living.put("t", b"k", b"living")
    living.commit()
    with pytest.raises(Fenced):
        zombie.get("t", b"other")
    with pytest.raises(Fenced):
        zombie.commit()
    assert database.open(Version(1)).get("t", b"k") == b"living"


KEYS = st.sampled_from([b"", b"k", b"x" * 502, b"x" * 503, b"x" * 5000, b"x" * 5000 + b"y"])
PUTS = st.lists(st.tuples(st.sampled_from(["a", "b"]), KEYS, st.none() | st.binary(max_size=5)), max_size=5)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sessions=st.lists(st.tuples(st.booleans(), st.booleans(), PUTS), max_size=8))
@pytest.mark.parametrize("name", sorted(IMPLEMENTATIONS))
def test_against_a_dict_per_version(
    name: str, sessions: list, tmp_path_factory: pytest.TempPathFactory
) -> None:
    reopen = IMPLEMENTATIONS[name](tmp_path_factory.mktemp("contract"))
    oracle: dict[int, dict] = {0: {}}
    for newest, commits, puts in sessions:
        version = max(oracle) if newest else min(oracle)
        opened = reopen().open(Version(version))
        oracle = {version: oracle[version]}
        content = dict(oracle[version])
        for table, key, value in puts:
            opened.put(table, key, value)
            content[table, key] = value
        for table, key in content:
            assert opened.get(table, key) == content[table, key]
        if commits:
            opened.commit()
            oracle[version + 1] = content
        else:
            opened.close()
        assert list(reopen().versions()) == sorted(oracle)
