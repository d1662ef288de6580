"""What a run shows."""

from __future__ import annotations

import io
import json

import pytest

from anabranch.cli.display import JsonDisplay, TextDisplay, human, plural
from anabranch.errors import EngineError
from anabranch.log.steplog import Progress
from anabranch.model.ids import HostId, Step
from anabranch.model.layout import FixedSharding, initial_layout
from anabranch.runtime.observe import StepDone

LAYOUT = initial_layout(1, [HostId("h")], FixedSharding(16))
AFTER = Progress(next_step=Step(5), input_rows=12_345, output_rows=678)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def done(step: int) -> StepDone:
    return StepDone(Step(step), 1_000_000, 10, 0, 0.25, 2_500_000, 10, 1)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (950, "950"), (1_234, "1.2k"), (34_000_000, "34M"), (5.5e9, "5.5G"), (123_456, "123k")],
)
def test_human(number: float, text: str) -> None:
    assert human(number) == text


def test_plural() -> None:
    assert [plural(count, "step") for count in (0, 1, 2, 1234)] == [
        "0 steps",
        "1 step",
        "2 steps",
        "1,234 steps",
    ]


def test_plain_lines() -> None:
    stream = io.StringIO()
    display = TextDisplay(stream)
    display.started(LAYOUT, AFTER)
    for step in range(5, 50):
        display.step(done(step), AFTER)
    display.idle(AFTER)
    display.fault(Step(50), 1, EngineError("lost"))
    display.stopping("syncing")
    display.stopped(AFTER)
    assert stream.getvalue().splitlines() == [
        "running with 1 worker on 1 host, 16 shards, continuing at step 5",
        # One a second, not one a step.
        "step 5 · 4.0M rows/s · 250 ms · backlog 2.5M rows · 12k rows in, 678 out · 1 worker",
        "step 50, attempt 1 failed, trying again: lost",
        "stopping: waiting for syncing",
        "stopped after 5 steps: 12,345 rows in, 678 rows out",
    ]


def test_a_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    display = TextDisplay(stream)
    display.step(done(5), AFTER)
    display.idle(AFTER)
    display.stopped(Progress())
    shown = stream.getvalue().split("\r\x1b[K")
    assert shown == [
        "",
        "step 5 · 4.0M rows/s · 250 ms · backlog",
        "5 steps · idle, waiting for input · 12k",
        "stopped after 0 steps: 0 rows in, 0 rows out\n",
    ]
    assert max(map(len, shown[:3])) < 40


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    display = JsonDisplay()
    display.started(LAYOUT, AFTER)
    display.step(done(5), AFTER)
    display.idle(AFTER)
    display.fault(Step(6), 2, EngineError("lost"))
    display.stopping("syncing")
    display.stopped(AFTER)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["started", "step", "idle", "fault", "stopping", "stopped"]
    assert events[3] == {"event": "fault", "step": 6, "attempt": 2, "error": "EngineError: lost"}


@pytest.mark.parametrize("display", [TextDisplay(io.StringIO()), JsonDisplay()])
def test_whoever_wants_to_know_is_told_of_the_start(display: TextDisplay | JsonDisplay) -> None:
    told: list[int] = []
    display.when_started = lambda: told.append(1)
    display.started(LAYOUT, AFTER)
    assert told == [1]
