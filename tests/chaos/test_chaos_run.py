"""One short round, as `make chaos` plays many."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from chaos.__main__ import _actions
from chaos.actions import ACTIONS
from chaos.run import Options, play


def test_a_round(tmp_path: Path) -> None:
    said: list[str] = []
    options = Options(seed=26, rounds=1, actions=["driver", "all"], harms=3, cluster=0, directory=tmp_path)
    counts = play(options, said.append, said.append)
    assert not counts["failed"], "\n".join(said)
    assert counts["kills"] >= 2
    assert counts["restarts"] >= 1
    assert counts["steps"] > 3
    assert (counts["lost"], counts["doubled"]) == (0, 0)


def test_actions_are_chosen_by_name() -> None:
    assert _actions("worker,all") == ["worker", "all"]
    with pytest.raises(argparse.ArgumentTypeError, match="no action is called sleep"):
        _actions("worker,sleep")
    assert all(action.weight > 0 for action in ACTIONS.values())
