"""The step loop: plan, run, commit, publish; again.

Theory of operation.  The coordinator is the only one that decides anything.  It cuts the next step out of the
inputs, runs it as one Spark job while the plan record is being written, and creates the commit record.  A
step that fails leaves nothing visible; it is run again, whole, under the next attempt number, and every
shard that the failed attempt had written rolls itself back first.

Safety: for every step, either its commit record exists and all of its outputs and state are those of one
complete attempt, or it does not exist and no reader can see any of it.

CO-1  A step's commit record is created after its plan record and all its staged files are durable.
CO-2  Step n+1 starts after the commit record of n is durable.
CO-3  The fence (epoch, step, attempt) grows with every job that may write.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pyspark import SparkContext

from anabranch.connect.sink import Sink
from anabranch.connect.sinks import parquet
from anabranch.connect.source import Slice
from anabranch.errors import AnabranchError, EngineError, Fenced, UserError
from anabranch.flow.plan import DEAD_LETTERS, Plan
from anabranch.log.steplog import SNAPSHOT_EVERY, Progress, StepLog
from anabranch.model.ids import Attempt, Epoch, Step
from anabranch.model.layout import Layout, with_partitions
from anabranch.runtime.hosts import find_hosts, starting_layout, wait_for_hosts
from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.observe import Listener, StepDone
from anabranch.runtime.outputs import discard_attempts, publish
from anabranch.runtime.planner import Backlog, Planner
from anabranch.runtime.settings import Settings
from anabranch.runtime.sizing import StepSizer
from anabranch.runtime.status import StatusBoard
from anabranch.spark.job import StepRunner
from anabranch.spark.session import borrowed, spark_context
from anabranch.spark.shards import create_shards, inspect_shards, sync_shards
from anabranch.spark.spec import Report, StepSpec
from anabranch.storage import environment

log = logging.getLogger(__name__)

_POLL = 0.02
_FIRST_PAUSE = 0.1
_SEATS_KEPT = 4096
"""Input partitions that keep their worker while they have nothing to read."""


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

    def request_stop(self) -> None:
        """Ask for an orderly stop after the step under way; safe from a signal handler."""
        self._stop = True

    def run(self) -> Progress:
        """Run until stopped; returns what all committed steps add up to.

        Raises:
            UserError: something the user can mend; the job directory is as after the last committed step.
            EngineError: a step failed `max_attempts` times.
        """
        directory = self.jobdir
        if directory.exists():
            directory.check_same_flow(self.plan)
        with directory.locked() as epoch:
            job = directory.job() if directory.exists() else directory.create(self.plan)
            directory.clear_wishes()
            self.board = StatusBoard(directory, self.plan.name, epoch)
            try:
                with self._spark() as context:
                    # Spark's Python processes may be on other machines, or older than these variables.
                    places = [
                        self.jobdir.path,
                        *(sink.fingerprint().get("path") for sink in self.sinks.values()),
                    ]
                    if shipped := environment(places):
                        context.environment.update(shipped)
                    progress = _Run(self, context, job["id"], epoch).run()
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


class _Run:
    """One coordinator's life on one Spark context."""

    def __init__(self, coordinator: Coordinator, context: SparkContext, job: str, epoch: Epoch) -> None:
        self.co = coordinator
        self.context = context
        self.job = job
        self.epoch = epoch
        self.jobdir = coordinator.jobdir
        self.log = StepLog(self.jobdir.log)
        self.progress = self.log.load()
        self.runner = StepRunner(context, coordinator.plan, placed=not coordinator.settings.embedded)
        # Plan records are written, and outputs published, beside the Spark job of a step; each in order.
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="anabranch-plan")
        self.publisher = ThreadPoolExecutor(1, thread_name_prefix="anabranch-publish")
        self.published: Future[None] | None = None
        self.layout = self._settle_layout()

    def run(self) -> Progress:
        sources = self.co.planner.sources
        try:
            self._publish_last()
            for name, source in sources.items():
                source.start(self.jobdir.input_log(name))
            self._loop()
            self._await_published()
            self.co.listener.stopping("syncing state to disk")
            self._sync()
        except UserError:
            # What is committed stays good over a power failure too, however long the user takes to mend the rest.
            self._sync()
            raise
        finally:
            for source in sources.values():
                source.close()
            self.writer.shutdown()
            self.publisher.shutdown()
            self.runner.close()
        return self.progress

    def _sync(self) -> None:
        self.runner.on_workers(self._spec(Attempt(0), {}), sync_shards)
        self.log.snapshot(self.progress)

    # Starting.

    def _settle_layout(self) -> Layout:
        before = self.jobdir.layout()
        hosts = find_hosts(self.context, self.co.settings, before)
        self.layout = layout = starting_layout(hosts, self.co.settings, before)
        spec = self._spec(Attempt(0), {})
        if before is None:
            self.runner.on_workers(spec, create_shards)
        else:
            regions = [p.region for p in self.co.plan.operators if p.region is not None]
            self.runner.on_workers(spec, partial(inspect_shards, regions=sorted(set(regions))))
        if layout is not before:
            # Written last: a crash before this leaves empty shards, which creating them again accepts.
            self.jobdir.write_layout(layout, self.progress.next_step)
        self.co.listener.started(layout, self.progress)
        self.co.board.started(layout, self.progress)
        return layout

    def _publish_last(self) -> None:
        """Finish what a coordinator that died between commit and publish left, and clear failed attempts' files."""
        last = Step(max(0, self.progress.next_step - 1))
        commit = self.log.commit(last)
        if commit is not None:
            publish(self.jobdir, self.co.sinks, commit)
        discard_attempts(self.jobdir, self.co.sinks, self.log, last)

    # The loop.

    def _loop(self) -> None:
        steps = 0
        idle_since: float | None = None
        while not self.co.must_stop(steps):
            backlog = self.co.planner.backlog(self.progress.positions)
            if not backlog:
                if self.co.settings.until_idle and not self.co.planner.pending():
                    return
                if idle_since is None:
                    idle_since = time.monotonic()
                    self.co.listener.idle(self.progress)
                self.co.board.idle(self.progress)
                time.sleep(_POLL)
                continue
            idle_since = None
            self._step(backlog)
            steps += 1

    def _step(self, backlog: Backlog) -> None:
        started = time.monotonic()
        settings = self.co.settings
        workers = len(self.layout.workers)
        self._seat_partitions(backlog)
        slices = self.co.planner.cut(backlog, self.co.sizer.next_rows(), settings.max_step_bytes, workers)
        recorded = self.writer.submit(self._write_plan, slices)
        reports = self._attempts(slices, recorded)
        ran = time.monotonic()
        commit = self._commit(slices, reports, recorded, ran - started)
        # Readers see the step from here on; giving its files their final names can go on beside the next one.
        self.published = self.publisher.submit(publish, self.jobdir, self.co.sinks, commit)
        ended = time.monotonic()
        self.co.sizer.observe(commit["input_rows"], ended - started)
        done = StepDone(
            step=Step(commit["step"]),
            rows=commit["input_rows"],
            output_rows=sum(output["rows"] for output in commit["outputs"].values()),
            dead_letters=commit["dead_letters"],
            seconds=ended - started,
            backlog_rows=max(0, backlog.rows - commit["input_rows"]),
            backlog_bytes=max(0, backlog.size - sum(p.size for many in slices.values() for p in many)),
            workers=workers,
        )
        self.co.board.step(done, self.progress)
        self.co.listener.step(done, self.progress)

    def _seat_partitions(self, backlog: Backlog) -> None:
        """Give each input partition a worker.

        Who reads a slice does not change a result, and files come and go by the thousand, so this is not a new
        version of the layout and is not recorded.
        """
        waiting = {(name, one.partition) for name, many in backlog.available.items() for one in many}
        if waiting <= self.layout.inputs.keys():
            return
        seated = waiting if len(self.layout.inputs) > _SEATS_KEPT else waiting | self.layout.inputs.keys()
        inputs = with_partitions(self.layout, dict.fromkeys(sorted(seated))).inputs
        self.layout = replace(self.layout, inputs=inputs)

    def _attempts(self, slices: dict[str, list[Slice]], recorded: Future[None]) -> list[Report]:
        """Run the step until an attempt succeeds."""
        attempt = 0
        while True:
            try:
                return self.runner.run(self._spec(Attempt(attempt), slices))
            except (UserError, Fenced):
                recorded.cancel()
                raise
            except EngineError as error:
                attempt += 1
                self.co.board.fault(self.progress.next_step, attempt, error)
                self.co.listener.fault(self.progress.next_step, attempt, error)
                if attempt >= self.co.settings.max_attempts:
                    raise EngineError(
                        f"step {self.progress.next_step} failed {attempt} times; the last time: {error}"
                    ) from error
                time.sleep(_FIRST_PAUSE * 2 ** (attempt - 1))
                wait_for_hosts(self.context, self.co.settings, self.layout)
                self.runner.forget_handles()

    def _spec(self, attempt: Attempt, slices: dict[str, list[Slice]]) -> StepSpec:
        settings = self.co.settings
        step = self.progress.next_step
        return StepSpec(
            job=self.job,
            epoch=self.epoch,
            step=step,
            attempt=attempt,
            layout=replace(self.layout, inputs={}),
            incarnations=(0,) * len(self.layout.shards),
            markers=self.progress.markers,
            work=self.co.planner.assign(slices, self.layout),
            state_root=settings.state_dir or str(self.jobdir.state),
            outputs_root=self.jobdir.outputs.url,
            keep_undo_from=Step(max(0, step - 1)),
        )

    # Committing.

    def _write_plan(self, slices: dict[str, list[Slice]]) -> None:
        described = {name: [piece.to_json() for piece in pieces] for name, pieces in slices.items()}
        self.log.write_plan(self.progress.next_step, self.epoch, described, self.layout.version)

    def _commit(
        self, slices: dict[str, list[Slice]], reports: list[Report], recorded: Future[None], seconds: float
    ) -> dict[str, Any]:
        commit = commit_record(self.progress.next_step, self.epoch, self.layout, reports, seconds)
        recorded.result()
        # At most one step is committed and not yet published: the one that a restart publishes again.
        self._await_published()
        self.log.write_commit(self.progress.next_step, commit)
        described = {name: [piece.to_json() for piece in pieces] for name, pieces in slices.items()}
        self.progress.advance({"slices": described}, commit)
        if self.progress.next_step % SNAPSHOT_EVERY == 0:
            self.log.snapshot(self.progress)
        return commit

    def _await_published(self) -> None:
        published, self.published = self.published, None
        if published is not None:
            published.result()


