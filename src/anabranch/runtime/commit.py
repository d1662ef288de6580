"""What one complete attempt of a step adds up to."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from anabranch.model.ids import Epoch, Step
from anabranch.model.layout import Layout
from anabranch.spark.reads import sum_lost, sum_reads
from anabranch.spark.spec import Report


def commit_record(
    step: Step, epoch: Epoch, layout: Layout, reports: list[Report], seconds: float
) -> dict[str, Any]:
    """The step's commit record."""
    moved = sum(sum(report.collected.values()) for report in reports)
    return {
        "step": step,
        "epoch": epoch,
        "layout": layout.version,
        "time": time.time(),
        "seconds": round(seconds, 6),
        "input_rows": sum(rows for report in reports for rows in report.input_rows.values()),
        "inputs": _sum_by_name(reports, lambda report: report.input_rows),
        "reads": sum_reads(reports),
        "lost": sum_lost(reports),
        "outputs": sum_outputs(reports),
        "touched": sum_touched(reports),
        "dead_letters": sum(report.dead_letters for report in reports),
        **({"moved_bytes": moved} if moved else {}),
    }


def sum_touched(reports: list[Report]) -> dict[str, list[int]]:
    """For each region the slots of the copies that the step wrote."""
    touched: dict[str, list[int]] = {}
    for report in reports:
        for region, slots in report.touched.items():
            touched.setdefault(region, []).extend(slots)
    return {region: sorted(slots) for region, slots in touched.items()}


def sum_outputs(reports: list[Report]) -> dict[str, dict[str, Any]]:
    """For each output its rows, its hash as a Z-set, and its staged files."""
    outputs: dict[str, dict[str, Any]] = {}
    for report in sorted(reports, key=lambda report: (report.stage, report.worker)):
        for name, files in report.outputs.items():
            output = outputs.setdefault(name, {"rows": 0, "hash": 0, "files": []})
            for file in files:
                output["rows"] += file["rows"]
                output["hash"] = (output["hash"] + file["hash"]) % (1 << 64)
                if "path" in file:
                    output["files"].append({key: file[key] for key in ("path", "final", "rows", "size")})
    return outputs


def _sum_by_name(reports: list[Report], of: Callable[[Report], dict[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for report in reports:
        for name, count in of(report).items():
            sums[name] = sums.get(name, 0) + count
    return sums
