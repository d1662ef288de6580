"""A step as one Spark job: stages linked by shuffles, reports collected at the end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext
from pyspark.core.rdd import RDD

from anabranch.errors import AnabranchError, StepAborted
from anabranch.flow.plan import Plan
from anabranch.model.ids import WorkerId
from anabranch.spark import failure
from anabranch.spark.blob import decode
from anabranch.spark.placement import make_handles, receiver_of
from anabranch.spark.ship import ShippedPlan
from anabranch.spark.spec import Report, StepSpec
from anabranch.spark.stage import run_stage

log = logging.getLogger(__name__)


class StepRunner:
    """Runs steps of one plan on one Spark context.  Not for two threads at a time."""

    def __init__(self, context: SparkContext, plan: Plan, placed: bool) -> None:
        self.context = context
        self.plan = plan
        self.placed = placed
        self._plan = ShippedPlan(context, plan)
        self._handles: RDD[tuple[int, bytes]] | None = None
        self._handles_for: tuple[Any, ...] = ()
        self._sweeper: threading.Thread | None = None

    def run(self, spec: StepSpec) -> list[Report]:
        """Run one attempt of a step.

        Raises:
            AnabranchError: what a task raised; StepAborted when Spark itself failed the job.  Nothing of
                the step is visible then, and it may be run again under a higher attempt.
        """
        handles = self._handles_of(spec)
        shuffles: list[RDD[Any]] = []
        stages = handles.mapPartitionsWithIndex(_task(self._plan, spec, 0))
        for stage in range(1, self.plan.depth + 1):
            exchanged = stages.partitionBy(spec.workers, receiver_of)
            shuffles.append(exchanged)
            arrived = self.context.union([handles, handles, exchanged])
            stages = arrived.mapPartitionsWithIndex(_task(self._plan, spec, stage))
        answers = self._collect(spec, stages)
        self._spend(shuffles)
        reports = [Report.from_wire(wire) for _, data in answers for wire in decode(data).reports]
        if log.isEnabledFor(logging.DEBUG):
            for report in reports:
                log.debug(
                    "step=%d stage=%d worker=%d process=%d seconds=%s",
                    spec.step,
                    report.stage,
                    report.worker,
                    report.process,
                    {part: round(value, 4) for part, value in report.seconds.items()},
                )
        return reports

    def on_workers(self, spec: StepSpec, ask: Callable[[StepSpec, WorkerId], Any]) -> list[Any]:
        """Call `ask` once for each worker, at its host; for what happens between steps."""

        def run(index: int, pairs: Iterable[tuple[int, bytes]]) -> Iterator[Any]:
            list(pairs)
            try:
                yield ask(spec, WorkerId(index))
            except AnabranchError as error:
                raise failure.wrap(error) from error

        return self._collect(spec, self._handles_of(spec).mapPartitionsWithIndex(run))

    def forget_handles(self) -> None:
        """Rebuild the handles before the next step: a layout changed, or an attempt failed."""
        handles, self._handles = self._handles, None
        if handles is not None:
            try:
                handles.unpersist()
            except Py4JError as error:
                log.warning("could not release handles error=%s", error)

    def _collect(self, spec: StepSpec, rdd: RDD[Any]) -> list[Any]:
        try:
            answers: list[Any] = rdd.collect()
        except Py4JJavaError as error:
            text = str(error.java_exception)
            raise (
                failure.unwrap(text)
                or failure.missing_module(text)
                or StepAborted(f"step {spec.step}: Spark failed the job: {_first_lines(text)}")
            ) from error
        except Py4JError as error:
            raise StepAborted(f"step {spec.step}: lost the connection to Spark: {error}") from error
        return answers

    def _handles_of(self, spec: StepSpec) -> RDD[tuple[int, bytes]]:
        key = spec.layout.workers
        if self._handles is None or self._handles_for != key:
            self.forget_handles()
            self._handles = make_handles(self.context, spec.layout.workers, self.placed)
            self._handles_for = key
        return self._handles

    def _spend(self, shuffles: list[RDD[Any]]) -> None:
        """Free the shuffle files of a step that is over, beside the next one: Spark itself waits for a
        garbage collection, and leaves the files of dozens of jobs until then."""
        if self._sweeper is not None:
            self._sweeper.join()
        self._sweeper = threading.Thread(target=_sweep, args=(self.context, shuffles), daemon=True)
        self._sweeper.start()


def _sweep(context: SparkContext, shuffles: list[RDD[Any]]) -> None:
    try:
        cleaner = context._jsc.sc().cleaner().get()
        for rdd in shuffles:
            shuffled = rdd._jrdd.rdd().dependencies().apply(0).rdd()
            cleaner.doCleanupShuffle(shuffled.dependencies().apply(0).shuffleId(), False)
    except (Py4JError, AttributeError) as error:
        # Spark's own cleaner frees them later; only disk space is at stake.
        log.debug("could not free shuffle files error=%s", error)


def _task(
    shipped: ShippedPlan, spec: StepSpec, stage: int
) -> Callable[[int, Iterable[tuple[int, bytes]]], Iterator[tuple[int, bytes]]]:
    def run(index: int, pairs: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
        # Handles are empty; everything is drained, or Spark would throw the Python process away.
        arrived = [blob for _, blob in pairs if blob]
        try:
            yield from run_stage(shipped.plan(), spec, stage, WorkerId(index), arrived)
        except AnabranchError as error:
            raise failure.wrap(error) from error

    return run


def _first_lines(text: str, limit: int = 12) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[:limit])
