"""The judgement: random flows through the real coordinator, without Spark, and jobs that were tampered with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import anabranch as ab
from chaos.build import build
from chaos.check import Verdict, check
from chaos.feed import Feed
from chaos.flows import random_flow
from chaos.records import Harvest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
from sparkless import without_spark


def run_flow(seed: int, root: Path) -> dict[str, Any]:
    """Run a random flow to its end; returns its description."""
    rng = Random(seed)
    description = random_flow(rng, 100)
    for one in description["inputs"].values():
        if one["kind"] == "generator":
            one["rate"] = None
    Feed(root / "in", description["inputs"], 100, rng).give_all()
    with without_spark():
        ab.run(
            build(description, root / "in"),
            root / "job",
            workers=rng.randint(1, 3),
            shards=4,
            until_idle=True,
            max_step_rows=60,
        )
    return description


def judge(root: Path, description: dict[str, Any]) -> Verdict:
    return check(root / "job", root / "in", description, Harvest(root / "job"))


@pytest.mark.parametrize("seed", [1, 3, 5, 8])
def test_the_engine_agrees_with_the_oracle(seed: int, tmp_path: Path) -> None:
    verdict = judge(tmp_path, run_flow(seed, tmp_path))
    assert verdict.problems == []
    assert verdict.good
    assert verdict.steps > 2
    assert verdict.changes > 50


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("job")
    return root, run_flow(2, root)


def output_file(root: Path) -> Path:
    return max(
        (root / "job" / "outputs").glob("*/*.parquet"), key=lambda path: pq.read_metadata(path).num_rows
    )


def test_a_row_less(job: tuple[Path, dict[str, Any]]) -> None:
    root, description = job
    path = output_file(root)
    before = path.read_bytes()
    table = pq.read_table(path, partitioning=None)
    # As many rows as the record says, and one of them is another's copy.
    pq.write_table(pa.concat_tables([table.slice(1), table.slice(table.num_rows - 1)]), path)
    verdict = judge(root, description)
    path.write_bytes(before)
    assert (verdict.lost, verdict.doubled) == (1, 1)
    assert "expected" in verdict.problems[0]
    assert judge(root, description).good


def test_a_file_too_many(job: tuple[Path, dict[str, Any]]) -> None:
    root, description = job
    copy = output_file(root).with_name("copy.parquet")
    copy.write_bytes(output_file(root).read_bytes())
    verdict = judge(root, description)
    copy.unlink()
    assert verdict.problems == [f"{copy}: named by no commit record, or by two"]


def test_a_file_that_is_gone(job: tuple[Path, dict[str, Any]]) -> None:
    root, description = job
    path = output_file(root)
    hidden = path.rename(path.with_suffix(".hidden"))
    verdict = judge(root, description)
    hidden.rename(path)
    assert "is not there" in verdict.problems[0]


def test_input_that_nobody_read(job: tuple[Path, dict[str, Any]]) -> None:
    root, description = job
    name = next(
        name for name, one in description["inputs"].items() if one["kind"] in ("jsonl", "iterable", "text")
    )
    path = next((root / "in" / name).iterdir())
    before = path.read_bytes()
    path.write_bytes(before.removesuffix(b"END\n") + before.split(b"\n")[0] + b"\n")
    verdict = judge(root, description)
    path.write_bytes(before)
    assert verdict.problems[0].startswith(f"input {name}: read up to")


def test_a_record_that_changed(job: tuple[Path, dict[str, Any]]) -> None:
    root, description = job
    harvest = Harvest(root / "job")
    harvest.gather()
    harvest.commits[1] = {**json.loads(json.dumps(harvest.commits[1])), "input_rows": -1}
    verdict = check(root / "job", root / "in", description, harvest)
    assert "was another record before" in verdict.problems[0]


def test_steps_that_overlap(job: tuple[Path, dict[str, Any]]) -> None:
    root, description = job
    harvest = Harvest(root / "job")
    harvest.gather()
    name, partitions = next(iter(harvest.positions.items()))
    early = Harvest(root / "job")
    early.positions[name] = dict.fromkeys(partitions, 1)
    verdict = check(root / "job", root / "in", description, early)
    assert "and 1 was next" in verdict.problems[0]
