"""Which machines of a cluster can hold shards, and a watch over those that a step needs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from py4j.protocol import Py4JError
from pyspark import SparkContext

from anabranch.model.ids import HostId

log = logging.getLogger(__name__)

_LOOK_EVERY = 1.0


def executor_hosts(context: SparkContext) -> list[str]:
    """The machines that have executors now, in a stable order; embedded, the driver is the executor."""
    executors = context._jsc.sc().statusStore().executorList(True)
    found = [executors.apply(place) for place in range(executors.size())]
    embedded = context.master.startswith("local")
    return sorted({one.hostPort().rpartition(":")[0] for one in found if embedded or one.id() != "driver"})


class HostWatch:
    """Cancels the Spark job of a step when one of its hosts is lost.

    Spark would let the tasks of that host wait for it as long as `spark.locality.wait` says before it ran them
    elsewhere, where they can only fail: on a cluster of three hosts, a killed one was noticed after 30 s.
    """

    def __init__(
        self,
        context: SparkContext,
        alive: Callable[[SparkContext], Sequence[str]] = executor_hosts,
        every: float = _LOOK_EVERY,
    ) -> None:
        self._context = context
        self._alive = alive
        self._every = every
        self._watched: tuple[str, frozenset[HostId]] | None = None
        """The group of the job under way and the hosts that it needs.  Replaced and never changed."""
        self._jobs = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="anabranch-hosts", daemon=True)
        self._thread.start()

    @contextmanager
    def over(self, hosts: Sequence[HostId]) -> Iterator[None]:
        """Watch over the hosts of the Spark job that this thread runs inside."""
        self._jobs += 1
        # A group of its own, so that what is cancelled a moment too late is not the next one.
        group = f"anabranch-step-{self._jobs}"
        try:
            self._context.setLocalProperty("spark.jobGroup.id", group)
            self._watched = group, frozenset(hosts)
        except (Py4JError, OSError) as error:
            # The job itself will say what is wrong.
            log.debug("no watch over hosts error=%s", error)
        try:
            yield
        finally:
            self._watched = None

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._every):
            watched = self._watched
            if watched is None:
                continue
            group, hosts = watched
            try:
                lost = hosts.difference(self._alive(self._context))
                # The one that is under way still; it may be over and the next one have no such host.
                if lost and self._watched is watched:
                    names = ", ".join(sorted(lost))
                    log.info("a host is lost, the step is given up hosts=%s", names)
                    # Again at the next look, if it takes that long: the step may have been between two jobs.
                    self._context._jsc.sc().cancelJobGroup(group, f"because there is no executor on {names}")
            except (Py4JError, OSError) as error:
                log.debug("could not look for hosts error=%s", error)


class NoWatch:
    """Where all hosts are this machine."""

    @contextmanager
    def over(self, hosts: Sequence[HostId]) -> Iterator[None]:
        yield

    def close(self) -> None:
        pass
