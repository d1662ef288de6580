"""What a rescaler makes of hosts that go while a rescaling waits, prepares or runs; without Spark."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anabranch.errors import StepAborted
from anabranch.log.steplog import Progress
from anabranch.model.ids import Epoch, HostId, Step
from anabranch.model.layout import FixedSharding, initial_layout
from anabranch.model.placement import Placement, anew
from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.rescaling import Rescaler
from anabranch.runtime.settings import Settings
from anabranch.runtime.standing import Standing
from anabranch.runtime.status import StatusBoard
from anabranch.runtime.targets import RescaleRequest

A, B, C = HostId("a"), HostId("b"), HostId("c")


class Hands:
    """In the place of a carrier: whatever it is asked for has happened when it is next looked at, or has failed."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[Any], None], Any]] = []
        self.error: Exception | None = None

    def prepare(self, spec: Any, final: Any, then: Callable[[Any], None]) -> None:
        self.waiting.append((then, [{} for _ in spec.layout.hosts]))

    def weigh(self, spec: Any, then: Callable[[Any], None]) -> None:
        self.waiting.append((then, [dict.fromkeys(range(6), 10)]))

    def drop(self, copies: Any, then: Callable[[Any], None]) -> None:
        self.waiting.append((then, None))

    def poll(self) -> None:
        waiting, self.waiting = self.waiting, []
        for then, answer in waiting:
            future: Future[Any] = Future()
            if self.error is None:
                future.set_result(answer)
            else:
                future.set_exception(self.error)
            then(future)

    def drain(self) -> None:
        self.waiting.clear()

    def keep_handles(self, workers: Any) -> None:
        pass


