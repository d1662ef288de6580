"""A job directory as a run leaves it, written without one."""

from __future__ import annotations

from pathlib import Path

import polars as pl

import anabranch as ab
from anabranch.connect.sink import Sink
from anabranch.flow.plan import make_plan
from anabranch.log.steplog import Progress, StepLog
from anabranch.model.batch import STEP, WEIGHT
from anabranch.model.ids import Epoch, Step
from anabranch.runtime.jobdir import JobDir


def written_job(
    path: str | Path, steps: list[list[tuple[object, ...]]], schema: dict[str, object], sink: Sink
) -> JobDir:
    """A job with one output, `out`; a step is a list of rows, each with its weight last."""
    flow = ab.Flow("written")
    rows = flow.input("rows", ab.iterable([], schema=schema))
    rows.output("out", sink)
    jobdir = JobDir(path)
    with jobdir.locked():
        jobdir.create(make_plan(flow))
    log = StepLog(jobdir.log)
    progress = Progress()
    for number, changed in enumerate(steps):
        step = Step(number)
        outputs = {}
        if changed:
            frame = pl.DataFrame(changed, schema={**rows.schema, WEIGHT: pl.Int64()}, orient="row")
            frame = frame.with_columns(pl.lit(number, pl.Int64).alias(STEP))
            staged = sink.stage(frame, jobdir.outputs.child("out"), f"step-{number:012d}-try-1.0")
            sink.publish(jobdir.outputs.child("out"), [staged])
            outputs["out"] = {"rows": frame.height, "hash": 0, "files": [staged.to_json()]}
        commit = {
            "step": step,
            "epoch": 1,
            "input_rows": 0,
            "outputs": outputs,
            "touched": {},
            "dead_letters": 0,
        }
        log.write_plan(step, Epoch(1), {}, layout=0)
        log.write_commit(step, commit)
        progress.advance({"slices": {}}, commit)
    return jobdir
