"""`anabranch.run`: run a flow from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark import SparkContext

from anabranch.flow.plan import make_plan
from anabranch.flow.stream import Flow
from anabranch.log.steplog import Progress
from anabranch.runtime.coordinator import Coordinator
from anabranch.runtime.observe import Listener, Silent
from anabranch.runtime.settings import Settings


def run(
    flow: Flow,
    directory: str | Path,
    *,
    listener: Listener | None = None,
    context: SparkContext | None = None,
    **settings: Any,
) -> Progress:
    """Run a flow in a job directory until it is stopped, or idle with `until_idle=True`.

    A directory that has run the flow before goes on where it stopped.

    Args:
        flow: what to run.
        directory: the job directory, or its URL in an object store; made if it does not exist.
        listener: told of every step.
        context: a Spark context to run on, made by `anabranch.spark.session.spark_context`; None starts one.
        settings: see `anabranch.runtime.settings.Settings`.

    Returns:
        What all committed steps add up to: `next_step`, `input_rows`, `output_rows`, `positions`.
    """
    coordinator = Coordinator(make_plan(flow), directory, Settings(**settings), listener or Silent(), context)
    return coordinator.run()
