"""Rescalings that turn back, lose their coordinator, or both, at any moment: without Spark, step by step.

After every step the placement is a valid one, made of stores that are there; in the end it is the layout of before, or the
one that was wished for, and there are no other stores.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from anabranch.errors import ConfigError, StepAborted
from anabranch.log.steplog import Progress
from anabranch.model.ids import Epoch, HostId, Incarnation, ShardId, Step
from anabranch.model.layout import Layout, initial_layout
from anabranch.model.placement import Copy, Placement, next_version
from anabranch.model.sharding import DynamicSharding
from anabranch.runtime import migrating
from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.rescaling import Rescaler
from anabranch.runtime.settings import Settings
from anabranch.runtime.standing import Standing
from anabranch.runtime.targets import RescaleRequest

A, B, C = HOSTS = tuple(map(HostId, "abc"))
SHARDING = DynamicSharding(1 / 2)
"""One worker has 2 shards, three make do with 4, five have 16."""
MOST = 80
"""Moments within which any rescaling here ends."""
WAYS = {
    "out": (2, (A, B), RescaleRequest(3, (A, B, C), "fluid", 1024)),
    "in": (3, (A, B, C), RescaleRequest(2, (B,), "batched")),
    "across": (2, (A, B), RescaleRequest(2, (C,), "sudden")),
    "copied": (2, (A, B), RescaleRequest(2, (B, C), "hot")),
    "split": (1, (A,), RescaleRequest(5, (A, B, C), "sudden")),
    "split elsewhere": (1, (A,), RescaleRequest(5, (B, C), "hot")),
    "merged": (5, (A, B, C), RescaleRequest(1, (B,), "batched")),
}


Disk = dict[tuple[HostId, ShardId, int], Incarnation]
"""The stores there are, each at a path of its own."""


def store(copy: Copy) -> tuple[HostId, ShardId, int]:
    return copy.host, copy.shard, copy.generation


def stores(placement: Placement) -> Disk:
    return {store(copy): copy.incarnation for copy in placement.copies()}


class Hands:
    """In the place of a carrier: what it is asked for has happened when it is looked at for the second time."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.failures = 0
        """How many of the next copies fail; each leaves a store that nobody may trust."""
        self.waiting: list[tuple[Callable[[Any], None], Any]] = []
        self.ready: list[tuple[Callable[[Any], None], Any]] = []

    def prepare(self, spec: Any, final: Any, then: Callable[[Any], None]) -> None:
        sizes = {copy.slot: 3000 for copy in spec.placement.copies()}
        self.waiting.append((then, [sizes]))

    def copy(
        self,
        standing: Any,
        pairs: Any,
        since: Any,
        told: Callable[[int], None],
        then: Callable[[Any], None],
    ) -> None:
        targets = {target for _, target, _, _ in pairs}
        for target in targets:
            self.disk[store(target)] = target.incarnation
        told(len(targets))
        answer: Any = 1
        if self.failures:
            self.failures -= 1
            answer = StepAborted("a process died")
        self.waiting.append((then, answer))

    def drop(self, copies: Any, then: Callable[[Any], None]) -> None:
        for copy in copies:
            if self.disk.get(store(copy)) == copy.incarnation:
                del self.disk[store(copy)]
        self.waiting.append((then, None))

    def poll(self) -> None:
        ready, self.ready, self.waiting = self.ready, self.waiting, []
        for then, answer in ready:
            future: Future[Any] = Future()
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
            then(future)

    def drain(self) -> None:
        self.waiting, self.ready = [], []

    def keep_handles(self, workers: Any) -> None:
        pass


