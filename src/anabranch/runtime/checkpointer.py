"""Makes checkpoints beside the steps, as the machine in `protocol.checkpointing` says.

The machine lives in the step loop's thread and is told of every commit; what it orders (a snapshot, a manifest, a
trim) is done one at a time in a thread of its own, whose Spark job runs beside the steps' jobs.

CKR-1  The progress in a manifest is that of the step as of which its pieces were read: it is copied when the
       snapshot is ordered, before the next step commits.
CKR-2  A recovery waits for what is under way and throws its result away: shards may be at other steps afterwards.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from anabranch.connect.sink import Sink
from anabranch.connect.source import Source
from anabranch.errors import AnabranchError, CorruptError, ShardMismatch, SparkLost, WrongHost
from anabranch.log.steplog import Progress, StepLog
from anabranch.model.ids import Attempt, Step
from anabranch.protocol import checkpointing as machine
from anabranch.runtime.density import Density
from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.outputs import forget
from anabranch.runtime.settings import Settings
from anabranch.runtime.standing import Standing
from anabranch.spark.asking import HostAsker
from anabranch.spark.background import snapshot_host
from anabranch.spark.spec import StepSpec
from anabranch.state.manifest import Manifest, chain_pieces, is_dense, plan_work
from anabranch.state.versions import Versions
from anabranch.version import __version__

log = logging.getLogger(__name__)

_UNDO_LIMIT = 256 << 20
"""Undo records in all shards together, beyond which a checkpoint is due however young the last one is."""
_PAUSE = 0.02
_TRIES = 3
"""How often a checkpoint may fail that the flow waits for, before the flow goes on without."""
_NOT_KEPT = Step(1 << 62)


@dataclass(slots=True)
class _Job:
    """Something that the background thread does, and what its outcome means to the machine."""

    version: int
    future: Future[Any]
    then: Callable[[Any], machine.Event | None]


class Checkpointer:
    """Checkpoints of one run.  All methods are for the step loop's thread."""

    def __init__(
        self,
        settings: Settings,
        jobdir: JobDir,
        steplog: StepLog,
        sources: Mapping[str, Source],
        sinks: Mapping[str, Sink],
        asker: HostAsker,
        fingerprint: str,
        partitions: int,
        note: Callable[[str], None],
        waiting: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self.jobdir = jobdir
        self.steplog = steplog
        self.sources = sources
        self.sinks = sinks
        self.asker = asker
        self.fingerprint = fingerprint
        self.partitions = partitions
        self.note = note
        """Told what went wrong."""
        self.waiting = waiting
        """Told what a stop waits for."""
        self.versions = Versions(jobdir.checkpoints)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="anabranch-checkpoint")
        self._jobs: list[_Job] = []
        self._manifests: dict[int, Manifest] = {}
        """Of committed versions."""
        self._written: dict[int, Manifest] = {}
        """Of those whose pieces are written."""
        self._machine = machine.Checkpointer(machine.Settings())
        self._snapshot_at: Step | None = None
        self._asked = False
        self._may_stop = False
        self._alone = False
        """No step runs any more."""
        self._density = Density()
        self._failures = 0
        """Since somebody began to wait for a checkpoint."""
        self._failure = ""

    # What the step loop tells.

    def begin(self, standing: Standing, manifests: Mapping[int, Manifest]) -> None:
        """Start from where a recovery has brought the shards, with the versions that can be a base."""
        self.abandon()
        self._asked = self._alone = False
        self._manifests = dict(manifests)
        rules = machine.Settings(
            every_seconds=self.settings.checkpoint_seconds,
            every_steps=self.settings.checkpoint_steps,
            undo_limit_bytes=_UNDO_LIMIT if self.settings.checkpoints else None,
        )
        self._machine = machine.Checkpointer(
            rules,
            kept=tuple(machine.Kept(number, one.step) for number, one in sorted(manifests.items())),
            next_version=self.versions.next_version(),
            next_step=standing.progress.next_step,
            published=standing.progress.next_step,
            now=time.monotonic(),
        )
        self._keep_undo(standing)

    def committed(self, standing: Standing, undo_bytes: int) -> None:
        """The step before `standing.progress.next_step` was committed."""
        step = Step(standing.progress.next_step - 1)
        self._density.undo_bytes += undo_bytes
        self._tell(machine.StepCommitted(step, undo_bytes), standing)

    def published(self, step: Step, standing: Standing) -> None:
        """The outputs of all steps up to this one are visible."""
        self._tell(machine.Published(step), standing)

    def ask(self, standing: Standing) -> None:
        """Somebody wants a checkpoint of all that is committed.

        Until it is there, the same wish is found at every look.  Told again, the machine would take it for a new one,
        for the steps since, and never be done with it.
        """
        if not self._asked:
            self._asked = True
            self._tell(machine.Asked(), standing)

    def poll(self, standing: Standing) -> None:
        """Let time pass, and take what the background thread has finished."""
        while self._jobs and self._jobs[0].future.done():
            job = self._jobs.pop(0)
            try:
                event = job.then(job.future.result())
            except SparkLost:
                raise
            except AnabranchError as error:
                log.warning("a checkpoint failed version=%d error=%s", job.version, error)
                self.note(f"checkpoint {job.version} failed and is tried again: {error}")
                # Where state is lost, only a recovery helps.
                lost = isinstance(error, ShardMismatch | WrongHost)
                self._failures, self._failure = self._failures + (_TRIES if lost else 1), str(error)
                event = machine.SnapshotFailed(job.version, str(error))
            if event is not None:
                self._tell(event, standing)
        self._tell(machine.Tick(time.monotonic()), standing)

    def finish(self, standing: Standing, forced: Callable[[], bool]) -> bool:
        """Wait for the final checkpoint, while no step runs; False when the user would not.

        With checkpoints turned off there is none to wait for.
        """
        self._alone = True
        if not self.settings.checkpoints:
            return True
        self._tell(machine.StopAsked(), standing)
        while not self._may_stop:
            if forced():
                return False
            time.sleep(_PAUSE)
            self.poll(standing)
        self._drain()
        return True

    def settle(self, standing: Standing, forced: Callable[[], bool]) -> str | None:
        """Wait for a checkpoint of all that is committed, while no step runs; `begin` comes next.

        Returns:
            Why there is none, if it failed again and again, as where a host is lost, which only a step notices, or the disk
            is full; or the user would not wait.  Steps can go on then.
        """
        self._failures = 0

        def leave() -> bool:
            return self._failures >= _TRIES or forced()

        if self.settings.checkpoints:
            self._may_stop = False
            settled = self.finish(standing, leave)
            self._may_stop = False
        else:
            self._alone = True
            self.ask(standing)
            while self._asked and not leave():
                time.sleep(_PAUSE)
                self.poll(standing)
            settled = not self._asked
            self._drain()
        if settled:
            return None
        self.begin(standing, dict(self._manifests))
        return "the flow is to stop" if self._failures < _TRIES else f"its checkpoint failed: {self._failure}"

    def behind(self, action: Callable[[], Any]) -> Future[Any]:
        """Do something in the background when every checkpoint that was begun has ended."""
        return self._thread.submit(action)

    def abandon(self) -> None:
        """Wait for what is under way and forget it."""
        self._drain()
        self._jobs.clear()
        self._snapshot_at = None

    def close(self) -> None:
        self.abandon()
        self._thread.shutdown()
        self.asker.close()

    @property
    def reading(self) -> Step | None:
        """As of which step a checkpoint is being made; None: there is none under way."""
        return None if self._machine.running is None else self._snapshot_at

    def summary(self) -> dict[str, Any]:
        """For `status`."""
        newest = max(self._manifests.values(), key=lambda one: one.version, default=None)
        return {
            "running": self._machine.running,
            "newest": None
            if newest is None
            else {"version": newest.version, "step": newest.step, "time": newest.time},
        }

    # What the machine orders.

    def _tell(self, event: machine.Event, standing: Standing) -> None:
        for command in self._machine.handle(event):
            self._obey(command, standing)
        self._machine.validate()

    def _obey(self, command: machine.Command, standing: Standing) -> None:
        match command:
            case machine.StartSnapshot(version, at, since):
                self._start(version, at, since, standing)
            case machine.CommitManifest(version):
                self._submit(
                    version,
                    partial(self.versions.commit, self._written[version]),
                    lambda _: self._manifest_committed(version, standing),
                )
            case machine.TrimTo(step):
                end = standing.progress.next_step
                usable = frozenset(self._manifests)
                self._submit(min(usable), partial(self._trim, step, end, usable), lambda _: None)
            case machine.Served():
                self._asked = False
                self.jobdir.clear("checkpoint")
            case machine.WaitFor(reason):
                self.waiting(reason)
            case machine.MayStop():
                self._may_stop = True

    def _start(self, version: int, at: Step, since: Step | None, standing: Standing) -> None:
        progress = standing.progress
        assert at == progress.next_step, f"CKR-1: a snapshot as of step {at} at step {progress.next_step}"
        base = self._manifests.get(max(self._manifests, default=0))
        if not self.settings.checkpoints:
            # Undo records are not kept between snapshots that are only made on demand.
            base, since = None, None
        draft = Manifest(
            version=version,
            step=at,
            progress=json.loads(json.dumps(progress.to_json())),
            layout=standing.layout.to_json() | {"inputs": {}},
            partitions=self.partitions,
            fingerprint=self.fingerprint,
            engine=__version__,
            time=time.time(),
            pieces=(),
        )
        self._snapshot_at = at
        self._keep_undo(standing)
        # Copied, because the flow goes on and changes them.
        spec = replace(standing.spec(Attempt(0)), markers=Progress.from_json(draft.progress).markers)
        self._submit(
            version,
            partial(self._snapshot, spec, draft, base, since, self._density.begin()),
            self._snapshot_done,
        )

    def _snapshot(
        self, spec: StepSpec, draft: Manifest, base: Manifest | None, since: Step | None, dense: bool
    ) -> Manifest:
        """In the background thread: the manifest of the pieces that all hosts have written.

        When what changed cannot be told any more, or an old piece that was to be merged is damaged, all is written.
        """
        if base is None:
            return self._write(spec, draft, None, None)
        try:
            return self._write(spec, draft, base, since, dense)
        except (CorruptError, ShardMismatch) as error:
            log.warning("a full checkpoint is made instead version=%d error=%s", draft.version, error)
            return self._write(spec, draft, None, None)

    def _write(
        self,
        spec: StepSpec,
        draft: Manifest,
        base: Manifest | None,
        since: Step | None,
        dense: bool = False,
    ) -> Manifest:
        work = plan_work(base, draft.partitions, dense)
        answers = self.asker.ask(
            spec,
            spec.layout.hosts,
            partial(
                snapshot_host,
                storage=self.versions.storage,
                version=draft.version,
                since=since,
                partitions=draft.partitions,
                work=work,
            ),
            self._alone,
        )
        pieces = chain_pieces(base, work, [piece for pieces in answers for piece in pieces])
        return replace(draft, pieces=pieces)

    def _snapshot_done(self, manifest: Manifest) -> machine.Event:
        self._written = {manifest.version: manifest}
        self._density.learn(is_dense(manifest))
        return machine.SnapshotDone(manifest.version, manifest.step)

    def _manifest_committed(self, version: int, standing: Standing) -> machine.Event:
        self._snapshot_at = None
        self._manifests[version] = self._written.pop(version)
        for old in sorted(self._manifests)[: -machine.KEPT]:
            del self._manifests[old]
        self._keep_undo(standing)
        return machine.ManifestCommitted(version)

    def _trim(self, oldest_kept: Step, end: Step, usable: frozenset[int]) -> None:
        """In the background thread: forget what only versions before the oldest kept one needed.

        A version that a recovery found damaged does not count among the kept.  The records of a step stay as long as its
        outputs: they say which files those are, and what they came from.
        """
        self.versions.trim(machine.KEPT, set(self.versions.list()) - usable)
        if self.settings.retain_steps is not None:
            before = Step(min(oldest_kept, end - self.settings.retain_steps))
            forget(self.jobdir, self.sinks, self.steplog, before)
        oldest = self.versions.manifest(min(usable))
        for name, source in self.sources.items():
            source.trim(Progress.from_json(oldest.progress).positions.get(name, {}))

    def _keep_undo(self, standing: Standing) -> None:
        """The shards must be able to go back to the newest version, and to the snapshot under way."""
        if self.settings.checkpoints:
            newest = max(self._manifests, default=None)
            standing.marks_since = self._snapshot_at if newest is None else self._manifests[newest].step
            standing.keep_undo_from = Step(0) if newest is None else self._manifests[newest].step
        else:
            standing.keep_undo_from = _NOT_KEPT if self._snapshot_at is None else self._snapshot_at

    def _submit(
        self, version: int, action: Callable[[], Any], then: Callable[[Any], machine.Event | None]
    ) -> None:
        self._jobs.append(_Job(version, self._thread.submit(action), then))

    def _drain(self) -> None:
        for job in self._jobs:
            try:
                job.future.result()
            except AnabranchError as error:
                log.info("background work failed error=%s", error)
