"""A step as one Spark job: stages linked by shuffles, reports collected at the end."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from py4j.protocol import Py4JError
from pyspark import SparkContext

from anabranch.errors import AnabranchError
from anabranch.flow.plan import Plan
from anabranch.model.ids import HostId, WorkerId
from anabranch.spark import failure
from anabranch.spark.asking import Ask, guarded, in_order
from anabranch.spark.blob import decode
from anabranch.spark.dag import Dag, Exchanging
from anabranch.spark.placement import HostWatch, NoWatch
from anabranch.spark.ship import ShippedPlan
from anabranch.spark.spec import Report, StepSpec
from anabranch.spark.stage import run_stage

log = logging.getLogger(__name__)
_OVERLAP = 0.05
"""Seconds for which a task keeps a process that it was not to get, so that the others do not get the same."""
_TRIES = 25
"""How often new processes are asked for before it is done at the expense of those that are there."""
_HERE = HostId("")
T = TypeVar("T")


class StepRunner:
    """Runs steps of one plan on one Spark context.  Not for two threads at a time.

    Handles keep workers at the host that holds their shards: a *handle* is one cached partition per worker, made on
    the host that the layout names.  On a cluster every stage is a narrow union of the handles with what was
    exchanged, so Spark runs a task where its handle is.  There are handles for each layout, and they are rebuilt before
    each retry: a lost executor takes its handles along.
    """

    def __init__(self, context: SparkContext, plan: Plan, placed: bool) -> None:
        self.context = context
        self.plan = plan
        self.placed = placed
        self._plan = ShippedPlan(context, plan)
        self._dag = Dag(context, [self._plan.broadcast])
        self._handles: dict[tuple[HostId, ...], Any] = {}
        """By the hosts of workers.  Replaced and never changed, since another thread may prepare some."""
        self._processes: Counter[HostId] = Counter()
        """How many processes there are at each place, as far as layouts needed them.  More than that would do harm: Spark
        uses all of them in turn, and each has to have every shard's pages mapped."""
        self._changing = threading.Lock()
        self._sweeper: threading.Thread | None = None
        self._watch = HostWatch(context) if placed else NoWatch()

    def run(self, spec: StepSpec) -> list[Report]:
        """Run one attempt of a step.

        Raises:
            AnabranchError: what a task raised; StepAborted when Spark itself failed the job.  Nothing of
                the step is visible then, and it may be run again under a higher attempt.
        """
        with self._watch.over(spec.layout.hosts):
            answers = guarded(spec, lambda: self._stages(spec))
        reports = [Report.from_wire(wire) for data in answers for wire in decode(data).reports]
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

    def on_workers(self, spec: StepSpec, ask: Callable[[StepSpec, WorkerId], T]) -> list[T]:
        """Call `ask` once for each worker, at its host, and give the answers in the order of workers."""
        task = Ask(ask, spec)
        return in_order(guarded(spec, lambda: self._dag.collect(self._handles_of(spec), task)))

    def prepare(self, spec: StepSpec, workers: tuple[HostId, ...]) -> None:
        """Make the handles of a coming layout, and have the processes there that it needs besides those that there are; on
        another thread than the one that runs steps.

        Raises:
            AnabranchError: Spark failed the job, as it does when one of the hosts is lost.
        """
        missing = [*(self._places(workers) - self._processes).elements()]

        def prepare() -> None:
            self._make_handles(workers)
            if missing:
                self._start_processes(missing)

        guarded(spec, prepare)

    def _start_processes(self, places: list[HostId]) -> None:
        """Have so many more processes at each place.

        Spark starts one where a task finds none that is idle.  A task that gets one of those that steps use gives it back at
        once, and is sent again: while it kept them, so that others were started, the step whose tasks came next had to
        start them itself, and was the longest of the rescaling.  Where all are idle time and again, no step is in a hurry.
        """
        extra = self._dag.handles(places, self.placed)
        missing = frozenset(range(len(places)))
        try:
            for tries_left in reversed(range(_TRIES)):
                started = self._dag.collect(extra, _Warm(self._plan, missing, keep=not tries_left))
                missing -= {int(number) for number in started}
                if not missing:
                    break
        finally:
            extra.unpersist(False)

    def keep_handles(self, workers: tuple[HostId, ...]) -> None:
        """Let go of the handles of all other layouts."""
        with self._changing:
            gone = {key: handles for key, handles in self._handles.items() if key != workers}
            self._handles = {key: handles for key, handles in self._handles.items() if key == workers}
        for handles in gone.values():
            try:
                handles.unpersist(False)
            except (Py4JError, OSError) as error:
                log.warning("could not release handles error=%s", error)

    def forget_handles(self) -> None:
        """Rebuild the handles before the next step: an attempt failed."""
        self.keep_handles(())
        # Some may have died.
        self._processes = Counter()

    def close(self) -> None:
        """Release what this runner holds in Spark; the context stays."""
        if self._sweeper is not None:
            self._sweeper.join()
        self._watch.close()
        self.forget_handles()
        self._plan.release()

    def _stages(self, spec: StepSpec) -> list[bytes]:
        handles = arrived = self._handles_of(spec)
        shuffles: list[Any] = []
        for stage in range(self.plan.depth):
            exchanged, shuffle = self._dag.exchanged(
                arrived, Exchanging(_Stage(self._plan, spec, stage)), spec.workers
            )
            shuffles.append(shuffle)
            # Embedded, all tasks run in one place anyway.
            arrived = self._dag.beside(handles, exchanged) if self.placed else exchanged
        answers = self._dag.collect(arrived, _Last(_Stage(self._plan, spec, self.plan.depth)))
        self._sweep(shuffles)
        return answers

    def _handles_of(self, spec: StepSpec) -> Any:
        return self._make_handles(spec.layout.workers)

    def _make_handles(self, workers: tuple[HostId, ...]) -> Any:
        handles = self._handles.get(workers)
        if handles is None:
            handles = self._dag.handles(workers, self.placed)
            with self._changing:
                self._handles = {**self._handles, workers: handles}
                self._processes |= self._places(workers)
        return handles

    def _places(self, workers: tuple[HostId, ...]) -> Counter[HostId]:
        """How many workers there are at each place; embedded, all hosts are one."""
        return Counter(workers if self.placed else [_HERE] * len(workers))

    def _sweep(self, shuffles: list[Any]) -> None:
        """Free the shuffle files of a step that is over, beside the next one: Spark itself waits for a
        garbage collection, and leaves the files of dozens of jobs until then."""
        if self._sweeper is not None:
            self._sweeper.join()
        self._sweeper = threading.Thread(target=_free, args=(self.context, shuffles), daemon=True)
        self._sweeper.start()


