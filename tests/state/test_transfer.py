"""Moving keys between stores inside steps, against a plain dictionary."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_helpers import identity
from transfer_helpers import TABLES, address, applied, content, owned, run, take

from anabranch.state.store import ShardStore
from anabranch.state.transfer import Arrival

HASHES = [0, 7, 1 << 62, 1 << 63, (1 << 63) + 1, (1 << 64) - 1]
KEYS = [b"a", b"b", b"L" * 503, b"M" * 900 + b"1", b"M" * 900 + b"2"]
NAMES = [t for many in TABLES.values() for t in many]
ROWS = st.dictionaries(
    st.tuples(st.sampled_from(NAMES), st.builds(address, st.sampled_from(HASHES), st.sampled_from(KEYS))),
    st.none() | st.binary(max_size=3),
    max_size=12,
)
STEPS = st.lists(ROWS, max_size=4)


@settings(max_examples=60, deadline=None)
@given(before=STEPS, moving=ROWS, vain=st.none() | ROWS, after=STEPS)
def test_a_whole_shard_moves_in_a_step(
    tmp_path_factory: pytest.TempPathFactory, before: list, moving: dict, vain: dict | None, after: list
) -> None:
    root = tmp_path_factory.mktemp("whole")
    ShardStore.create(root / "old", identity())
    state: dict = {}
    for n, rows in enumerate(before):
        run(owned(root / "old"), n, rows)
        state = applied(state, rows)
    n = len(before)
    if vain is not None:
        run(owned(root / "new", 1, arriving=Arrival(take(root / "old", n), True)), n, vain)
    cargos = take(root / "old", n, attempt=1)
    touched = run(owned(root / "new", 1, arriving=Arrival(cargos, True)), n, moving, attempt=1)
    assert [t.regions for t in touched] == [tuple(TABLES)]
    assert content(root / "old") == state
    state = applied(state, moving)
    assert content(root / "new") == state
    for k, rows in enumerate(after, n + 1):
        run(owned(root / "new", 1), k, rows)
        state = applied(state, rows)
    assert content(root / "new") == state
