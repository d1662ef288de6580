"""Compare what a job did with what it should have done, step by step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.oracle import COLUMNS, Oracle, ZSet
from chaos.records import Broken, Harvest, Inputs, stray_files

_SHOWN = 5


@dataclass
class Verdict:
    """What was compared, and what did not fit."""

    steps: int = 0
    rows: int = 0
    """Input rows of all steps."""
    changes: int = 0
    """Changes of all outputs."""
    lost: int = 0
    doubled: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.problems and not self.lost and not self.doubled

    def compare(self, where: str, found: ZSet, expected: ZSet) -> None:
        """What is too little is lost, what is too much is doubled."""
        for row in found.keys() | expected.keys():
            more = found[row] - expected[row]
            self.doubled += max(0, more)
            self.lost += max(0, -more)
            if more and len(self.problems) < _SHOWN:
                self.problems.append(f"{where}: {row} has weight {found[row]}, expected {expected[row]}")


def check(job: Path, root: Path, description: Mapping[str, Any], harvest: Harvest) -> Verdict:
    """Judge a job that has read all its input and was stopped in an orderly way."""
    verdict = Verdict()
    try:
        harvest.gather()
        harvest.check_unchanged()
        _check_division(verdict, harvest, Inputs(root, description["inputs"]))
        _check_steps(verdict, description, harvest, Inputs(root, description["inputs"]))
        for path in stray_files(job, harvest.commits):
            verdict.problems.append(f"{path}: named by no commit record, or by two")
    except (Broken, OSError) as error:
        verdict.problems.append(str(error))
    return verdict


def _check_division(verdict: Verdict, harvest: Harvest, inputs: Inputs) -> None:
    """All that was given was read; that no step overlaps another, the harvest has seen."""
    for name, ends in inputs.ends().items():
        found = {key: end for key, end in harvest.positions.get(name, {}).items() if end}
        wanted = {key: end for key, end in ends.items() if end}
        if found != wanted:
            verdict.problems.append(f"input {name}: read up to {found}, expected {wanted}")


def _check_steps(verdict: Verdict, description: Mapping[str, Any], harvest: Harvest, inputs: Inputs) -> None:
    oracle = Oracle(description)
    for step, (plan, commit) in enumerate(zip(harvest.plans, harvest.commits, strict=True)):
        deltas, bad = inputs.read(plan["slices"])
        expected = oracle.step(deltas)
        verdict.steps += 1
        verdict.rows += sum(map(len, deltas.values())) + bad
        unknown = commit["outputs"].keys() - expected.keys() - {"dead_letters"}
        if unknown:
            verdict.problems.append(f"step {step}: outputs {sorted(unknown)} are not the flow's")
        for name, change in expected.items():
            found = harvest.output(name, commit)
            verdict.changes += sum(map(abs, change.values()))
            verdict.compare(f"step {step}, output {name}", found, change)
        found_bad = sum(harvest.output("dead_letters", commit).values())
        if found_bad != bad:
            verdict.problems.append(f"step {step}: {found_bad} dead letters, expected {bad}")


def check_table(
    shown: str, description: Mapping[str, Any], harvest: Harvest, root: Path, name: str
) -> Verdict:
    """Judge what `anabranch output DIR NAME --json` printed: the table that all changes add up to."""
    verdict = Verdict()
    oracle, inputs = Oracle(description), Inputs(root, description["inputs"])
    total: ZSet = Counter()
    for plan in harvest.plans:
        total.update(oracle.step(inputs.read(plan["slices"])[0])[name])
    expected: ZSet = Counter({_as_shown(row): weight for row, weight in total.items() if weight})
    found: ZSet = Counter()
    for line in shown.splitlines():
        row = json.loads(line)
        found[tuple(row[column] for column in COLUMNS)] += row.get("__weight", 1)
    verdict.compare(f"table {name}", found, expected)
    return verdict


def _as_shown(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*row[:4], None if row[4] is None else f"{row[4]:.2f}")
