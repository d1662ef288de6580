"""What a job's directory says happened: step records, the rows behind every slice, the rows of every output.

Read with a few lines of our own rather than with the engine's reader, which is among the things under test.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from chaos.oracle import Delta, Row, ZSet, zset

_MASK = (1 << 64) - 1
_PER_FOLDER = 1000


class Broken(Exception):
    """The directory says something that cannot be."""


def read_record(path: Path) -> dict[str, Any]:
    """A record: its checksum in the first line, JSON in the second."""
    checksum, _, body = path.read_bytes().partition(b"\n")
    if checksum.decode() != hashlib.blake2b(body, digest_size=16).hexdigest():
        raise Broken(f"{path}: its checksum does not fit")
    value: dict[str, Any] = json.loads(body)
    return value


class Harvest:
    """Plan and commit records of all steps, gathered while the job runs: it may remove old ones."""

    def __init__(self, job: Path) -> None:
        self.job = job
        self.log = job / "log"
        self.plans: list[dict[str, Any]] = []
        self.commits: list[dict[str, Any]] = []
        # For each input and partition, the position after all gathered steps.
        self.positions: dict[str, dict[str, int]] = {}
        # For each step whose outputs were taken in, too, the changes of each.
        self._outputs: dict[int, dict[str, ZSet]] = {}

    def __len__(self) -> int:
        return len(self.commits)

    def gather(self) -> int:
        """Take in the steps that were committed since; how many."""
        before = len(self.commits)
        while (path := self._path(len(self.commits), "commit")).exists():
            step = len(self.commits)
            commit = read_record(path)
            plan = read_record(self._path(step, f"{commit['epoch']}.plan"))
            if commit["step"] != step or plan["step"] != step:
                raise Broken(f"{path}: it is of step {commit['step']}, its plan of step {plan['step']}")
            self._advance(step, plan)
            self.commits.append(commit)
            self.plans.append(plan)
        return len(self.commits) - before

    def gather_outputs(self) -> None:
        """Take in the outputs of all gathered steps, for a job that removes old ones.  It must not be running."""
        for commit in self.commits:
            step, names = commit["step"], commit["outputs"]
            files = [_path(self.job, name, file) for name in names for file in _files(commit, name)]
            # Those of the last step may have no name yet: a driver that was killed leaves that to the next one.
            if step not in self._outputs and all(path.exists() for path in files):
                self._outputs[step] = {name: read_output(self.job, name, commit) for name in names}

    def output(self, name: str, commit: Mapping[str, Any]) -> ZSet:
        """The changes of one output in one step."""
        taken = self._outputs.get(commit["step"])
        return read_output(self.job, name, commit) if taken is None else taken.get(name, Counter())

    def _advance(self, step: int, plan: Mapping[str, Any]) -> None:
        """Every step goes on exactly where the one before ended."""
        for name, pieces in plan["slices"].items():
            positions = self.positions.setdefault(name, {})
            for piece in pieces:
                at = positions.get(piece["partition"], 0)
                if piece["start"] != at or piece["end"] < at:
                    raise Broken(
                        f"step {step}, input {name}, {piece['partition']}: reads {piece['start']} … "
                        f"{piece['end']}, and {at} was next"
                    )
                positions[piece["partition"]] = piece["end"]

    def check_unchanged(self) -> None:
        """Records that are still there are as they were, and none was missed."""
        behind = [path.name for path in self.log.glob("*/*.commit") if int(path.stem) >= len(self.commits)]
        if behind:
            raise Broken(f"{self.log}: step {len(self.commits)} is missing, and there is {min(behind)}")
        for step, commit in enumerate(self.commits):
            path = self._path(step, "commit")
            if path.exists() and read_record(path) != commit:
                raise Broken(f"{path}: it was another record before")

    def _path(self, step: int, kind: str) -> Path:
        return self.log / f"{step // _PER_FOLDER:09d}" / f"{step:012d}.{kind}"


class Inputs:
    """The rows of every input by position, from the files that the feed wrote."""

    def __init__(self, root: Path, inputs: Mapping[str, Mapping[str, Any]]) -> None:
        self.root = root
        self.inputs = inputs

    def ends(self) -> dict[str, dict[str, int]]:
        """For each input and partition, the position behind all there is."""
        return {name: self._ends(name, one) for name, one in self.inputs.items()}

    def _ends(self, name: str, one: Mapping[str, Any]) -> dict[str, int]:
        if one["kind"] == "generator":
            rows, parts = one["rows"], one["partitions"]
            return {str(p): (rows - p + parts - 1) // parts for p in range(parts)}
        files = [path for path in (self.root / name).iterdir() if not path.name.startswith("_")]
        if one["kind"] == "parquet":
            return {path.name: pq.read_metadata(path).num_rows for path in files}
        if one["kind"] == "iterable":
            return {"0": len(self._items(name))}
        return {path.name: path.stat().st_size for path in files}

    def read(self, slices: Mapping[str, list[dict[str, Any]]]) -> tuple[dict[str, Delta], int]:
        """What a step's slices hold, in the documented order, and how many records of it are bad."""
        deltas: dict[str, Delta] = {}
        bad = 0
        for name, pieces in slices.items():
            delta = deltas.setdefault(name, [])
            for piece in sorted(pieces, key=lambda one: (one["partition"], one["start"])):
                for row in self._rows(name, piece["partition"], piece["start"], piece["end"]):
                    if row is None:
                        bad += 1
                    else:
                        delta.append(row)
        return deltas, bad

    def _rows(self, name: str, partition: str, start: int, end: int) -> list[tuple[Row, int] | None]:
        one = self.inputs[name]
        kind = one["kind"]
        if kind == "generator":
            return [_made(one, index * one["partitions"] + int(partition)) for index in range(start, end)]
        if kind == "iterable":
            return [_from_object(line, one["weights"]) for line in self._items(name)[start:end]]
        path = self.root / name / partition
        if kind == "parquet":
            table = pq.read_table(path, partitioning=None)
            rows = table.slice(start, end - start).to_pylist()
            return [(tuple(row[c] for c in "asnxd"), row["w"] if one["weights"] else 1) for row in rows]
        with open(path, "rb") as file:
            file.seek(start)
            lines = file.read(end - start).decode().split("\n")[:-1]
        if kind == "text":
            return [_from_text(line) for line in lines]
        return [_from_object(line, one["weights"]) for line in lines]

    def _items(self, name: str) -> list[str]:
        lines = (self.root / name / "items").read_text().split("\n")[:-1]
        return [line for line in lines if line != "END"]


