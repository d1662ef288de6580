"""The work of a migration that is done beside the steps: preparing hosts, copying shards, deleting what was left behind.

CAR-1  A copy that was left behind is deleted behind every checkpoint that was begun before the step that left it.

Must not know: why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from anabranch.errors import AnabranchError
from anabranch.model.ids import Attempt, HostId, ShardId, Step
from anabranch.model.placement import Copy, Placement
from anabranch.runtime.standing import Standing
from anabranch.spark.asking import HostAsker
from anabranch.spark.copying import HostCopier, Pair
from anabranch.spark.job import StepRunner
from anabranch.spark.moving import clear_host, drop_copies, prepare_host, weigh_host
from anabranch.spark.spec import StepSpec

log = logging.getLogger(__name__)

_TRIES = 3
"""How often copies that were left behind are asked to be deleted."""

Then = Callable[["Future[Any]"], None]
"""Called on the step loop's thread with what came of it."""
Behind = Callable[[Callable[[], Any]], "Future[Any]"]
"""Runs an action in the background behind every checkpoint that was begun."""


@dataclass(slots=True)
class _Job:
    future: Future[Any]
    then: Then


class Carrier:
    """Background work of one run.  All methods are for the step loop's thread."""

    def __init__(self, runner: StepRunner, asker: HostAsker, copier: HostCopier, behind: Behind) -> None:
        self.runner = runner
        self.asker = asker
        self.copier = copier
        self.behind = behind
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="anabranch-rescale")
        self._jobs: list[_Job] = []
        self._spec: StepSpec | None = None
        """The one that was prepared last."""

    def prepare(self, spec: StepSpec, final: tuple[HostId, ...], then: Then) -> None:
        """Make hosts, and the handles of the coming workers and of the final ones, ready; its result is what each host's
        copies weigh, by slot."""
        self._spec = spec

        def prepare() -> list[dict[ShardId, int]]:
            sizes = self.asker.ask(spec, spec.layout.hosts, prepare_host)
            self.runner.prepare(spec, spec.layout.workers)
            self.runner.prepare(spec, final)
            return sizes

        self._jobs.append(_Job(self._thread.submit(prepare), then))

    def weigh(self, spec: StepSpec, then: Then) -> None:
        """Its result is what each host's copies weigh, by slot."""
        self._jobs.append(
            _Job(self._thread.submit(self.asker.ask, spec, spec.layout.hosts, weigh_host), then)
        )

    def clear(self, spec: StepSpec, hosts: Sequence[HostId], then: Then) -> None:
        """Remove what is left of the job on hosts that it has left."""
        if hosts:
            self._jobs.append(_Job(self._thread.submit(self.asker.ask, spec, hosts, clear_host), then))

    def warm_up(self, spec: StepSpec) -> None:
        """Have the processes there that work beside the steps is done in, before there is any.

        Spark starts the first of them, half a second's work, while every task that wants a process waits.  At the beginning
        of a run nobody notices that; in the middle of one, it would be the longest step of the first rescaling.
        """

        def then(done: Future[Any]) -> None:
            if (error := done.exception()) is not None:
                log.info("could not start the processes for work beside the steps error=%s", error)

        self._jobs.append(_Job(self._thread.submit(self.asker.ask, spec, spec.layout.hosts, _nothing), then))

    def copy(
        self,
        standing: Standing,
        pairs: Iterable[Pair],
        since: Step | None,
        told: Callable[[int], None],
        then: Then,
    ) -> None:
        """Make copies as of the next step, or bring them there; its result is the bytes that travelled.

        `told` is called meanwhile, on the thread of this work, with how many more copies there are.
        """
        # The flow goes on and changes the markers.
        markers = {region: dict(steps) for region, steps in standing.progress.markers.items()}
        spec = replace(standing.spec(Attempt(0)), markers=markers)
        copy = partial(self.copier.copy, spec, tuple(pairs), since, told)
        self._jobs.append(_Job(self._thread.submit(copy), then))

    def drop(self, copies: Sequence[Copy], then: Then) -> None:
        """Delete copies that do not count any more (CAR-1).

        Again where that fails: a process that dies in the middle leaves the rest of them to nobody before the next recovery,
        and a host that is to be emptied would keep them until then.
        """
        hosts = tuple(dict.fromkeys(copy.host for copy in copies))
        spec = self._spec
        # A copy that is still being filled would come back to life.
        filled = self._thread.submit(lambda: None)

        def drop() -> None:
            filled.result()
            if hosts and spec is not None:
                self._delete(spec, hosts, tuple(copies))

        self._jobs.append(_Job(self.behind(drop), then))

    def _delete(self, spec: StepSpec, hosts: Sequence[HostId], copies: Sequence[Copy]) -> None:
        for left in reversed(range(_TRIES)):
            try:
                self.asker.ask(spec, hosts, partial(drop_copies, copies=copies))
                return
            except AnabranchError as error:
                if not left:
                    raise
                log.info("deleting copies again error=%s", error)

    def poll(self) -> None:
        """Tell what has ended."""
        for job in [job for job in self._jobs if job.future.done()]:
            self._jobs.remove(job)
            job.then(job.future)

    def keep_handles(self, workers: tuple[HostId, ...]) -> None:
        """Let go of what other layouts needed."""
        self.runner.keep_handles(workers)

    def drain(self) -> None:
        """Wait for what is under way and forget it: a recovery follows, or the end."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            try:
                job.future.result()
            except AnabranchError as error:
                log.info("background work failed error=%s", error)

    def close(self) -> None:
        self.drain()
        self._thread.shutdown()
        self.asker.close()
        self.copier.close()


def _nothing(spec: StepSpec, host: HostId) -> None:
    pass


def coming_spec(standing: Standing, placement: Placement) -> StepSpec:
    """What hosts are told of a placement that is about to come."""
    return replace(
        standing.spec(Attempt(0)),
        layout=replace(placement.layout, inputs={}),
        incarnations=placement.incarnations,
        cuts=placement.cuts,
        generation=placement.generation,
        work=((),) * len(placement.layout.workers),
    )
