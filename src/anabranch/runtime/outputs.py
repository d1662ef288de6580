"""The outputs of a job: only committed steps, whole.

Outputs are kept as long as the commit records that name them: `forget` removes both, in that order of need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from anabranch.connect.sink import Sink, Staged
from anabranch.connect.sinks import sink_like
from anabranch.errors import JobDirError
from anabranch.flow.plan import DEAD_LETTER_SCHEMA, DEAD_LETTERS
from anabranch.log.steplog import StepLog
from anabranch.model.batch import STEP, WEIGHT, consolidate
from anabranch.model.ids import Step
from anabranch.runtime.jobdir import JobDir

_FIRST = Step(0)


def output_names(jobdir: JobDir) -> list[str]:
    """The outputs of the job's flow, and the one for dead letters."""
    names = [operator["name"] for operator in jobdir.job()["operators"] if operator["kind"] == "output"]
    return [*names, DEAD_LETTERS]


def changes(jobdir: JobDir, name: str, first: Step = _FIRST) -> pl.DataFrame:
    """All changes of an output from step `first` on, in the order of steps: its columns, `__weight`, `__step`.

    Steps that were forgotten are left out.

    Raises:
        JobDirError: there is no job, or it has no such output.
    """
    if name not in output_names(jobdir):
        raise JobDirError(f"{jobdir.path} has no output {name!r}; it has {', '.join(output_names(jobdir))}")
    described = _described(jobdir, name)
    sink = sink_like(described["sink"])
    frame = sink.read(jobdir.outputs.child(name), list(_files(jobdir, name, first)))
    if not frame.width:
        columns = dict.fromkeys(described["schema"], pl.Null())
        return pl.DataFrame(schema={**columns, WEIGHT: pl.Int64(), STEP: pl.Int64()})
    return frame


def table(jobdir: JobDir, name: str) -> pl.DataFrame:
    """The output as a table: all changes added up, rows of weight zero gone, sorted."""
    frame = consolidate(changes(jobdir, name))
    columns = [column for column, dtype in frame.schema.items() if not dtype.is_nested()]
    return frame.sort(columns, nulls_last=True)


def json_ready(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with columns that JSON has no word for as text: decimals exactly, bytes as base64."""
    return frame.with_columns(
        pl.col(name).bin.encode("base64") if isinstance(dtype, pl.Binary) else pl.col(name).cast(pl.String)
        for name, dtype in frame.schema.items()
        if isinstance(dtype, pl.Binary | pl.Decimal)
    )


def publish(jobdir: JobDir, sinks: Mapping[str, Sink], commit: Mapping[str, Any]) -> None:
    """Give the files of a committed step their final names; done again, it changes nothing."""
    for name, output in commit["outputs"].items():
        sinks[name].publish(jobdir.outputs.child(name), _staged(output))


def discard_attempts(jobdir: JobDir, sinks: Mapping[str, Sink], log: StepLog, since: Step) -> None:
    """Remove what attempts of step `since` and later ones have staged and no commit record names.

    No worker may be writing.  All before `since` must be published.
    """
    keep: dict[str, set[str]] = {}
    for commit in log.commits(since):
        for name, output in commit["outputs"].items():
            keep.setdefault(name, set()).update(item.path for item in _staged(output))
    for name, sink in sinks.items():
        sink.discard(jobdir.outputs.child(name), keep.get(name, set()), f"step-{since:012d}")


def forget(jobdir: JobDir, sinks: Mapping[str, Sink], log: StepLog, before: Step) -> None:
    """Delete the outputs and the records of all steps below `before`; see `StepLog.trim`.

    Readers do not look for them from the first durable write on; after a crash, the next call goes on.
    """

    def expire(commit: dict[str, Any]) -> None:
        for name, output in commit["outputs"].items():
            sinks[name].expire(jobdir.outputs.child(name), _staged(output))

    log.trim(before, expire)


def _staged(output: Mapping[str, Any]) -> list[Staged]:
    return [Staged.from_json(file) for file in output["files"]]


def _described(jobdir: JobDir, name: str) -> dict[str, Any]:
    if name == DEAD_LETTERS:
        return {"sink": {"kind": "parquet", "path": None}, "schema": dict.fromkeys(DEAD_LETTER_SCHEMA)}
    operators: list[dict[str, Any]] = jobdir.job()["operators"]
    return next(o for o in operators if o["kind"] == "output" and o["name"] == name)


def _files(jobdir: JobDir, name: str, first: Step) -> Iterator[Staged]:
    for commit in StepLog(jobdir.log).commits(first):
        for file in commit["outputs"].get(name, {}).get("files", ()):
            yield Staged.from_json(file)
