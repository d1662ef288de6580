"""A run of a flow in a job directory: what holds for all of it, before and after its steps.

`steploop` does the steps.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from pathlib import Path

from pyspark import SparkContext

from anabranch.connect.sink import Sink
from anabranch.connect.sinks import parquet
from anabranch.errors import AnabranchError, EngineError
from anabranch.flow.plan import DEAD_LETTERS, Plan
from anabranch.log.steplog import Progress
from anabranch.model.layout import DEFAULT_SHARDING, FixedSharding
from anabranch.runtime.control import ControlServer
from anabranch.runtime.inbox import Inbox
from anabranch.runtime.jobdir import RECOVERY_PARTITIONS, JobDir
from anabranch.runtime.observe import Listener
from anabranch.runtime.planner import Planner
from anabranch.runtime.settings import Settings
from anabranch.runtime.sizing import StepSizer
from anabranch.runtime.status import StatusBoard
from anabranch.runtime.steploop import StepLoop
from anabranch.spark.session import borrowed, spark_context
from anabranch.storage import environment

log = logging.getLogger(__name__)


class Coordinator:
    """Runs one flow in one job directory until it is stopped, idle, or fails."""

    def __init__(
        self,
        plan: Plan,
        directory: str | Path,
        settings: Settings,
        listener: Listener,
        context: SparkContext | None = None,
    ) -> None:
        self.plan = plan
        self.context = context
        self.jobdir = JobDir(directory)
        self.settings = settings
        self.listener = listener
        self.sinks: dict[str, Sink] = {DEAD_LETTERS: parquet()}
        self.sinks |= {name: node.sink for name, node in plan.outputs.items() if node.sink is not None}
        sources = {name: node.source for name, node in plan.inputs.items() if node.source is not None}
        # Before the plan is sent to the workers: they read input logs too.
        for name, source in sources.items():
            source.attach(self.jobdir.input_log(name))
        self.planner = Planner(sources)
        self.sizer = StepSizer(settings.target_seconds, settings.max_step_rows, settings.first_step_rows)
        self._stop = False
        self.inbox = Inbox(lambda: self.board.said)

    def request_stop(self) -> None:
        """Ask for an orderly stop after the step under way; safe from a signal handler."""
        self._stop = True

    def run(self) -> Progress:
        """Run until stopped; returns what all committed steps add up to.

        Raises:
            UserError: something the user can mend; the job directory is as after the last committed step.
            EngineError: a fault that neither attempts nor recoveries could mend.
        """
        directory = self.jobdir
        if directory.exists():
            directory.check_same_flow(self.plan)
        with directory.locked() as epoch:
            if not directory.exists():
                shards = self.settings.shards
                directory.create(
                    self.plan,
                    self.settings.recovery_partitions or RECOVERY_PARTITIONS,
                    DEFAULT_SHARDING if shards is None else FixedSharding(shards),
                )
            directory.check_partitions(self.settings.recovery_partitions)
            directory.clear_wishes()
            self.board = StatusBoard(directory, self.plan.name, epoch)
            try:
                with ControlServer(directory, self.inbox.answer), self._spark() as context:
                    # Spark's Python processes may be on other machines, or older than these variables.
                    places = [directory.path, *(s.fingerprint().get("path") for s in self.sinks.values())]
                    if shipped := environment(places):
                        context.environment.update(shipped)
                    progress = StepLoop(self, context, epoch).run()
            except AnabranchError as error:
                self.board.failed(error)
                raise
            except BaseException as error:
                self.board.failed(EngineError(repr(error)))
                raise
            self.board.stopped(progress)
            return progress

    def _spark(self) -> AbstractContextManager[SparkContext]:
        if self.context is not None:
            return borrowed(self.context)
        settings = self.settings
        return spark_context(
            self.plan.name, settings.master, settings.conf, self.jobdir.spark_log, settings.ui
        )

    def must_stop(self, steps: int) -> bool:
        limit = self.settings.steps
        return self._stop or (limit is not None and steps >= limit) or self.jobdir.stop_asked()
