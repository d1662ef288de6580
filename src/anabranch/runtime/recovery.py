"""Bring every shard of a job to one version of its state: at the start of a run, and when a fault has cost state.

Theory of operation.  The machines of `protocol` decide; this does what they say.  Every worker is asked which
versions it can open:

* LIVE, when each of its shards is the one that the layout names and stands where the last commit record says;
* every checkpoint whose manifest and files are there, since they are shared by all; version 0, the empty state, as
  long as the step log goes back to step 0.

The newest that all can open is opened.  For LIVE there is nothing to do.  For a checkpoint at step *c*, a shard that
survived is rolled back to *c* by its undo records, and all others are rebuilt from the checkpoint's files, as new
incarnations.  Steps from *c* to the end of the log are then replayed (`replay`).

REV-1  A shard is trusted only if it is of the job, host and incarnation that the newest layout record names.  At the
       last committed step it must also have been written by the coordinator that committed it: another one that was
       fenced out may have run the same step over other input.
REV-2  The layout record that names the new incarnations is written after they are complete.  A crash before it leaves
       shards that REV-1 rejects, and they are rebuilt again.
REV-3  All of this happens in an epoch of its own, so tasks of earlier ones can write nothing any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from anabranch import crash
from anabranch.connect.inputlog import is_whole
from anabranch.errors import CorruptError, JobDirError
from anabranch.flow.plan import Plan
from anabranch.log.steplog import Progress, StepLog
from anabranch.model.ids import Attempt, Epoch, RegionId, ShardId, Step, WorkerId
from anabranch.model.layout import Layout
from anabranch.model.placement import Placement, anew, next_version
from anabranch.protocol.coordinator import Fail
from anabranch.protocol.fleet import AskVersions, Command, Fleet, OpenAll, RunStep
from anabranch.protocol.versions import LIVE, Version
from anabranch.runtime.hosts import RollCall, find_hosts, starting_placement
from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.settings import Settings
from anabranch.runtime.standing import Standing
from anabranch.spark.background import restore_worker, roll_back_worker, shard_versions, sweep
from anabranch.spark.job import StepRunner
from anabranch.state.manifest import Manifest, empty_manifest
from anabranch.state.survey import ShardFound
from anabranch.state.versions import Versions
from anabranch.version import __version__

log = logging.getLogger(__name__)

_REBUILT = crash.declare("recovery.rebuilt", "lost shards are rebuilt, survivors not yet rolled back")
_OPENED = crash.declare(
    "recovery.opened", "all shards are at one version, the layout that names them not yet written"
)


class Recovery:
    """Opens one version of the state on all workers.  Used again for each recovery of a run."""

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        jobdir: JobDir,
        steplog: StepLog,
        runner: StepRunner,
        roll: RollCall,
        note: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self.jobdir = jobdir
        self.steplog = steplog
        self.runner = runner
        self.roll = roll
        self.note = note
        self.versions = Versions(jobdir.checkpoints)
        self.plan = plan
        self.regions = sorted({p.region for p in plan.operators if p.region is not None})
        self.live = False
        """Whether the state was opened as it was at the last commit record."""

    def open(
        self,
        fleet: Fleet,
        epoch: Epoch,
        *,
        first: bool = True,
        target: tuple[Layout, dict[str, Any]] | None = None,
    ) -> tuple[Standing, dict[int, Manifest]]:
        """Choose a version and open it.

        Args:
            fleet: who does the choosing.
            epoch: of this recovery.
            first: whether a run begins, and its settings say how many workers and hosts there shall be; later in a run, it
                goes on with those that it has.
            target: the layout to go on in, whatever the settings say, and why it is another one.

        Returns:
            Where the run stands, behind the step log's end when steps must be replayed; and the checkpoints that
            can be gone back to, by number.

        Raises:
            JobDirError: no version can be opened by all workers; says why.
        """
        committed = self.steplog.load()
        before = self.jobdir.placement(committed.placement)
        placement = self._place(before, first, None if target is None else target[0])
        standing = Standing(
            job=self.jobdir.job()["id"],
            epoch=epoch,
            placement=placement,
            progress=committed,
            keep_undo_from=Step(0),
            state_root=self.settings.state_dir or str(self.jobdir.state),
            outputs_root=self.jobdir.outputs.url,
        )
        # Of a shard that is cut, no copy is whole.
        halves = before.cuts.keys() - placement.cuts.keys() if before is not None else frozenset()
        manifests = self._open_newest(fleet, standing, halves, made=before is not None)
        crash.point(_OPENED)
        placement = standing.placement
        if before is None:
            self.jobdir.write_layout(placement, Step(0), {"kind": "first"})
        elif placement != before:
            if placement.version == before.version:
                placement = standing.placement = next_version(placement, placement.layout)
            kind = "restart" if placement.incarnations == before.incarnations else "recovery"
            why = {"kind": kind} if target is None else target[1]
            self.jobdir.write_layout(placement, standing.progress.next_step, why)
        standing.progress.placement = placement
        if before is not None:
            # What a migration or a coordinator before this one has left behind.
            self.runner.on_workers(standing.spec(Attempt(0)), sweep)
        return standing, {number.number: one for number, one in manifests.items() if number.number}

    def _place(self, before: Placement | None, first: bool, target: Layout | None) -> Placement:
        if target is not None and before is not None:
            return next_version(anew(before, replace(target, version=before.version)), target)
        settings = self.settings if first else replace(self.settings, workers=None, hosts=None)
        return starting_placement(
            find_hosts(self.roll, settings, before), settings, before, self.jobdir.sharding()
        )

    def _open_newest(
        self, fleet: Fleet, standing: Standing, halves: Collection[ShardId], made: bool
    ) -> dict[Version, Manifest]:
        """Obey the machines until all workers have opened a version; returns the usable checkpoints."""
        trimmed = self._trimmed()
        manifests = self._manifests(empty=not trimmed)
        broken: dict[Version, str] = {}
        found: list[list[ShardFound]] = []
        committed = standing.progress
        last = self._last_epoch(committed)
        workers = [WorkerId(number) for number in range(len(standing.layout.workers))]
        commands: list[Command] = fleet.begin(workers)
        while True:
            match commands:
                case [AskVersions(), *_]:
                    found = self._survey(standing) if made else [[] for _ in workers]
                    for worker in workers:
                        obstacles = trimmed | broken
                        versions = {*manifests}
                        if made and not (wrong := self._not_live(found[worker], standing, halves, last)):
                            versions.add(LIVE)
                        elif made:
                            obstacles[LIVE] = wrong
                        commands = fleet.answered_versions(worker, versions, obstacles)
                case [OpenAll(version), *_]:
                    try:
                        here = [one for many in found for one in many if one.shard not in halves]
                        self._open(version, standing, manifests, here)
                    except CorruptError as error:
                        if version == LIVE:
                            raise
                        self.note(f"checkpoint {version.number} cannot be used: {error}")
                        broken[version] = str(error)
                        del manifests[version]
                        standing.progress = committed
                        # Shards may have been rebuilt as of its step, which is beyond that of the version before it.
                        standing.epoch = self.jobdir.next_epoch()
                        commands = fleet.lost(workers)
                        continue
                    for worker in workers:
                        commands = fleet.opened(worker, standing.progress.next_step)
                case [RunStep(), *_]:
                    self._forget(broken)
                    return manifests
                case [Fail(reason), *_]:
                    raise JobDirError(f"{self.jobdir.path}: {reason}")
                case _:
                    raise AssertionError(f"the machines said {commands}")

    def _forget(self, broken: Iterable[Version]) -> None:
        """Let damaged checkpoints be none, now that another one was opened.

        A later run may not read the piece that is damaged: its shards are still there, or lie elsewhere in the space of
        hashes.  It would build the next checkpoints upon it, and trim those that are whole.
        """
        for version in broken:
            if version.number is not None:
                self.versions.drop(version.number)

    def _manifests(self, empty: bool) -> dict[Version, Manifest]:
        """Every checkpoint whose manifest can be read, and the empty state if all steps can be replayed."""
        found: dict[Version, Manifest] = {}
        for number in self.versions.list():
            try:
                found[Version(number)] = self.versions.manifest(number)
            except CorruptError as error:
                self.note(f"checkpoint {number} cannot be read: {error}")
        if empty:
            found[Version(0)] = empty_manifest(Progress().to_json(), self.plan.fingerprint, __version__)
        return found

    def _trimmed(self) -> dict[Version, str]:
        """Why the empty state is no version to begin with, if it is none: something of the first steps is gone."""
        names = [name for name in self.plan.inputs if not is_whole(self.jobdir.input_log(name))]
        if self.steplog.first:
            return {Version(0): f"the step log begins with step {self.steplog.first}"}
        if names:
            return {Version(0): f"the first rows of the log of input {names[0]!r} were trimmed"}
        return {}

    def _survey(self, standing: Standing) -> list[list[ShardFound]]:
        spec = standing.spec(Attempt(0))
        return self.runner.on_workers(spec, partial(shard_versions, regions=self.regions))

    def _last_epoch(self, progress: Progress) -> Epoch | None:
        """The epoch of the last commit record."""
        commit = self.steplog.commit(Step(progress.next_step - 1)) if progress.next_step else None
        return None if commit is None else Epoch(commit["epoch"])

    def _not_live(
        self, found: list[ShardFound], standing: Standing, halves: Collection[ShardId], last: Epoch | None
    ) -> str:
        """Why a worker's shards are not at the last committed step; empty when they are."""
        progress = standing.progress
        for one in found:
            if one.shard in halves:
                return f"shard {one.shard} was on its way to another host, and that host is no longer used"
            if one.state != "there":
                return one.detail
            for region in self.regions:
                expected = progress.markers.get(region, {}).get(one.shard)
                at = one.markers.get(region)
                # A step that was under way when the coordinator died is rolled back when it is run again.
                if at not in (expected, progress.next_step):
                    return f"shard {one.shard}, region {region!r}: expected at step {expected}, found at {at}"
                if at == progress.next_step - 1 and last is not None and one.epochs[region] != last:
                    return (
                        f"shard {one.shard}, region {region!r}: step {at} was committed by epoch {last}, and written here "
                        f"by epoch {one.epochs[region]}"
                    )
        return ""

    def _open(
        self,
        version: Version,
        standing: Standing,
        manifests: dict[Version, Manifest],
        found: list[ShardFound],
    ) -> None:
        self.live = version == LIVE
        if self.live:
            # A step that was under way is undone now: it may be planned anew, with other moves, by which not every copy
            # that it has written would be opened again.
            self.runner.on_workers(standing.spec(Attempt(0)), roll_back_worker)
            return
        manifest = manifests[version]
        halves = standing.placement.cuts.keys()
        survivors = {one.shard for one in found if one.reaches(manifest.step) and one.shard not in halves}
        shards = len(standing.layout.shards)
        survivors &= {ShardId(shard) for shard in range(shards)}
        standing.progress = Progress.from_json(manifest.progress)
        standing.progress.markers = fitting_markers(manifest, shards)
        lost = [ShardId(shard) for shard in range(shards) if shard not in survivors]
        if found:
            self._say_lost(version, lost, shards, found, manifest)
        incarnations = list(standing.incarnations)
        for shard in lost if found else ():
            incarnations[shard] = max(incarnations[shard] + 1, standing.epoch)
        # Shards that were cut are rebuilt whole, where the layout has them.
        standing.placement = replace(standing.placement, incarnations=tuple(incarnations), cuts={})
        spec = standing.spec(Attempt(0))
        if lost:
            rebuild = partial(
                restore_worker, storage=self.versions.storage, manifest=manifest, shards=frozenset(lost)
            )
            self.runner.on_workers(spec, rebuild)
            crash.point(_REBUILT)
        if survivors:
            self.runner.on_workers(spec, partial(roll_back_worker, shards=frozenset(survivors)))

    def _say_lost(
        self, version: Version, lost: list[ShardId], of: int, found: list[ShardFound], manifest: Manifest
    ) -> None:
        reasons = [one.detail for one in found if one.detail]
        why = f" ({reasons[0]})" if reasons else ""
        what = "the beginning" if version.number == 0 else f"checkpoint {version.number}"
        self.note(
            f"recovering from {what}, before step {manifest.step}: {len(lost)} of {of} shards are rebuilt{why}"
        )


def fitting_markers(manifest: Manifest, shards: int) -> dict[RegionId, dict[ShardId, Step]]:
    """The markers of a checkpoint for `shards` whole shards.

    Of a shard that was cut, what was written last in either of its copies counts: were it rebuilt with an older step,
    a later recovery would take it for state of that step.  Where the job had another number of shards then, all shards are
    rebuilt, and any step before the checkpoint will do, as long as all say the same.
    """
    markers = Progress.from_json(manifest.progress).markers
    # Of the empty state there is no layout.
    if len(manifest.layout.get("shards", ())) in (0, shards):
        fitting: dict[RegionId, dict[ShardId, Step]] = {region: {} for region in markers}
        for region, steps in markers.items():
            for slot, step in steps.items():
                shard = ShardId(slot % shards)
                fitting[region][shard] = max(step, fitting[region].get(shard, step))
        return fitting
    return {
        region: dict.fromkeys(map(ShardId, range(shards)), max(steps.values()))
        for region, steps in markers.items()
        if steps
    }