def _from_object(line: str, weights: bool) -> tuple[Row, int]:
    value = json.loads(line)
    d = None if value["d"] is None else Decimal(value["d"])
    return (value["a"], value["s"], value["n"], value["x"], d), value["w"] if weights else 1


def _from_text(line: str) -> tuple[Row, int] | None:
    a, s, n, x, d = line.split("\t")
    if a == "bad":
        return None
    row = (
        int(a) if a else None,
        s[1:] if s else None,
        int(n) if n else None,
        float.fromhex(x) if x else None,
        Decimal(d) if d else None,
    )
    return row, 1


def _made(one: Mapping[str, Any], index: int) -> tuple[Row, int]:
    """A row of the generator: SplitMix64 over (seed, column, row), as its golden values pin it."""
    a = _uniform(one["seed"], "a", index, 0, 24)
    n = _uniform(one["seed"], "n", index, -5, 30)
    return (a, "pen" if index % 3 else "ink", n, n / 8, Decimal(index) / 100), 1


def _uniform(seed: int, column: str, index: int, low: int, high: int) -> int:
    salt = seed * 0x9E3779B97F4A7C15 + zlib.crc32(column.encode()) * 0xD1342543DE82EF95
    bits = ((index + 1) * 0x9E3779B97F4A7C15 + salt) & _MASK
    bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & _MASK
    bits ^= bits >> 31
    return low + ((bits >> 32) * (high - low) >> 32)


def read_output(job: Path, name: str, commit: Mapping[str, Any]) -> ZSet:
    """The changes in the files that a commit record names for one output."""
    changes: list[tuple[Row, int]] = []
    step = commit["step"]
    for file in _files(commit, name):
        path = _path(job, name, file)
        if not path.exists():
            raise Broken(f"step {step}: {path} is named by its commit record, and is not there")
        table = pq.read_table(path, partitioning=None)
        if table.num_rows != file["rows"]:
            raise Broken(f"step {step}: {path} has {table.num_rows} rows, its record says {file['rows']}")
        for row in table.to_pylist():
            if row["__step"] != step:
                raise Broken(f"{path}: a row of step {row['__step']}, expected {step}")
            weight = row.pop("__weight")
            del row["__step"]
            changes.append((tuple(row.values()), weight))
    return zset(changes)


def stray_files(job: Path, commits: list[dict[str, Any]]) -> list[Path]:
    """Output files that no commit record names: a reader of the directory would count their rows."""
    named: Counter[Path] = Counter()
    for commit in commits:
        for name in commit["outputs"]:
            named.update(_path(job, name, file) for file in _files(commit, name))
    twice = [path for path, times in named.items() if times > 1]
    return twice + [path for path in sorted((job / "outputs").glob("*/*.parquet")) if path not in named]


def _files(commit: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    files: list[dict[str, Any]] = commit["outputs"].get(name, {}).get("files", [])
    return files


def _path(job: Path, name: str, file: Mapping[str, Any]) -> Path:
    """Names are absolute, or below the output's own directory."""
    return job / "outputs" / name / str(file["final"])
