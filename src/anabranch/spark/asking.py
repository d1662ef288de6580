"""Ask something of every worker, or of every host, where its shards are, and collect the answers."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext, cloudpickle

from anabranch.errors import AnabranchError, Starved, StepAborted
from anabranch.model.ids import HostId
from anabranch.spark import failure
from anabranch.spark.dag import Dag
from anabranch.spark.pools import Pool, begin
from anabranch.spark.session import spark_lost
from anabranch.spark.spec import StepSpec

log = logging.getLogger(__name__)
T = TypeVar("T")
_NICE_SECONDS = 600.0
"""How long a machine that had nothing left is not tried again."""


class Ask(Generic[T]):
    """A function of (spec, number of the partition) as a task; its answer goes to the driver.

    What is unpickled on either side was pickled by the other: nothing here reads storage.
    """

    def __init__(self, function: Callable[[StepSpec, Any], T], spec: StepSpec) -> None:
        self.function = cloudpickle.dumps(function)
        self.spec = spec

    def __call__(self, partition: int, blobs: Iterator[bytes]) -> Iterator[bytes]:
        for _ in blobs:
            pass
        begin()
        try:
            answer = pickle.loads(self.function)(self.spec, partition)
        except AnabranchError as error:
            raise failure.wrap(error) from error
        yield pickle.dumps((partition, answer))


def in_order(answers: list[bytes]) -> list[Any]:
    """The answers of all partitions, in the order of partitions."""
    return [answer for _, answer in sorted(map(pickle.loads, answers), key=lambda pair: int(pair[0]))]


class Background:
    """Where the work beside the steps of a run is done: with what they leave of the machine; where that is next to nothing,
    for a while at a priority that gets its share."""

    def __init__(self, context: SparkContext) -> None:
        self.context = context
        self.steps = Dag(context)
        """Makes handles, too, which any pool can use."""
        self._left_over = Dag(context, pool=Pool.LEFT_OVER)
        self._nice = Dag(context, pool=Pool.NICE)
        self._nice_until = 0.0

    def run(self, spec: StepSpec, job: Callable[[Dag], T], alone: bool = False) -> T:
        """Run a Spark job; whatever goes wrong is one of our errors.  It may be run twice.

        Where no step is to run meanwhile, `alone`, it takes the processes of the steps.
        """
        if alone:
            return guarded(spec, partial(job, self.steps))
        if time.monotonic() >= self._nice_until:
            try:
                return guarded(spec, partial(job, self._left_over))
            except Starved as error:
                log.info(
                    "background work is done again at a higher priority step=%d error=%s", spec.step, error
                )
                self._nice_until = time.monotonic() + _NICE_SECONDS
        return guarded(spec, partial(job, self._nice))


class HostAsker:
    """Runs background work: Spark jobs of their own beside those of the steps, with one task for each host, at low priority.

    A task of a step waits while all slots are taken, so background work takes few: embedded, where all hosts share
    the machine's slots, one after the other; on a cluster, one on each host.
    """

    def __init__(self, background: Background, placed: bool) -> None:
        self._background = background
        self._placed = placed
        self._handles: dict[tuple[HostId, ...], Any] = {}

    def ask(
        self,
        spec: StepSpec,
        hosts: Sequence[HostId],
        ask: Callable[[StepSpec, HostId], T],
        alone: bool = False,
    ) -> list[T]:
        """Call `ask` once for each host, there; the answers in the order of `hosts`.  `alone`: see `Background`."""
        groups = [list(hosts)] if self._placed else [[host] for host in hosts]
        return [answer for group in groups for answer in self._ask_group(spec, group, ask, alone)]

    def _ask_group(
        self, spec: StepSpec, hosts: list[HostId], ask: Callable[[StepSpec, HostId], T], alone: bool
    ) -> list[T]:
        task = Ask(_ForHosts(hosts, ask), spec)
        key = tuple(hosts)

        def job(dag: Dag) -> list[bytes]:
            if key not in self._handles:
                self._handles[key] = self._background.steps.handles(hosts, self._placed)
            return dag.collect(self._handles[key], task)

        try:
            return in_order(self._background.run(spec, job, alone))
        except AnabranchError:
            # A lost executor takes its handles along.
            self.close()
            raise

    def close(self) -> None:
        """Release what this holds in Spark."""
        handles, self._handles = self._handles, {}
        for one in handles.values():
            try:
                one.unpersist(False)
            except (Py4JError, OSError) as error:
                log.warning("could not release handles error=%s", error)


class _ForHosts(Generic[T]):
    def __init__(self, hosts: Sequence[HostId], ask: Callable[[StepSpec, HostId], T]) -> None:
        self.hosts = hosts
        self.ask = ask

    def __call__(self, spec: StepSpec, partition: int) -> T:
        return self.ask(spec, self.hosts[partition])


def guarded(spec: StepSpec, job: Callable[[], T]) -> T:
    """Run a Spark job; whatever goes wrong is one of our errors."""
    try:
        return job()
    except Py4JJavaError as error:
        text = str(error.java_exception)
        raise (
            failure.unwrap(text)
            or failure.missing_module(text)
            or StepAborted(f"step {spec.step}: Spark failed the job: {_first_lines(text)}")
        ) from error
    except ConnectionRefusedError as error:
        raise spark_lost() from error
    except (Py4JError, EOFError, OSError) as error:
        raise StepAborted(f"step {spec.step}: lost the connection to Spark: {error}") from error


def _first_lines(text: str, limit: int = 12) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[:limit])