class Bench:
    """A rescaler over two hosts, with a third that can be had, and the status that it would write."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(JobDir, "sharding", lambda self: FixedSharding(6))
        monkeypatch.setattr(JobDir, "write_layout", lambda *record: None)
        layout = initial_layout(2, [A, B], FixedSharding(6))
        self.standing = Standing(
            "job", Epoch(1), Placement(layout, (0,) * 6), Progress(), Step(0), str(root), str(root)
        )
        self.alive = [A, B, C]
        self.notes: list[str] = []
        self.hands = Hands()
        jobdir = JobDir(root)
        self.board = StatusBoard(jobdir, "f", Epoch(1))
        self.rescaler = Rescaler(
            Settings(),
            jobdir,
            self.hands,  # type: ignore[arg-type]
            lambda: self.alive,
            self.notes.append,
        )

    def poll(self) -> dict[str, Any]:
        self.rescaler.poll(self.standing)
        summary = self.rescaler.summary()
        self.board.rescaling(summary, None)
        shown: dict[str, Any] = summary["migration"]
        return shown

    def step(self) -> None:
        moves = self.rescaler.next_moves(self.standing, snapshot=None)
        if moves is not None:
            self.standing.placement = moves.placement
        self.standing.progress.next_step = Step(self.standing.progress.next_step + 1)
        self.rescaler.committed(self.standing, 0.1, [])

    def lose(self, host: HostId) -> None:
        """A host is lost, and the flow has recovered without it."""
        self.alive.remove(host)
        used = [one for one in (A, B) if one in self.alive]
        layout = initial_layout(2, used, FixedSharding(6))
        self.standing = replace(self.standing, placement=anew(self.standing.placement, layout))
        self.rescaler.resume(self.standing)
        self.board.rescaling(self.rescaler.summary(), None)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_the_account_says_how_many_shards_have_moved(bench: Bench) -> None:
    bench.rescaler.ask(RescaleRequest(3, strategy="batched"), bench.standing)
    seen = [(0, 0)]
    while (shown := bench.poll())["state"] != "done":
        seen.append((shown["shards_moved"], shown["shards_total"]))
        bench.step()
    assert (shown["shards_moved"], shown["shards_total"]) == (2, 2)
    assert set(seen) == {(0, 0), (0, 2), (1, 2), (2, 2)}
    assert seen == sorted(seen)


def test_an_idle_flow_is_weighed_beside_the_steps(bench: Bench) -> None:
    bench.rescaler.scales.wanted = True
    bench.rescaler.idle(bench.standing)
    bench.rescaler.idle(bench.standing)
    assert len(bench.hands.waiting) == 1
    bench.rescaler.poll(bench.standing)
    assert bench.rescaler.scales.to_json() == {"bytes": [10] * 6, "step": 0}
    bench.board.rescaling(bench.rescaler.summary(), bench.rescaler.scales.to_json())
    # Nothing else is written while a flow is idle.
    assert bench.board.said["sizes"] == {"bytes": [10] * 6, "step": 0}


def test_one_that_had_not_begun_fails_when_its_host_is_gone(bench: Bench) -> None:
    begun = bench.rescaler.ask(RescaleRequest(3), bench.standing)
    bench.board.rescaling(bench.rescaler.summary(), None)
    bench.lose(C)
    shown = bench.poll()
    assert (shown["id"], shown["state"]) == (begun["id"], "failed")
    assert "c has no executor" in shown["error"]
    assert bench.standing.layout.hosts == (A, B)
    assert not bench.rescaler.active


def test_one_that_had_not_begun_begins_again(bench: Bench) -> None:
    begun = bench.rescaler.ask(RescaleRequest(3), bench.standing)
    bench.board.rescaling(bench.rescaler.summary(), None)
    bench.rescaler.resume(bench.standing)
    bench.board.rescaling(bench.rescaler.summary(), None)
    assert [one["id"] for one in bench.rescaler.summary()["queued"]] == [begun["id"]]
    while (shown := bench.poll())["state"] != "done":
        bench.step()
    assert shown["id"] == begun["id"]
    assert bench.standing.layout.hosts == (A, B, C)


def test_one_that_waits_is_judged_by_where_those_before_it_lead(bench: Bench) -> None:
    bench.rescaler.ask(RescaleRequest(2, (A,)), bench.standing)
    second = bench.rescaler.ask(RescaleRequest(3, (A, B, C)), bench.standing)
    third = bench.rescaler.ask(RescaleRequest(remove_hosts=(C,)), bench.standing)
    assert [one["id"] for one in bench.rescaler.summary()["queued"]] == [second["id"], third["id"]]
    assert (third["from"]["hosts"], third["to"]["hosts"]) == ([A, B, C], [A, B])
    bench.rescaler.cancel()
    # All that waited is forgotten, and the one under way leads back.
    fourth = bench.rescaler.ask(RescaleRequest(1, (A,)), bench.standing)
    assert fourth["from"]["hosts"] == [A, B]
    while (shown := bench.poll())["id"] != fourth["id"] or shown["state"] != "done":
        bench.step()
    assert bench.standing.layout.hosts == (A,)


def test_one_that_waited_fails_when_it_cannot_be_had_any_more(bench: Bench) -> None:
    first = bench.rescaler.ask(RescaleRequest(4, (A, B)), bench.standing)
    second = bench.rescaler.ask(RescaleRequest(3, (A, B, C)), bench.standing)
    assert second["state"] == "queued"
    bench.alive.remove(C)
    while (shown := bench.poll())["id"] == first["id"]:
        bench.step()
    assert (shown["id"], shown["state"]) == (second["id"], "failed")
    # What was wished for, though the layout stays.
    assert (shown["from"]["workers"], shown["to"]["workers"], shown["to"]["hosts"]) == (4, 3, [A, B, C])
    assert [(one["id"], one["state"]) for one in bench.rescaler.ended] == [(first["id"], "done")]


@pytest.mark.parametrize("host", [B, C])
def test_one_under_way_is_given_up_and_names_the_host(bench: Bench, host: HostId) -> None:
    bench.rescaler.ask(RescaleRequest(3, strategy="batched"), bench.standing)
    bench.poll()
    bench.step()
    bench.lose(host)
    shown = bench.poll()
    assert (shown["state"], shown["shards_moved"]) == ("failed", 1)
    assert shown["error"].startswith(f"lost {host}" if host == C else "lost b, c")


def test_hosts_that_cannot_be_prepared(bench: Bench) -> None:
    bench.rescaler.ask(RescaleRequest(3), bench.standing)
    bench.hands.error = StepAborted("no executor")
    # It may have been a process that died by chance.
    for _ in range(2):
        assert bench.poll()["state"] == "preparing"
    shown = bench.poll()
    assert (shown["state"], shown["error"]) == ("failed", "no executor")
    assert bench.standing.layout.hosts == (A, B)