class _Stage:
    """One stage as a task: a small object that any worker can unpickle."""

    def __init__(self, plan: ShippedPlan, spec: StepSpec, stage: int) -> None:
        self.plan = plan
        self.spec = spec
        self.stage = stage

    def __call__(self, partition: int, blobs: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
        # Handles are empty; everything is drained, or Spark would throw the Python process away.
        arrived = [blob for blob in blobs if blob]
        if self.stage == 0:
            arrived = []
        try:
            yield from run_stage(self.plan.plan(), self.spec, self.stage, WorkerId(partition), arrived)
        except AnabranchError as error:
            raise failure.wrap(error) from error


class _Warm:
    """Has processes there, with the plan loaded, before the first step that needs them.

    A task whose number is missing yields it if there is one more now.  `keep`: a process that was there already is kept for
    a while.
    """

    def __init__(self, plan: ShippedPlan, missing: frozenset[int], keep: bool) -> None:
        self.plan = plan
        self.missing = missing
        self.keep = keep

    def __call__(self, partition: int, blobs: Iterator[bytes]) -> Iterator[bytes]:
        for _ in blobs:
            pass
        if partition not in self.missing:
            return
        if not self.plan.loaded:
            self.plan.plan()
            yield b"%d" % partition
        elif self.keep:
            time.sleep(_OVERLAP)


class _Last:
    """The last stage: its blobs go to the driver."""

    def __init__(self, stage: _Stage) -> None:
        self.stage = stage

    def __call__(self, partition: int, blobs: Iterator[bytes]) -> Iterator[bytes]:
        for _, blob in self.stage(partition, blobs):
            yield blob


def _free(context: SparkContext, shuffles: list[Any]) -> None:
    try:
        cleaner = context._jsc.sc().cleaner().get()
        for shuffle in shuffles:
            cleaner.doCleanupShuffle(shuffle.rdd().dependencies().apply(0).shuffleId(), False)
    except (Py4JError, AttributeError, OSError) as error:
        # Spark's own cleaner frees them later; only disk space is at stake.
        log.debug("could not free shuffle files error=%s", error)
