"""What chaos counts of rescalings, from what a job says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from anabranch.storage import open_storage, record
from chaos.job import Failed
from chaos.rescales import Rescales


def layout(job: Path, version: int, workers: int, **why: Any) -> None:
    value = {"layout": {"workers": ["host-0"] * workers}, "why": why}
    record.create(open_storage(job), f"layouts/{version:09d}.json", value)


def told(job: Path, number: int, state: str, process: int = 1, **more: Any) -> None:
    migration = {
        "id": number,
        "began": 1000.0 + number,
        "state": state,
        "from": {"workers": 2},
        "to": {"workers": 3},
        "layout": None,
    }
    record.replace(open_storage(job), "status.json", {"process": process, "migration": migration | more})


def kinds(ended: list[tuple[str, str]]) -> list[str]:
    return [kind for kind, _ in ended]


def test_each_end_is_counted_once(tmp_path: Path) -> None:
    rescales = Rescales(tmp_path)
    assert rescales.look(1) == []
    layout(tmp_path, 0, 2, kind="first")
    layout(tmp_path, 1, 3, kind="rescale", number=1, cancelled=False)
    layout(tmp_path, 2, 2, kind="rescale", number=2, cancelled=True)
    told(tmp_path, 2, "cancelled")
    assert kinds(rescales.look(1)) == ["finished", "cancelled"]
    assert rescales.look(1) == []
    # The next driver has not said anything yet, and what its predecessor said is still there.
    assert rescales.look(2) == []
    told(tmp_path, 1, "failed", process=2, began=5000.0)
    assert kinds(rescales.look(2)) == ["given_up"]


def test_one_under_way_is_not_counted_and_stays_open(tmp_path: Path) -> None:
    rescales = Rescales(tmp_path)
    rescales.open = True
    told(tmp_path, 1, "moving")
    assert rescales.look(1) == []
    assert rescales.open
    layout(tmp_path, 1, 3, kind="rescale", number=1, cancelled=False)
    assert kinds(rescales.look(1)) == ["finished"]
    assert not rescales.open


@pytest.mark.parametrize("workers", [None, 2])
def test_what_is_said_to_be_done_must_be_a_layout(tmp_path: Path, workers: int | None) -> None:
    if workers is not None:
        layout(tmp_path, 4, workers, kind="restart")
    told(tmp_path, 1, "done", layout=4)
    with pytest.raises(Failed, match="is said to be done"):
        Rescales(tmp_path).look(1)
