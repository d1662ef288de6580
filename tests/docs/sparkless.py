"""`anabranch.run` without Spark: the real coordinator, with stages called in this process.

Job directory, step log, sinks and errors are the real ones; only the shuffle is a list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from anabranch.errors import EngineError
from anabranch.flow.plan import Plan
from anabranch.model.ids import HostId, WorkerId
from anabranch.runtime import coordinator, steploop
from anabranch.spark.blob import decode
from anabranch.spark.spec import Report, StepSpec
from anabranch.spark.stage import run_stage


class SparklessRunner:
    """Takes the place of `spark.job.StepRunner`."""

    def __init__(self, context: None, plan: Plan, placed: bool) -> None:
        self.plan = plan

    def run(self, spec: StepSpec) -> list[Report]:
        waiting: list[list[bytes]] = [[] for _ in range(spec.workers)]
        for stage in range(self.plan.depth + 1):
            leaving: list[list[bytes]] = [[] for _ in range(spec.workers)]
            for worker, arrived in enumerate(waiting):
                for receiver, blob in run_stage(self.plan, spec, stage, WorkerId(worker), arrived):
                    leaving[receiver].append(blob)
            waiting = leaving
        return [
            Report.from_wire(wire) for blobs in waiting for blob in blobs for wire in decode(blob).reports
        ]

    def prepare(self, spec: StepSpec, workers: tuple[HostId, ...]) -> None:
        pass

    def keep_handles(self, workers: tuple[HostId, ...]) -> None:
        pass

    def on_workers(self, spec: StepSpec, ask: Callable[[StepSpec, WorkerId], Any]) -> list[Any]:
        return [ask(spec, WorkerId(worker)) for worker in range(spec.workers)]

    def forget_handles(self) -> None:
        pass

    def close(self) -> None:
        pass


class SparklessAsker:
    """Takes the place of `spark.asking.HostAsker`."""

    def __init__(self, context: None, placed: bool) -> None:
        pass

    def ask(
        self, spec: StepSpec, hosts: Any, ask: Callable[[StepSpec, HostId], Any], alone: bool = False
    ) -> list[Any]:
        return [ask(spec, host) for host in hosts]

    def close(self) -> None:
        pass


class SparklessCopier:
    """Takes the place of `spark.copying.HostCopier`: no page copies beside the steps without Spark."""

    def __init__(self, context: None, tables: Any, placed: bool) -> None:
        pass

    def copy(self, spec: StepSpec, pairs: Any, since: Any) -> int:
        raise EngineError("state is copied beside the steps by Spark jobs; there is no Spark here")

    def close(self) -> None:
        pass


@contextlib.contextmanager
def without_spark() -> Iterator[None]:
    """Inside, every run that is given no Spark context does without."""
    real_runner, real_spark = steploop.StepRunner, coordinator.Coordinator._spark

    def runner(context: Any, plan: Plan, placed: bool) -> Any:
        return SparklessRunner(None, plan, placed) if context is None else real_runner(context, plan, placed)

    def spark(self: coordinator.Coordinator) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.context is None else real_spark(self)

    real_asker, real_copier, real_background = steploop.HostAsker, steploop.HostCopier, steploop.Background

    def background(context: Any) -> Any:
        return None if context is None else real_background(context)

    def copier(background: Any, tables: Any, placed: bool) -> Any:
        made = SparklessCopier if background is None else real_copier
        return made(background, tables, placed)

    def asker(background: Any, placed: bool) -> Any:
        return SparklessAsker(None, placed) if background is None else real_asker(background, placed)

    real_check = steploop.check_alive

    def check(context: Any) -> None:
        if context is not None:
            real_check(context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steploop, "check_alive", check)
        patch.setattr(steploop, "StepRunner", runner)
        patch.setattr(steploop, "Background", background)
        patch.setattr(steploop, "HostAsker", asker)
        patch.setattr(steploop, "HostCopier", copier)
        patch.setattr(coordinator.Coordinator, "_spark", spark)
        yield