def commit_record(
    step: Step, epoch: Epoch, layout: Layout, reports: list[Report], seconds: float
) -> dict[str, Any]:
    """What one complete attempt of a step adds up to."""
    outputs: dict[str, dict[str, Any]] = {}
    touched: dict[str, list[int]] = {}
    for report in sorted(reports, key=lambda report: (report.stage, report.worker)):
        for name, files in report.outputs.items():
            output = outputs.setdefault(name, {"rows": 0, "hash": 0, "files": []})
            for file in files:
                output["rows"] += file["rows"]
                output["hash"] = (output["hash"] + file["hash"]) % (1 << 64)
                output["files"].append({key: file[key] for key in ("path", "final", "rows", "size")})
        for region, shards in report.touched.items():
            touched.setdefault(region, []).extend(shards)
    return {
        "step": step,
        "epoch": epoch,
        "layout": layout.version,
        "time": time.time(),
        "seconds": round(seconds, 6),
        "input_rows": sum(rows for report in reports for rows in report.input_rows.values()),
        "inputs": _sum_by_name(reports, lambda report: report.input_rows),
        "outputs": outputs,
        "touched": {region: sorted(shards) for region, shards in touched.items()},
        "dead_letters": sum(report.dead_letters for report in reports),
    }


def _sum_by_name(reports: list[Report], of: Callable[[Report], dict[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for report in reports:
        for name, count in of(report).items():
            sums[name] = sums.get(name, 0) + count
    return sums