class Bench:
    """A flow whose steps do nothing but what a rescaler wants of them."""

    def __init__(self, root: Path, workers: int, hosts: tuple[HostId, ...]) -> None:
        self.root = root
        self.alive = [*HOSTS]
        self.reading: Step | None = None
        """The step as of which a checkpoint is being made."""
        self.origin = initial_layout(workers, hosts, SHARDING)
        incarnations = (0,) * len(self.origin.shards)
        self.standing = Standing(
            "job", Epoch(1), Placement(self.origin, incarnations), Progress(), Step(0), str(root), str(root)
        )
        self.disk = stores(self.standing.placement)
        self.lose_coordinator()

    def lose_coordinator(self) -> None:
        """Another one takes over, which knows what is in the placement and nothing else, and sweeps."""
        self._sweep()
        self.notes: list[str] = []
        self.hands = Hands(self.disk)
        carrier: Any = self.hands
        self.rescaler = Rescaler(
            Settings(), JobDir(self.root), carrier, lambda: self.alive, self.notes.append
        )
        self.rescaler.resume(self.standing)

    def moment(self) -> None:
        """What the step loop does between two looks at its inbox, and a step."""
        self.rescaler.poll(self.standing)
        moves = self.rescaler.next_moves(self.standing, snapshot=self.reading)
        if moves is not None:
            moves.placement.validate()
            assert moves.placement.version > self.standing.placement.version
            for moving in moves.moving:
                assert self.disk[store(moving.source)] == moving.source.incarnation
                if not moving.fresh:
                    assert self.disk[store(moving.target)] == moving.target.incarnation
                self.disk[store(moving.target)] = moving.target.incarnation
            self.standing.placement = moves.placement
        assert stores(self.standing.placement).items() <= self.disk.items()
        self.standing.progress.next_step = Step(self.standing.progress.next_step + 1)
        self.rescaler.committed(self.standing, 0.1, [])

    def fail(self) -> None:
        """A step fails for good, and the same coordinator recovers: what the step's plan said never was."""
        self.rescaler.poll(self.standing)
        moves = self.rescaler.next_moves(self.standing, snapshot=self.reading)
        for moving in () if moves is None else moves.moving:
            self.disk[store(moving.target)] = moving.target.incarnation
        self.rescaler.aborted(self.standing.progress.next_step)
        self.rescaler.carrier.drain()
        self._sweep()
        self.rescaler.resume(self.standing)

    def rebuild(self) -> None:
        """Stores were lost: all that is cut is whole again, where the layout has it, under other incarnations."""
        placement = self.standing.placement
        incarnations = tuple(one + 10 for one in placement.incarnations)
        placement = next_version(placement, placement.layout, incarnations=incarnations, cuts={})
        self.standing.placement = placement
        self.disk.update(stores(placement))
        self.rescaler.carrier.drain()
        self._sweep()
        self.rescaler.resume(self.standing)

    def _sweep(self) -> None:
        kept = stores(self.standing.placement)
        for path in [path for path, age in self.disk.items() if kept.get(path) != age]:
            del self.disk[path]

    @property
    def over(self) -> bool:
        return not self.rescaler.active and not self.rescaler.queue

    def run_to_its_end(self) -> None:
        for _ in range(MOST):
            if self.over:
                break
            self.moment()
        assert self.over, self.rescaler.summary()
        assert self.standing.placement.settled
        assert self.disk == stores(self.standing.placement)

    def is_in(self, layout: Layout) -> bool:
        found = self.standing.layout
        return (found.workers, found.shards) == (layout.workers, layout.shards)


