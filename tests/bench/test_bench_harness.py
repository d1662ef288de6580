"""The benchmark harness: bounds, the table, the result file, peers as subprocesses, the shared data."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("harness")
    for name in ("RESULTS", "PEERS", "LOGS"):
        monkeypatch.setattr(module, name, tmp_path / name.lower())
    monkeypatch.setattr(module, "environment", lambda peer: Path(sys.executable))
    (tmp_path / "peers").mkdir()
    return module


@pytest.mark.parametrize(
    ("bound", "ours", "theirs", "holds"),
    [
        ({"least": 4}, 8.0, 2.0, True),
        ({"least": 4}, 7.9, 2.0, False),
        ({"most": 0.4}, 40.0, 100.0, True),
        ({"most": 0.4}, 41.0, 100.0, False),
    ],
)
def test_a_bound_is_on_the_ratio_of_ours_to_theirs(
    harness: ModuleType, bound: dict[str, float], ours: float, theirs: float, holds: bool
) -> None:
    row = harness.compare("sum", ours, theirs, "rows/s", **bound)
    assert row.holds is holds
    assert row.ratio == ours / theirs


def test_a_comparison_without_a_bound_is_refused(harness: ModuleType) -> None:
    with pytest.raises(ValueError, match="'sum' needs exactly one"):
        harness.compare("sum", 1.0, 1.0, "rows/s")


def test_finish_writes_every_field_and_fails_when_a_bound_is_missed(
    harness: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        harness.compare("int keys", 12_000_000.0, 3_000_000.0, "rows/s", least=4),
        harness.compare("step", 60.0, 100.0, "ms", most=0.4),
    ]
    assert harness.finish("engine", rows) == 1
    assert harness.finish("engine", rows[:1]) == 0
    printed = capsys.readouterr().out
    assert "12,000,000" in printed
    assert "missed: step" in printed
    written = json.loads((harness.RESULTS / "engine.json").read_text())
    assert written == [
        {
            "name": "int keys",
            "ours": 12_000_000.0,
            "theirs": 3_000_000.0,
            "unit": "rows/s",
            "ratio": 4.0,
            "bound": ">= 4",
            "holds": True,
        }
    ]


def test_columns_of_the_table_line_up(harness: ModuleType) -> None:
    rows = [harness.compare(name, 1.0, 2.0, "ms", most=1) for name in ("a", "a longer name")]
    lines = harness.table(rows).splitlines()
    assert len({len(line) for line in lines}) == 1


def test_sides_take_turns_and_swap_who_goes_first(harness: ModuleType) -> None:
    order: list[str] = []

    def side(name: str, values: list[float]) -> float:
        order.append(name)
        return values.pop(0)

    ours, theirs = [5.0, 1.0, 3.0], [10.0, 30.0, 20.0]
    medians = harness.alternate(lambda: side("o", ours), lambda: side("t", theirs), 3)
    assert medians == (3.0, 20.0)
    assert "".join(order) == "ottoot"


def test_the_best_round_of_the_peer_can_count(harness: ModuleType) -> None:
    theirs = [10.0, 30.0]
    assert harness.alternate(lambda: 1.0, lambda: theirs.pop(), 2, best_theirs="max") == (1.0, 30.0)


def test_a_peer_gives_the_object_of_its_last_line(harness: ModuleType) -> None:
    script = "import json, sys\nprint('noise')\nprint(json.dumps({'rows': int(sys.argv[1])}))\n"
    (harness.PEERS / "fake_one.py").write_text(script)
    assert harness.peer("fake_one", 7) == {"rows": 7}
    assert list(harness.LOGS.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "timeout", "why"),
    [
        ("import sys; print('{}'); sys.exit('out of luck')", 60, "exit code 1"),
        ("print('no result here')", 60, "exit code 0"),
        ("import time; time.sleep(60)", 0.2, "no end within 0.2 s"),
    ],
)
def test_a_failed_peer_names_its_log(harness: ModuleType, script: str, timeout: float, why: str) -> None:
    (harness.PEERS / "fake_two.py").write_text(script)
    with pytest.raises(harness.PeerFailed, match=why) as failed:
        harness.peer("fake_two", timeout=timeout)
    (log,) = harness.LOGS.iterdir()
    assert str(log) in str(failed.value)


@pytest.mark.parametrize("kind", ["int", "string"])
def test_data_is_what_the_shape_says_and_is_made_once(harness: ModuleType, tmp_path: Path, kind: str) -> None:
    data = importlib.import_module("data")
    shape = data.Shape(rows=250, keys=10, kind=kind, per_file=100, preload=True)
    directory = data.make(shape, tmp_path)
    files = sorted(directory.iterdir())
    assert [pq.read_metadata(file).num_rows for file in files] == [10, 100, 100, 50]
    assert [file.stat().st_mtime for file in files] == sorted({file.stat().st_mtime for file in files})
    assert len(set(pq.read_table(files[0])["key"].to_pylist())) == 10

    table = pq.read_table(directory)
    sums: Counter[object] = Counter()
    for key, value in zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True):
        sums[key] += value
    assert data.keyed_sums(directory) == (len(sums), sum(sums.values()))

    before = [file.stat().st_mtime_ns for file in files]
    assert data.make(shape, tmp_path) == directory
    assert [file.stat().st_mtime_ns for file in files] == before


def test_a_side_that_fails_does_not_take_what_others_have_measured(
    harness: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(chosen: object) -> list[object]:
        raise harness.PeerFailed("spark gave no result")

    row = harness.compare("step", 1.0, 2.0, "ms", most=1)
    suite = {"first": broken, "second": lambda chosen: [row]}
    chosen = harness.Options(quick=False, rounds=1, only=())
    assert harness.run_chosen("engine", suite, chosen) == 1
    assert [one["name"] for one in json.loads((harness.RESULTS / "engine.json").read_text())] == ["step"]
    assert capsys.readouterr().out.splitlines()[-1] == "first failed: spark gave no result"
    assert harness.run_chosen("engine", {"second": suite["second"]}, chosen) == 0
