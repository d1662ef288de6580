"""Copies shards to other hosts beside the steps: Spark jobs of their own, at low priority.  On a cluster, to all hosts at
once; embedded, where all hosts are one machine, to one after the other, so that steps notice as little as can be.  Many
copies are made in several jobs, so that whoever waits can be told how far it is.

A job's first stage reads shards as of a step, in short transactions (`state.copying.copy_out`); the pieces travel
through Spark's shuffle; its second stage fills the copies.  Nobody trusts those before a step has switched to them.

As in a step, a shuffle whose file was lost looks like one that ended: every sender ends with a count for every receiver,
and a receiver that misses one fails the job.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import msgpack
from py4j.protocol import Py4JError

from anabranch.errors import AnabranchError, IncompleteInput
from anabranch.model.ids import HostId, RegionId, ShardId, Step
from anabranch.model.placement import Copy
from anabranch.spark import failure
from anabranch.spark.asking import Background
from anabranch.spark.background import markers_of
from anabranch.spark.dag import Dag, Exchanging
from anabranch.spark.moving import marks_since
from anabranch.spark.pools import Watch, begin
from anabranch.spark.shards import copy_path, host_dir, identity
from anabranch.spark.spec import StepSpec
from anabranch.state.cargo import Cargo
from anabranch.state.copying import Filler, copy_in, copy_out
from anabranch.state.identity import Fence
from anabranch.state.store import ShardStore

log = logging.getLogger(__name__)

Pair = tuple[Copy, Copy, int, int]
"""A copy that counts, one that is made of it, and the range of hashes that they share."""

_MOST_JOBS = 8
_LEAST_COPIES = 16
"""A job costs some tenths of a second, however little it copies."""


class HostCopier:
    """Copies between the hosts of one Spark context."""

    def __init__(
        self, background: Background, tables: Mapping[RegionId, tuple[str, ...]], placed: bool
    ) -> None:
        self._background = background
        self._tables = dict(tables)
        self._placed = placed
        self._handles: dict[tuple[HostId, ...], Any] = {}
        self._jobs = itertools.count(1)
        """Numbers every job, so that tasks of one that was given up cannot fill what a later one fills (CPY-4)."""

    def copy(
        self,
        spec: StepSpec,
        pairs: Sequence[Pair],
        since: Step | None,
        told: Callable[[int], None] = lambda copies: None,
    ) -> int:
        """Make the copies as of `spec.step`, or bring them there from `since`; returns the bytes that travelled.

        `told` is called, on this thread, with how many copies each job has made.

        Raises:
            AnabranchError: it failed; the copies are worth nothing then.
        """
        size = 0
        for some in jobs_of(pairs, one_host=not self._placed):
            size += self._copy(spec, some, since)
            told(len({target for _, target, _, _ in some}))
        return size

    def _copy(self, spec: StepSpec, pairs: Sequence[Pair], since: Step | None) -> int:
        hosts = tuple(sorted({copy.host for pair in pairs for copy in pair[:2]}))

        def job(dag: Dag) -> list[bytes]:
            # Numbered here, since it may be run twice.
            work = _Work(spec, tuple(pairs), since, hosts, self._tables, next(self._jobs))
            handles = self._handles_of(hosts)
            exchanged, shuffle = dag.exchanged(handles, Exchanging(_Out(work)), len(hosts))
            arrived = dag.beside(handles, exchanged) if self._placed else exchanged
            try:
                return dag.collect(arrived, _In(work))
            finally:
                self._free(shuffle)

        try:
            return sum(int(answer) for answer in self._background.run(spec, job))
        except AnabranchError:
            self.close()
            raise

    def _handles_of(self, hosts: tuple[HostId, ...]) -> Any:
        if hosts not in self._handles:
            self._handles[hosts] = self._background.steps.handles(hosts, self._placed)
        return self._handles[hosts]

    def _free(self, shuffle: Any) -> None:
        try:
            number = shuffle.rdd().dependencies().apply(0).shuffleId()
            self._background.context._jsc.sc().cleaner().get().doCleanupShuffle(number, False)
        except (Py4JError, AttributeError, OSError) as error:
            log.debug("could not free shuffle files error=%s", error)

    def close(self) -> None:
        """Release what this holds in Spark."""
        handles, self._handles = self._handles, {}
        for one in handles.values():
            try:
                one.unpersist(False)
            except (Py4JError, OSError) as error:
                log.warning("could not release handles error=%s", error)


def jobs_of(pairs: Sequence[Pair], *, one_host: bool) -> list[list[Pair]]:
    """What is copied in one job each: to one host, or evenly to all.  A copy that is made of several is made in one job."""
    by_host: dict[HostId | None, dict[Copy, list[Pair]]] = {}
    for pair in pairs:
        target = pair[1]
        by_host.setdefault(target.host if one_host else None, {}).setdefault(target, []).append(pair)
    jobs = []
    for made in by_host.values():
        number = min(_MOST_JOBS, -(-len(made) // _LEAST_COPIES))
        for first in range(number):
            jobs.append([pair for some in [*made.values()][first::number] for pair in some])
    return jobs


class _Work:
    """What both stages are told."""

    def __init__(
        self,
        spec: StepSpec,
        pairs: tuple[Pair, ...],
        since: Step | None,
        hosts: tuple[HostId, ...],
        tables: Mapping[RegionId, tuple[str, ...]],
        job: int,
    ) -> None:
        self.spec = spec
        self.pairs = pairs
        self.since = since
        self.hosts = hosts
        self.tables = dict(tables)
        self.job = job


class _Out:
    """Reads the shards of one host, each piece with the host that it is for; at the end a count for every host."""

    def __init__(self, work: _Work) -> None:
        self.work = work

    def __call__(self, partition: int, blobs: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
        for _ in blobs:
            pass
        work = self.work
        sent = [0] * len(work.hosts)
        try:
            for receiver, data in self._read(work.hosts[partition]):
                sent[receiver] += 1
                yield receiver, msgpack.packb((partition, data, None))
        except AnabranchError as error:
            raise failure.wrap(error) from error
        for receiver, count in enumerate(sent):
            yield receiver, msgpack.packb((partition, None, count))

    def _read(self, host: HostId) -> Iterator[tuple[int, bytes]]:
        work, spec = self.work, self.work.spec
        begin()
        watch = Watch()
        for source, target, low, end in work.pairs:
            if source.host != host:
                continue
            host_dir(spec, host)
            store = ShardStore.open(copy_path(spec, source), identity(spec, source))
            for cargo in copy_out(
                store,
                spec.step,
                spec.epoch,
                markers_of(spec, source),
                (low, end),
                work.tables,
                marks_since(spec, source, target),
                work.since,
                watch,
            ):
                yield work.hosts.index(target.host), replace(cargo, shard=target.shard).encode()


class _In:
    """Fills the copies of one host; gives the bytes that it got."""

    def __init__(self, work: _Work) -> None:
        self.work = work

    def __call__(self, partition: int, blobs: Iterator[bytes]) -> Iterator[bytes]:
        try:
            size = self._fill(self.work.hosts[partition], blobs)
        except AnabranchError as error:
            raise failure.wrap(error) from error
        yield b"%d" % size

    def _fill(self, host: HostId, blobs: Iterator[bytes]) -> int:
        work, spec = self.work, self.work.spec
        targets = {target.shard: target for _, target, _, _ in work.pairs if target.host == host}
        fence = Fence(spec.epoch, spec.step, spec.attempt)
        filler = Filler(spec.epoch, work.job, uuid4().bytes)
        begun: set[ShardId] = set()
        got, promised = [0] * len(work.hosts), [-1] * len(work.hosts)
        size = 0
        begin()
        watch = Watch()
        for blob in blobs:
            watch()
            if not blob:
                continue
            sender, data, count = msgpack.unpackb(blob)
            if data is None:
                promised[sender] = count
                continue
            got[sender] += 1
            cargo = Cargo.decode(data)
            target = targets[cargo.shard]
            first = work.since is None and cargo.shard not in begun
            begun.add(cargo.shard)
            copy_in(copy_path(spec, target), identity(spec, target), [cargo], fence, spec.step, first, filler)
            size += cargo.size
        if work.since is None:
            for shard in targets.keys() - begun:
                # A flow without state has shards too.
                target = targets[shard]
                copy_in(copy_path(spec, target), identity(spec, target), (), fence, spec.step, True, filler)
        if got != promised:
            raise IncompleteInput(
                f"copying to {host} as of step {spec.step}: {promised} pieces were sent by the hosts and {got} arrived; a "
                "shuffle file was lost"
            )
        return size