def begin(root: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> tuple[Bench, Layout]:
    monkeypatch.setattr(JobDir, "sharding", lambda self: SHARDING)
    monkeypatch.setattr(JobDir, "write_layout", lambda *record: None)
    workers, hosts, wish = WAYS[way]
    bench = Bench(root, workers, hosts)
    bench.rescaler.ask(wish, bench.standing)
    assert bench.rescaler.current is not None
    return bench, bench.rescaler.current.target


def length(root: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> int:
    """The moments that a rescaling takes when nothing happens to it."""
    bench, target = begin(root, monkeypatch, way)
    moments = 0
    while not bench.over:
        bench.moment()
        moments += 1
    assert bench.is_in(target)
    return moments


@pytest.mark.parametrize(("way", "shards"), [("out", None), ("split", 16), ("merged", 2)])
def test_the_account_says_that_shards_split_or_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, shards: int | None
) -> None:
    bench, _ = begin(tmp_path, monkeypatch, way)
    seen = set()
    while not bench.over:
        bench.moment()
        account = bench.rescaler.summary()["migration"]
        seen.add((account["resharding"], account["copied"]))
    assert seen == {(None, None)} | ({(shards, shards)} if shards else set())
    assert bench.rescaler.summary()["migration"]["resharding"] is None


@pytest.mark.parametrize("way", WAYS)
def test_turning_back_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    for at in range(length(tmp_path, monkeypatch, way)):
        bench, target = begin(tmp_path, monkeypatch, way)
        for _ in range(at):
            bench.moment()
        wanted = bench.origin
        try:
            bench.rescaler.cancel()
        except ConfigError:
            # Nothing was left to be turned back but the last step.
            assert bench.rescaler.current is not None
            assert bench.rescaler.current.finishing
            wanted = target
        bench.run_to_its_end()
        assert bench.is_in(wanted), at


@pytest.mark.parametrize("way", WAYS)
def test_losing_the_coordinator_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    for at in range(length(tmp_path, monkeypatch, way)):
        bench, target = begin(tmp_path, monkeypatch, way)
        for _ in range(at):
            bench.moment()
        wanted = bench.origin if bench.standing.placement.settled else target
        bench.lose_coordinator()
        bench.run_to_its_end()
        assert bench.is_in(wanted), at


@pytest.mark.parametrize("failures", [1, 2, 3, 7])
@pytest.mark.parametrize("way", ["copied", "split", "split elsewhere", "merged"])
def test_copies_beside_the_steps_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, failures: int
) -> None:
    bench, target = begin(tmp_path, monkeypatch, way)
    bench.hands.failures = failures
    bench.run_to_its_end()
    shown = bench.rescaler.summary()["migration"]
    if way.startswith("split") and failures >= 3:
        # Nothing had changed yet, so it can be given up; shards that have moved must merge some time.
        assert (shown["state"], shown["error"]) == ("failed", "a process died")
        assert bench.is_in(bench.origin)
    else:
        assert (shown["state"], shown["error"]) == ("done", None)
        assert bench.is_in(target)


@pytest.mark.parametrize("way", ["copied", "split", "split elsewhere", "merged"])
def test_copies_that_fail_and_turning_back_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    for failures in (1, 2, 3, 7):
        for at in range(length(tmp_path, monkeypatch, way) + 2 * failures):
            bench, _ = begin(tmp_path, monkeypatch, way)
            bench.hands.failures = failures
            for _ in range(at):
                bench.moment()
            try:
                bench.rescaler.cancel()
            except ConfigError:
                break
            bench.run_to_its_end()
            assert bench.is_in(bench.origin), (failures, at)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("harm", [Bench.fail, Bench.rebuild])
@pytest.mark.parametrize("way", WAYS)
def test_recovering_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, harm: Callable[[Bench], None], turned: bool
) -> None:
    for at in range(length(tmp_path, monkeypatch, way)):
        bench, target = begin(tmp_path, monkeypatch, way)
        for _ in range(at):
            bench.moment()
        wanted = target
        if turned:
            with suppress(ConfigError):
                bench.rescaler.cancel()
                wanted = bench.origin
        harm(bench)
        bench.run_to_its_end()
        assert bench.is_in(wanted), at


@pytest.mark.parametrize("way", WAYS)
def test_turning_back_and_losing_the_coordinator_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    for at in range(length(tmp_path, monkeypatch, way)):
        for later in range(1, MOST):
            bench, target = begin(tmp_path, monkeypatch, way)
            for _ in range(at):
                bench.moment()
            try:
                bench.rescaler.cancel()
            except ConfigError:
                break
            for _ in range(later):
                bench.moment()
            if bench.over:
                break
            intent = bench.standing.placement.intent
            bench.lose_coordinator()
            bench.run_to_its_end()
            wanted = target if intent is not None and not intent.cancelled else bench.origin
            assert bench.is_in(wanted), (at, later)


