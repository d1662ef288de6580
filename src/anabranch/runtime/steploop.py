"""The step loop: plan, run, commit, publish; again.

Theory of operation.  The coordinator is the only one that decides anything.  It brings all shards to one version of
the state (`recovery`), replays what the step log has beyond it, and then cuts step after step out of the inputs: each
runs as one Spark job while its plan record is being written, and ends with its commit record.  A step that
fails leaves nothing visible; it is run again, whole, under the next attempt number, and every shard that the failed
attempt had written rolls itself back first.  When state was lost, recovery begins anew, in a new epoch.

Safety: for every step, either its commit record exists and all of its outputs and state are those of one
complete attempt, or it does not exist and no reader can see any of it.

CO-1  A step's commit record is created after its plan record and all its staged files are durable.
CO-2  Step n+1 starts after the commit record of n is durable.
CO-3  The fence (epoch, step, attempt) grows with every job that may write.
CO-4  A step that was committed is only ever run again to bring state back; its output is compared and thrown away.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark import SparkContext

from anabranch.connect.source import Slice
from anabranch.errors import AnabranchError, CorruptError, EngineError, UserError
from anabranch.log.outputlog import OutputLog, Verdict
from anabranch.log.steplog import SNAPSHOT_EVERY, Progress, StepLog
from anabranch.model.ids import Attempt, Epoch, HostId, Step, WorkerId
from anabranch.model.layout import Layout, with_partitions
from anabranch.protocol.coordinator import Finished
from anabranch.protocol.fleet import Fleet
from anabranch.protocol.versions import LIVE
from anabranch.runtime.attempts import Attempts, MustRecover
from anabranch.runtime.carrying import Carrier
from anabranch.runtime.checkpointer import Checkpointer
from anabranch.runtime.commands import obey
from anabranch.runtime.commit import commit_record, sum_outputs, sum_touched
from anabranch.runtime.hosts import RollCall
from anabranch.runtime.observe import StepDone
from anabranch.runtime.outputs import discard_attempts, publish
from anabranch.runtime.planner import Backlog
from anabranch.runtime.recovery import Recovery
from anabranch.runtime.rescaling import Rescaler
from anabranch.runtime.standing import Moves, Standing
from anabranch.spark.asking import Background, HostAsker
from anabranch.spark.copying import HostCopier
from anabranch.spark.job import StepRunner
from anabranch.spark.placement import executor_hosts
from anabranch.spark.reads import check_reads, sum_reads
from anabranch.spark.session import check_alive
from anabranch.spark.shards import region_tables, sync_shards
from anabranch.spark.spec import Report
from anabranch.state.writeback import Turns

if TYPE_CHECKING:
    from anabranch.runtime.coordinator import Coordinator

log = logging.getLogger(__name__)

_POLL = 0.02
_LASTS = 2.0
"""Seconds after which a run is taken for one that goes on, and gets processes for work beside the steps."""
_SEATS_KEPT = 4096
"""Input partitions that keep their worker while they have nothing to read."""


class StepLoop:
    """One coordinator's life on one Spark context."""

    def __init__(self, coordinator: Coordinator, context: SparkContext, epoch: Epoch) -> None:
        self.co = coordinator
        self.context = context
        self.jobdir = coordinator.jobdir
        self.planner = coordinator.planner
        self.log = StepLog(self.jobdir.log)
        settings, plan = coordinator.settings, coordinator.plan
        placed = not settings.embedded
        self.runner = StepRunner(context, plan, placed)
        roll = RollCall(context)
        self.attempts = Attempts(self.runner, roll, settings, self._fault)
        self.recovery = Recovery(plan, settings, self.jobdir, self.log, self.runner, roll, self._note)
        background = Background(context)
        self.checkpointer = Checkpointer(
            settings,
            self.jobdir,
            self.log,
            self.planner.sources,
            coordinator.sinks,
            HostAsker(background, placed),
            plan.fingerprint,
            self.jobdir.job()["recovery_partitions"],
            self._note,
            self._waiting,
        )
        regions = sorted({p.region for p in plan.operators if p.region is not None})
        self.turns = Turns()
        self.carrier = Carrier(
            self.runner,
            HostAsker(background, placed),
            HostCopier(background, region_tables(plan, regions), placed),
            self.checkpointer.behind,
        )
        self.rescaler = Rescaler(
            settings,
            self.jobdir,
            self.carrier,
            self._alive,
            self._note,
        )
        self.fleet = Fleet()
        self.epoch = epoch
        self.standing: Standing
        self.outputs: OutputLog
        # Plan records are written, and outputs published, beside the Spark job of a step; each in order.
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="anabranch-plan")
        self.publisher = ThreadPoolExecutor(1, thread_name_prefix="anabranch-publish")
        self.published: Future[Step] | None = None

    def run(self) -> Progress:
        sources = self.planner.sources
        try:
            for name, source in sources.items():
                source.start(self.jobdir.input_log(name))
            self._recover(first=True)
            self._publish_last()
            self._loop()
            self._finish()
        except UserError:
            self._sync_quietly()
            raise
        finally:
            for source in sources.values():
                source.close()
            self.co.inbox.close()
            self.writer.shutdown()
            self.publisher.shutdown()
            self.carrier.close()
            self.checkpointer.close()
            self.runner.close()
        return self.standing.progress

    # Starting, and starting again.

    def _recover(self, *, first: bool = False, target: tuple[Layout, dict[str, Any]] | None = None) -> None:
        """Bring the state to the end of the step log, however often that takes.

        `first` at the start of a run, when it may be told to have other workers; `target`: the layout to go on in, and
        why.
        """
        self.co.board.recovering()
        while True:
            try:
                self.standing, manifests = self.recovery.open(
                    self.fleet, self.epoch, first=first, target=target
                )
                first, target = False, None
                self.epoch = self.standing.epoch
                end = self.log.load()
                self.outputs = OutputLog(self.log, self.log.first, end.next_step)
                self.checkpointer.begin(self.standing, manifests)
                self._replay(end.next_step)
                if not self.recovery.live:
                    # The step log has other markers: those of the copies that were there when its steps were new.
                    self.log.snapshot(self.standing.progress)
                break
            except MustRecover:
                pass
            except EngineError as error:
                step = self.log.load().next_step
                self._fault(step, 0, error)
                self.attempts.failed(error, step)
            self._next_epoch()
        self.checkpointer.begin(self.standing, manifests)
        self.rescaler.resume(self.standing)
        self.co.listener.started(self.standing.layout, self.standing.progress)
        self.co.board.started(self.standing.layout, self.standing.progress)

    def _next_epoch(self) -> None:
        self.checkpointer.abandon()
        self.carrier.drain()
        self.runner.forget_handles()
        self.epoch = self.jobdir.next_epoch()

    def _replay(self, end: Step) -> None:
        """Run committed steps again, from where the state is to the end of the log (CO-4)."""
        progress = self.standing.progress
        first = progress.next_step
        while progress.next_step < end:
            step = progress.next_step
            self.co.listener.replaying(step, first, end)
            commit = self.log.commit(step)
            plan = None if commit is None else self.log.plan(step, Epoch(commit["epoch"]))
            if commit is None or plan is None:
                raise CorruptError(
                    f"step {step} must be replayed, but its record in {self.jobdir.log.url} is gone; restore it from a "
                    "backup of the job directory"
                )
            slices = {
                name: [Slice.from_json(piece) for piece in many] for name, many in plan["slices"].items()
            }
            reports = self._attempt(slices, commit)
            check_reads(commit["reads"], sum_reads(reports), step)
            self.outputs.judge(step, sum_outputs(reports))
            # Where state was moved then does not matter: it is placed as it is now, and touched as it was just now.
            progress.advance({"slices": plan["slices"]}, {**commit, "touched": sum_touched(reports)})
            self.fleet.step_done(step)

    def _publish_last(self) -> None:
        """Finish what a coordinator that died between commit and publish left, and clear failed attempts' files."""
        last = Step(max(0, self.standing.progress.next_step - 1))
        commit = self.log.commit(last)
        if commit is not None:
            publish(self.jobdir, self.co.sinks, commit)
        discard_attempts(self.jobdir, self.co.sinks, self.log, last)

    # The loop.

    def _loop(self) -> None:
        steps = 0
        warm_up_at: float | None = time.monotonic() + _LASTS
        while not self.co.must_stop(steps):
            self._poll()
            if steps and warm_up_at is not None and time.monotonic() > warm_up_at:
                warm_up_at = None
                self.carrier.warm_up(self.standing.spec(Attempt(0)))
            backlog = self.planner.backlog(self.standing.progress.positions)
            if backlog or self.rescaler.wants_step:
                try:
                    self._step(backlog)
                    steps += 1
                except MustRecover:
                    self.rescaler.aborted(self.standing.progress.next_step)
                    self._await_published()
                    self._next_epoch()
                    self._recover()
            elif self.co.settings.until_idle and not self.planner.pending() and not self.rescaler.active:
                return
            else:
                check_alive(self.context)
                self.rescaler.idle(self.standing)
                self.co.listener.idle(self.standing.progress)
                self.co.board.idle(self.standing.progress)
                time.sleep(_POLL)

    def _poll(self) -> None:
        """What goes on beside the steps."""
        if self.published is not None and self.published.done():
            self._await_published()
        if self.jobdir.asked("checkpoint"):
            self.checkpointer.ask(self.standing)
        self.checkpointer.poll(self.standing)
        self.rescaler.poll(self.standing)
        self.co.inbox.serve(self._obey)
        if (wanted := self.rescaler.stop_start()) is not None:
            self._stop_start(wanted)
        self.co.board.checkpoints(self.checkpointer.summary())
        self.co.board.rescaling(self.rescaler.summary(), self.rescaler.scales.to_json())

    def _obey(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Do what somebody asked for through the control endpoint."""
        answer = obey(path, body, self.rescaler, self.standing)
        self.co.board.rescaling(self.rescaler.summary(), self.rescaler.scales.to_json(), now=True)
        return answer

    def _alive(self) -> list[HostId] | None:
        """The hosts that can be had; None: any number of logical ones."""
        if self.co.settings.embedded:
            return None
        return [HostId(host) for host in executor_hosts(self.context)]

    def _stop_start(self, wanted: tuple[Layout, dict[str, Any]]) -> None:
        """Rescale the way of a restart: a checkpoint, then all state is opened anew in the other layout."""
        self._await_published()
        why = self.checkpointer.settle(self.standing, lambda: self.co.must_stop(0))
        if why is not None:
            self.rescaler.not_stopped(why)
            return
        self._next_epoch()
        self._recover(target=wanted)
        self.rescaler.restarted(self.standing)

    def _step(self, backlog: Backlog) -> None:
        started = time.monotonic()
        settings = self.co.settings
        moves = self.rescaler.next_moves(self.standing, snapshot=self.checkpointer.reading)
        layout = self._seated(backlog, self.standing.layout if moves is None else moves.placement.layout)
        if moves is None:
            self.standing.seat(layout)
        else:
            moves = replace(moves, placement=replace(moves.placement, layout=layout))
        workers = len(layout.workers)
        slices = self.planner.cut(backlog, self.co.sizer.next_rows(), settings.max_step_bytes, workers)
        recorded = self.writer.submit(self._write_plan, slices, self.standing, moves)
        try:
            reports = self._attempt(slices, moves=moves)
        except BaseException:
            recorded.cancel()
            raise
        ran = time.monotonic()
        commit = self._commit(slices, reports, recorded, ran - started, moves)
        # Readers see the step from here on; giving its files their final names can go on beside the next one.
        self.published = self.publisher.submit(self._publish, commit)
        if self.attempts.repeated:
            # What the failed ones have staged.  Done now, it cannot be mistaken for output of a later step.
            self._await_published()
            discard_attempts(self.jobdir, self.co.sinks, self.log, Step(commit["step"]))
        self.checkpointer.committed(self.standing, sum(report.undo_bytes for report in reports))
        ended = time.monotonic()
        self.rescaler.committed(self.standing, ended - started, reports)
        self.co.sizer.observe(
            commit["input_rows"], ended - started, backlog.rows, usual=moves is None or not moves.moving
        )
        done = StepDone(
            step=Step(commit["step"]),
            rows=commit["input_rows"],
            output_rows=sum(output["rows"] for output in commit["outputs"].values()),
            dead_letters=commit["dead_letters"],
            seconds=ended - started,
            backlog_rows=max(0, backlog.rows - commit["input_rows"]),
            backlog_bytes=max(0, backlog.size - sum(p.size for many in slices.values() for p in many)),
            workers=workers,
            commit_seconds=ended - ran,
            output_seconds=_slowest(reports, "output"),
        )
        if moves is not None:
            self.co.board.layout(self.standing.layout)
        self.co.board.step(done, self.standing.progress)
        self.co.listener.step(done, self.standing.progress)

    def _seated(self, backlog: Backlog, layout: Layout) -> Layout:
        """The layout with a worker for each input partition.

        Who reads a slice does not change a result, and files come and go by the thousand, so this is not a new
        version of the layout and is not recorded.
        """
        waiting = {(name, one.partition) for name, many in backlog.available.items() for one in many}
        if waiting <= layout.inputs.keys():
            return layout
        seated = waiting if len(layout.inputs) > _SEATS_KEPT else waiting | layout.inputs.keys()
        inputs = with_partitions(layout, dict.fromkeys(sorted(seated))).inputs
        return replace(layout, inputs=inputs)

    def _attempt(
        self,
        slices: dict[str, list[Slice]],
        replayed: dict[str, Any] | None = None,
        moves: Moves | None = None,
    ) -> list[Report]:
        step = self.standing.progress.next_step
        layout = self.standing.layout if moves is None else moves.placement.layout
        work = self.planner.assign(slices, layout)
        self._enlist(layout)
        self.fleet.step_began(step)
        return self.attempts.run(
            self.standing,
            work,
            replayed,
            moves,
            weigh=self.rescaler.scales.wanted,
            write_back=self.turns.next(time.monotonic(), len(layout.shards)),
        )

    def _enlist(self, layout: Layout) -> None:
        """Begin a round with the workers of a step, where it has others than the last one.

        Whatever a worker that joins must have before its first row (routing, markers, its shards' state) comes with the step
        itself, so all can open the state as it is.
        """
        workers = [WorkerId(number) for number in range(len(layout.workers))]
        if self.fleet.workers == workers:
            return
        self.fleet.begin(workers)
        for worker in workers:
            self.fleet.answered_versions(worker, [LIVE])
        for worker in workers:
            self.fleet.opened(worker, self.standing.progress.next_step)

    def _fault(self, step: int, attempt: int, error: AnabranchError) -> None:
        self.co.board.fault(Step(step), attempt, error)
        self.co.listener.fault(Step(step), attempt, error)

    # Committing.

    def _write_plan(self, slices: dict[str, list[Slice]], standing: Standing, moves: Moves | None) -> None:
        placement = standing.placement if moves is None else moves.placement
        self.log.write_plan(
            standing.progress.next_step,
            standing.epoch,
            _described(slices),
            placement.version,
            None if moves is None else placement,
        )

    def _commit(
        self,
        slices: dict[str, list[Slice]],
        reports: list[Report],
        recorded: Future[None],
        seconds: float,
        moves: Moves | None,
    ) -> dict[str, Any]:
        standing, progress = self.standing, self.standing.progress
        step = progress.next_step
        placement = standing.placement if moves is None else moves.placement
        commit = commit_record(step, standing.epoch, placement.layout, reports, seconds)
        if self.outputs.judge(step, commit["outputs"]) is not Verdict.APPEND:
            raise EngineError(f"step {step} was planned anew, but the log has it already")
        recorded.result()
        # At most one step is committed and not yet published: the one that a restart publishes again.
        self._await_published()
        self.log.write_commit(step, commit)
        self.outputs.appended()
        standing.placement = placement
        plan = {"slices": _described(slices)}
        progress.advance(plan if moves is None else {**plan, "placement": placement.to_json()}, commit)
        self.fleet.step_done(step)
        self.attempts.progressed(step)
        if progress.next_step % SNAPSHOT_EVERY == 0:
            self.log.snapshot(progress)
        return commit

    def _await_published(self) -> None:
        published, self.published = self.published, None
        if published is not None:
            self.checkpointer.published(published.result(), self.standing)

    def _publish(self, commit: dict[str, Any]) -> Step:
        publish(self.jobdir, self.co.sinks, commit)
        return Step(commit["step"])

    # Stopping.

    def _finish(self) -> None:
        said = self.fleet.ask_stop()
        if said != [Finished(self.standing.progress.next_step)]:
            raise EngineError(f"the workers do not stop at step {self.standing.progress.next_step}: {said}")
        self._await_published()
        if self.checkpointer.finish(self.standing, lambda: self.jobdir.asked("force")):
            self._waiting("state to be synced to disk")
            self._sync_at_last()

    def _waiting(self, reason: str) -> None:
        self.co.board.waiting(reason)
        self.co.listener.stopping(reason)

    def _note(self, text: str) -> None:
        self.co.board.note(text)
        self.co.listener.note(text)

    def _sync_at_last(self) -> None:
        """Sync, however often that takes: a process that dies now is no reason for an orderly stop to fail."""
        step = self.standing.progress.next_step
        while True:
            try:
                return self._sync()
            except EngineError as error:
                self._fault(step, 0, error)
                self.attempts.failed(error, step)
                self.runner.forget_handles()

    def _sync(self) -> None:
        self.runner.on_workers(self.standing.spec(Attempt(0)), sync_shards)
        self.log.snapshot(self.standing.progress)

    def _sync_quietly(self) -> None:
        """After a user's error: what is committed stays good over a power failure too, however long she takes."""
        if hasattr(self, "standing"):
            try:
                self._sync()
            except EngineError as error:
                log.warning("could not sync state error=%s", error)


def _described(slices: dict[str, list[Slice]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [piece.to_json() for piece in pieces] for name, pieces in slices.items()}


def _slowest(reports: list[Report], part: str) -> float:
    """Seconds that the worker with the most of them spent in this part of its stages."""
    spent: dict[int, float] = {}
    for report in reports:
        spent[report.worker] = spent.get(report.worker, 0.0) + report.seconds.get(part, 0.0)
    return max(spent.values(), default=0.0)