@pytest.mark.parametrize("crash", [False, True])
def test_a_host_is_lost_before_anything_has_come_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: bool
) -> None:
    bench, _ = begin(tmp_path, monkeypatch, "split")
    while len(bench.standing.layout.shards) == len(bench.origin.shards):
        bench.moment()
    assert not bench.over
    assert C not in bench.standing.layout.workers
    bench.alive.remove(C)
    bench.fail()
    if crash:
        bench.lose_coordinator()
    # It may come again, and steps go on meanwhile.
    for _ in range(20):
        bench.moment()
        assert C not in bench.standing.layout.workers
    assert not bench.over
    assert len(bench.notes) == 1
    monkeypatch.setattr(migrating, "_PATIENCE", 0.0)
    monkeypatch.setattr(migrating, "_PAUSE", 0.0)
    current = bench.rescaler.current
    assert current is not None
    current.retry_at = 0.0
    bench.run_to_its_end()
    assert bench.is_in(bench.origin)
    shown = bench.rescaler.summary()["migration"]
    assert (shown["state"], shown["error"]) == ("failed", "c has no executor")


def test_a_host_that_comes_again_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, target = begin(tmp_path, monkeypatch, "split")
    while len(bench.standing.layout.shards) == len(bench.origin.shards):
        bench.moment()
    bench.alive.remove(C)
    bench.fail()
    bench.moment()
    bench.alive.append(C)
    monkeypatch.setattr(migrating, "_PAUSE", 0.0)
    current = bench.rescaler.current
    assert current is not None
    current.retry_at = 0.0
    bench.run_to_its_end()
    assert bench.is_in(target)


def test_checkpoints_that_follow_one_another_do_not_hold_what_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, _ = begin(tmp_path, monkeypatch, "out")
    while not bench.standing.placement.cuts:
        bench.moment()
    bench.reading = Step(bench.standing.progress.next_step - 1)
    bench.rescaler.cancel()
    cut = {**bench.standing.placement.cuts}
    for _ in range(10):
        bench.moment()
    # It was begun before the step in which the cursor moved, and would see what comes back.
    assert bench.standing.placement.cuts == cut
    for _ in range(MOST):
        bench.reading = Step(bench.standing.progress.next_step)
        bench.moment()
    assert bench.over
    assert bench.is_in(bench.origin)


def test_a_cancel_that_is_refused_leaves_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, _ = begin(tmp_path, monkeypatch, "out")
    current = bench.rescaler.current
    assert current is not None
    poll = bench.rescaler.poll
    monkeypatch.setattr(bench.rescaler, "poll", lambda standing: None)
    while poll(bench.standing) or not current.finishing:
        bench.moment()
    assert bench.rescaler.active
    bench.rescaler.ask(RescaleRequest(2, (A, B)), bench.standing)
    with pytest.raises(ConfigError, match="over but for its last step"):
        bench.rescaler.cancel()
    assert len(bench.rescaler.queue) == 1


def test_a_stop_start_that_is_cancelled_before_the_flow_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, _ = begin(tmp_path, monkeypatch, "out")
    bench.run_to_its_end()
    bench.rescaler.ask(RescaleRequest(2, (A, B), "stop-start"), bench.standing)
    bench.rescaler.cancel()
    assert bench.rescaler.stop_start() is None
    assert bench.rescaler.summary()["migration"]["state"] == "cancelled"


def test_a_stop_start_whose_checkpoint_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, target = begin(tmp_path, monkeypatch, "out")
    bench.run_to_its_end()
    bench.rescaler.ask(RescaleRequest(2, (A, B), "stop-start"), bench.standing)
    assert bench.rescaler.stop_start() is not None
    bench.rescaler.not_stopped("its checkpoint failed: the disk is full")
    assert bench.rescaler.stop_start() is None
    assert bench.rescaler.summary()["migration"]["state"] == "failed"
    assert bench.is_in(target)
