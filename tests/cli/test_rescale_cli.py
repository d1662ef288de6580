"""`rescale`, `layout`, `hosts`, `status` and `ab.Job` against a control server that plays a script; no Spark."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import anabranch as ab
from anabranch.cli import rescale as rescale_module
from anabranch.cli.hosts import host_lines
from anabranch.cli.layout import history_lines, runs
from anabranch.cli.main import main
from anabranch.cli.rescale import ProgressDisplay, change, duration, migration_lines, progress_line
from anabranch.errors import ConfigError, EngineError, JobDirError, UserError
from anabranch.flow.plan import make_plan
from anabranch.model.ids import HostId, Incarnation, LayoutVersion, ShardId, Step, WorkerId
from anabranch.model.layout import Layout
from anabranch.model.placement import Cut, Intent, Placement
from anabranch.model.ranges import hash_range
from anabranch.runtime.control import ControlServer
from anabranch.runtime.jobdir import JobDir

Capture = pytest.CaptureFixture[str]
Json = dict[str, Any]


def account(**changes: Any) -> Json:
    """The account of a rescaling, halfway."""
    return {
        "id": 7,
        "state": "moving",
        "strategy": "fluid",
        "asked": "auto",
        "cancelled": False,
        "from": {"workers": 2, "hosts": ["host-0"], "shards": 32, "layout": 3},
        "to": {"workers": 4, "hosts": ["host-0", "host-1"], "shards": 32, "layout": 4},
        "resharding": None,
        "shards_total": 16,
        "shards_moved": 4,
        "bytes_total": 4_000_000,
        "bytes_moved": 1_000_000,
        "began": 1_700_000_000.0,
        "seconds": 1.5,
        "eta_seconds": 4.4,
        "latency_before": 0.2,
        "latency_now": 0.21,
        "longest_step": 0.24,
        "error": None,
        "layout": None,
        **changes,
    }


DONE = {
    "state": "done",
    "shards_moved": 16,
    "bytes_moved": 4_000_000,
    "seconds": 6.04,
    "eta_seconds": None,
    "layout": 4,
}


class Script:
    """Plays a coordinator: each look at the status shows the next account, and the last one for good."""

    def __init__(self, *accounts: Json, first: Json | None = None) -> None:
        self.accounts = list(accounts)
        self.first = first or account(state="preparing", shards_moved=0, bytes_moved=0, eta_seconds=None)
        self.asked: list[tuple[str, Json]] = []
        self.refusal: Exception | None = None
        self.status: Json = {"state": "running", "steps": 10}
        self.hosts: list[Json] = []

    def __call__(self, method: str, path: str, body: Json) -> Json:
        if path == "/status":
            shown = self.accounts.pop(0) if len(self.accounts) > 1 else (self.accounts or [None])[0]
            return {**self.status, "migration": shown}
        self.asked.append((path, body))
        if self.refusal is not None:
            raise self.refusal
        if path == "/hosts":
            return {"hosts": self.hosts}
        return self.first


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    flow = ab.Flow("shop")
    flow.input("rows", ab.iterable([], schema={"item": str})).output("sold")
    jobdir = JobDir(tmp_path / "job")
    with jobdir.locked():
        jobdir.create(make_plan(flow))
    return jobdir


@contextmanager
def run_by(job: JobDir, script: Script) -> Iterator[Script]:
    with job.locked(), ControlServer(job, script):
        yield script


def fails(capsys: Capture, *arguments: str) -> str:
    """The one line that the command says before it fails."""
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("anabranch: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("anabranch: ").rstrip("\n")


# rescale


def test_it_waits_and_tells(job: JobDir, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rescale_module, "_PLAIN_EVERY", 0.0)
    with run_by(job, Script(account(), account(), account(**DONE))) as script:
        assert main(["rescale", job.path, "--workers", "4"]) == 0
    assert script.asked == [("/rescale", {"workers": 4, "strategy": "auto"})]
    captured = capsys.readouterr()
    head = "2 → 4 workers, 1 → 2 hosts, fluid (auto)"
    assert captured.err.splitlines() == [
        f"{head} ░░░░░░░░░░░░░░░░░░░░ preparing · 0 of 16 shards · 0B of 4.0MB · step 210 ms (before: 200)",
        f"{head} █████░░░░░░░░░░░░░░░ moving · 4 of 16 shards · 1.0MB of 4.0MB · 4 s left · step 210 ms (before: 200)",
    ]
    assert captured.out == (
        "rescaled 2 → 4 workers, 1 → 2 hosts in 6.0 s, fluid (auto) · 16 of 16 shards · 4.0MB · "
        "longest step 240 ms · layout 4\n"
    )


def test_all_that_can_be_asked_for(job: JobDir, capsys: Capture) -> None:
    with run_by(job, Script(first=account(**DONE))) as script:
        for arguments in (
            ["--workers", "8", "--hosts", "3", "--strategy", "hot"],
            ["--hosts", "host-0,host-2", "--budget", "512k", "--strategy", "fluid"],
            ["--remove-host", "a", "--remove-host", "b", "--budget", "4M"],
        ):
            assert main(["rescale", job.path, *arguments]) == 0
    assert [body for _, body in script.asked] == [
        {"workers": 8, "hosts": 3, "strategy": "hot"},
        {"hosts": ["host-0", "host-2"], "strategy": "fluid", "budget": 524_288},
        {"remove_hosts": ["a", "b"], "strategy": "auto", "budget": 4_194_304},
    ]
    assert capsys.readouterr().err == ""


def test_json_is_one_object(job: JobDir, capsys: Capture) -> None:
    with run_by(job, Script(account(), account(**DONE))):
        assert main(["rescale", job.path, "--workers", "4", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == account(**DONE)
    assert captured.err == ""
    failed = account(state="failed", error="host-1 is gone")
    with run_by(job, Script(failed)):
        assert main(["rescale", job.path, "--workers", "4", "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out) == failed
    assert captured.err == "anabranch: rescaling 7 failed: host-1 is gone; the layout is as before\n"


def test_without_waiting(job: JobDir, capsys: Capture) -> None:
    with run_by(job, Script(account())) as script:
        assert main(["rescale", job.path, "--workers", "4", "--no-wait"]) == 0
        shows = f"`anabranch status {job.path}` shows it\n"
        assert capsys.readouterr().out == f"rescaling 7 has begun: 2 → 4 workers, 1 → 2 hosts; {shows}"
        script.first = account(state="queued")
        assert main(["rescale", job.path, "--workers", "4", "--no-wait"]) == 0
        assert capsys.readouterr().out == f"rescaling 7 is queued: 2 → 4 workers, 1 → 2 hosts; {shows}"
        assert main(["rescale", job.path, "--workers", "4", "--no-wait", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["state"] == "queued"


def test_one_that_is_queued_waits_for_its_own(job: JobDir, capsys: Capture) -> None:
    before = account(id=6, **DONE)
    script = Script(account(id=6), before, account(), account(**DONE), first=account(state="queued"))
    with run_by(job, script):
        assert main(["rescale", job.path, "--workers", "4"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("2 → 4 workers, 1 → 2 hosts: waiting for the rescaling before it\n")
    assert captured.out.endswith("layout 4\n")
    assert script.accounts == [account(**DONE)]


def test_one_that_is_taken_out_of_the_queue(job: JobDir) -> None:
    script = Script(account(id=6), account(id=6), first=account(state="queued"))
    script.status["queued"] = [account(state="queued"), account(id=8, state="queued")]
    handle = ab.Job(job.path)
    with run_by(job, script):
        accounts = handle.watch(handle.rescale(4, wait=False))
        assert next(accounts)["state"] == "queued"
        script.status["queued"] = []
        with pytest.raises(UserError, match="rescaling 7 was taken out of the queue; nothing has changed"):
            next(accounts)


def test_one_whose_end_was_missed(job: JobDir) -> None:
    with (
        run_by(job, Script(account(), account(id=8))),
        pytest.raises(JobDirError, match="rescaling 7 has ended, and 8"),
    ):
        ab.Job(job.path).rescale(4)


def test_a_refusal_is_one_line(job: JobDir, capsys: Capture) -> None:
    with run_by(job, Script()) as script:
        script.refusal = ConfigError("--workers 99: the job has 32 shards, so at most as many workers")
        assert fails(capsys, "rescale", job.path, "--workers", "99") == str(script.refusal)
        assert fails(capsys, "rescale", job.path, "--cancel") == str(script.refusal)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say what to change: --workers, --hosts or --remove-host; or --cancel"),
        (["--cancel", "--workers", "2"], "--cancel goes without --workers"),
        (["--workers", "0"], "workers=0: must be at least 1"),
        (["--hosts", "-1"], "hosts=-1: must be at least 1"),
    ],
)
def test_wishes_that_nobody_can_fulfil(
    job: JobDir, capsys: Capture, arguments: list[str], message: str
) -> None:
    with run_by(job, Script()) as script:
        assert message in fails(capsys, "rescale", job.path, *arguments)
        assert script.asked == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "warm"], "invalid choice: 'warm'"),
        (["--budget", "much"], "'much' is not like 65536, 512k or 4m"),
        (["--budget", "0k"], "'0k' is not like 65536, 512k or 4m"),
        (["--hosts", "a,,b"], "'a,,b' is not a number, nor names"),
        (["--timeout", "-1"], "'-1' is not a number of seconds"),
        (["--timeout", "soon"], "'soon' is not a number of seconds"),
    ],
)
def test_calls_that_are_wrong(capsys: Capture, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["rescale", "job", *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_a_job_that_does_not_run(job: JobDir, tmp_path: Path, capsys: Capture) -> None:
    said = fails(capsys, "rescale", job.path, "--workers", "4")
    assert (
        said
        == f"{job.path} is not running; `anabranch run FLOW.py --dir {job.path} --workers 4` starts it so"
    )
    assert "--workers N` starts it so" in fails(capsys, "rescale", job.path, "--hosts", "2")
    said = fails(capsys, "rescale", job.path, "--cancel")
    assert said == f"{job.path} is not running, so no rescaling is under way"
    for command in (["rescale", "--workers", "4"], ["layout"], ["hosts"]):
        assert "does not exist; `anabranch run" in fails(capsys, *command, str(tmp_path / "no"))


def test_a_job_that_ends_meanwhile(job: JobDir, capsys: Capture) -> None:
    handle = ab.Job(job.path)
    with run_by(job, Script(account())):
        accounts = handle.watch(handle.rescale(4, wait=False))
        assert next(accounts)["state"] == "preparing"
        assert next(accounts) == account()
    with pytest.raises(
        JobDirError, match="ended during the rescaling: no row is lost, and the next `anabranch run`"
    ):
        next(accounts)
    # One that was done before the job ended is done.
    with run_by(job, Script(account())):
        accounts = handle.watch(handle.rescale(4, wait=False))
        next(accounts)
        job.write_status({"state": "stopped", "migration": account(**DONE)})
    assert list(accounts) == [account(**DONE)]


def test_a_job_that_ends_before_the_turn_of_one_that_is_queued(job: JobDir) -> None:
    handle = ab.Job(job.path)
    with run_by(job, Script(account(id=6), first=account(state="queued"))):
        accounts = handle.watch(handle.rescale(4, wait=False))
        next(accounts)
    with pytest.raises(JobDirError, match="ended before the turn of rescaling 7 came: it is forgotten"):
        next(accounts)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"hosts": 1.5}, "hosts=1.5: must be a list of names"),
        ({"hosts": "host-0"}, "hosts='host-0': must be a list of names"),
        ({"workers": 2, "remove_hosts": 5}, "remove_hosts=5: must be a list of names"),
        ({"workers": 2, "timeout": "x"}, "timeout='x': must be a number of seconds"),
        ({"workers": 2, "timeout": -1}, "timeout=-1: must be a number of seconds"),
    ],
)
def test_arguments_that_are_wrong(job: JobDir, wish: Json, message: str) -> None:
    with run_by(job, Script(account(**DONE))) as script:
        with pytest.raises(ConfigError, match=message):
            ab.Job(job.path).rescale(**wish)
        assert script.asked == []
        assert ab.Job(job.path).rescale(4, remove_hosts=None)["state"] == "done"  # type: ignore[arg-type]


def test_a_coordinator_that_is_silent_for_a_while(job: JobDir) -> None:
    handle = ab.Job(job.path)
    with job.locked():
        with ControlServer(job, Script(account())):
            accounts = handle.watch(handle.rescale(4, wait=False))
            next(accounts)
            next(accounts)
        script = Script(account(**DONE))
        with pytest.MonkeyPatch.context() as patch:
            server: list[ControlServer] = []

            # It looks again and again, and finds the endpoint that appears the third time.
            def look(seconds: float) -> None:
                looks.append(seconds)
                if len(looks) == 3:
                    server.append(ControlServer(job, script))

            looks: list[float] = []
            patch.setattr("anabranch.runtime.jobhandle.time.sleep", look)
            assert list(accounts) == [account(**DONE)]
            assert len(looks) >= 3
        server[0].close()


def test_a_timeout(job: JobDir, capsys: Capture) -> None:
    with run_by(job, Script(account())):
        assert main(["rescale", job.path, "--workers", "4", "--timeout", "0"]) == 1
    assert "is not done within 0 s; it goes on, and `anabranch status" in capsys.readouterr().err


def test_control_c_leaves_it_going(job: JobDir, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ProgressDisplay, "show", interrupted)
    with run_by(job, Script(account())) as script:
        assert main(["rescale", job.path, "--workers", "4"]) == 130
        assert capsys.readouterr().err == (
            f"the rescaling goes on; `anabranch status {job.path}` shows it, "
            f"`anabranch rescale {job.path} --cancel` turns it back\n"
        )
        script.first = account(state="queued")
        assert main(["rescale", job.path, "--workers", "4"]) == 130
        assert capsys.readouterr().err == (
            f"the rescaling is still queued; `anabranch status {job.path}` shows it, "
            f"`anabranch rescale {job.path} --cancel` forgets it and turns back the one under way\n"
        )
        assert main(["rescale", job.path, "--cancel"]) == 130
        assert capsys.readouterr().err == f"the way back goes on; `anabranch status {job.path}` shows it\n"
    assert [path for path, _ in script.asked] == ["/rescale", "/rescale", "/rescale/cancel"]


def test_nothing_to_be_done(job: JobDir, capsys: Capture) -> None:
    same = account(**DONE)["from"]
    with run_by(job, Script(first=account(**DONE) | {"to": same})):
        assert main(["rescale", job.path, "--workers", "2"]) == 0
    assert capsys.readouterr().out == "nothing changes: the job has 2 workers on host-0 already\n"


def test_the_way_back(job: JobDir, capsys: Capture) -> None:
    back = account(cancelled=True)
    with run_by(job, Script(back, first=back)):
        assert main(["rescale", job.path, "--cancel", "--no-wait"]) == 0
    assert capsys.readouterr().out == f"rescaling 7 turns back; `anabranch status {job.path}` shows it\n"
    assert migration_lines(back, True)[:2] == [
        "  rescaling  2 → 4 workers, 1 → 2 hosts, fluid (auto): turning back",
        "             █████░░░░░░░░░░░░░░░ 4 of 16 shards back, 1.0MB of 4.0MB, 4 s left",
    ]


def test_cancel(job: JobDir, capsys: Capture) -> None:
    with run_by(job, Script(account(), account(state="cancelled", seconds=3.21), first=account())) as script:
        assert main(["rescale", job.path, "--cancel"]) == 0
        assert capsys.readouterr().out == "rescaling 7 was cancelled after 3.2 s; the layout is as before\n"
        assert script.asked == [("/rescale/cancel", {})]
        # Whoever waited for it is told, and fails.
        assert main(["rescale", job.path, "--workers", "4"]) == 1
        assert "rescaling 7 was cancelled; the layout is as before\n" in capsys.readouterr().err
    nothing = Script()
    nothing.first = {}
    with run_by(job, nothing):
        assert main(["rescale", job.path, "--cancel"]) == 0
        assert capsys.readouterr().out == "the rescalings that were queued are cancelled\n"
        assert ab.Job(job.path).cancel_rescale() == {}
    with run_by(job, Script(account(**DONE), first=account())):
        assert main(["rescale", job.path, "--cancel"]) == 1
        assert "rescaling 7 was done before it could be cancelled\n" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    display = ProgressDisplay(stream)
    display.show(account())
    display.show(account())
    display.close()
    line = f"\r\x1b[K{progress_line(account())[:39]}"
    assert stream.getvalue() == f"{line}{line}\r\x1b[K"
    quiet = Terminal()
    ProgressDisplay(quiet).close()
    assert quiet.getvalue() == ""


def test_elsewhere_a_line_a_second() -> None:
    stream = io.StringIO()
    display = ProgressDisplay(stream)
    for shards in range(16):
        display.show(account(shards_moved=shards))
    display.close()
    assert stream.getvalue().count("\n") == 1


def test_what_changes() -> None:
    def said(before: Json, after: Json) -> str:
        base = {"workers": 2, "hosts": ["a"], "shards": 32}
        return change({"from": base | before, "to": base | after})

    assert said({}, {"workers": 1}) == "2 → 1 worker"
    assert said({}, {"hosts": ["b"]}) == "2 workers, other hosts"
    assert said({}, {"workers": 1_000, "shards": 16_384}) == "2 → 1,000 workers, 32 → 16,384 shards"
    assert [duration(seconds) for seconds in (0.4, 99, 100, 3_600, 7_200)] == [
        "0 s",
        "99 s",
        "2 min",
        "60 min",
        "2 h",
    ]


def test_totals_of_bytes_are_estimates() -> None:
    dropping = account(state="dropping", shards_moved=16, bytes_moved=900_000, latency_now=None)
    assert progress_line(dropping) == (
        "2 → 4 workers, 1 → 2 hosts, fluid (auto) ████████████████████ dropping old copies · 16 of 16 shards · 900kB"
    )


def test_on_one_host_nothing_is_copied() -> None:
    moving = account(
        strategy="sudden",
        asked="sudden",
        to={"workers": 4, "hosts": ["host-0"], "shards": 32},
        shards_total=0,
        shards_moved=0,
        bytes_total=0,
        bytes_moved=0,
        eta_seconds=None,
        latency_now=None,
    )
    empty = "░░░░░░░░░░░░░░░░░░░░"
    assert progress_line(moving) == f"2 → 4 workers, sudden {empty} moving · no shard leaves its host"
    # As long as it is being prepared, that is not known.
    assert progress_line(moving | {"state": "preparing"}) == f"2 → 4 workers, sudden {empty} preparing"


def test_shards_that_split_or_merge() -> None:
    splitting = account(
        to={"workers": 4, "hosts": ["host-0", "host-1"], "shards": 64},
        resharding=64,
        shards_total=0,
        shards_moved=0,
        bytes_total=0,
        bytes_moved=0,
        eta_seconds=None,
        latency_now=None,
    )
    head = "2 → 4 workers, 1 → 2 hosts, 32 → 64 shards, fluid (auto) ░░░░░░░░░░░░░░░░░░░░"
    assert progress_line(splitting) == f"{head} moving · splitting into 64 shards"
    assert progress_line(splitting | {"state": "copying"}) == f"{head} copying · splitting into 64 shards"
    # Turned back.
    assert progress_line(splitting | {"resharding": 32}) == f"{head} moving · merging into 32 shards"
    # They move first.
    merging = account(
        to={"workers": 1, "hosts": ["host-0"], "shards": 1},
        resharding=1,
        shards_moved=16,
        bytes_moved=900_000,
        latency_now=None,
    )
    assert progress_line(merging) == (
        "2 → 1 worker, 32 → 1 shard, fluid (auto) ████████████████████ moving · merging into 1 shard · "
        "16 of 16 shards · 900kB"
    )


def test_a_start_anew_moves_nothing() -> None:
    restart = account(strategy="stop-start", asked="stop-start", shards_total=0, shards_moved=0)
    restart |= {
        "bytes_total": 0,
        "bytes_moved": 0,
        "eta_seconds": None,
        "latency_now": None,
        "longest_step": None,
    }
    assert migration_lines(restart | {"state": "stopping"}, True) == [
        "  rescaling  2 → 4 workers, 1 → 2 hosts, stop-start: stopping, to start again",
        "             ░░░░░░░░░░░░░░░░░░░░",
    ]
    assert migration_lines(restart | {"state": "done", "layout": 4}, True) == [
        "  rescaled   2 → 4 workers, 1 → 2 hosts, stop-start: done after 1.5 s, layout 4"
    ]


# status


def test_status_tells_of_a_rescaling(job: JobDir, capsys: Capture) -> None:
    status = {"state": "running", "started": time.time(), "process": 1}
    job.write_status({**status, "migration": account()})
    expected = [
        "  rescaling  2 → 4 workers, 1 → 2 hosts, fluid (auto): moving",
        "             █████░░░░░░░░░░░░░░░ 4 of 16 shards, 1.0MB of 4.0MB, 4 s left",
        "             step 210 ms (before: 200), longest step 240 ms",
    ]
    with job.locked():
        assert main(["status", job.path]) == 0
        assert capsys.readouterr().out.splitlines()[1:4] == expected
        job.write_status({**status, "migration": account(), "queued": [account(id=8, state="queued")]})
        assert main(["status", job.path]) == 0
        waits = "  rescaling  2 → 4 workers, 1 → 2 hosts, fluid (auto): waiting for the rescaling before it"
        assert capsys.readouterr().out.splitlines()[1:5] == [*expected, waits]
    assert main(["status", job.path]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  rescaling  2 → 4 workers, 1 → 2 hosts, fluid (auto): under way when the job ended",
        "             the next run goes on with the layout of before or after",
    ]


def test_status_tells_of_the_last_rescaling() -> None:
    assert migration_lines(account(**DONE), True) == [
        "  rescaled   2 → 4 workers, 1 → 2 hosts, fluid (auto): done after 6.0 s, layout 4",
        "             16 of 16 shards, 4.0MB, longest step 240 ms",
    ]
    assert migration_lines(account(state="failed", error="host-1 is gone"), False) == [
        "  rescaled   2 → 4 workers, 1 → 2 hosts, fluid (auto): failed after 1.5 s",
        "             host-1 is gone",
    ]
    assert migration_lines(account(state="queued"), True) == [
        "  rescaling  2 → 4 workers, 1 → 2 hosts, fluid (auto): waiting for the rescaling before it"
    ]
    assert migration_lines(None, True) == []


# layout

HOSTS = (HostId("host-0"), HostId("host-1"), HostId("host-0"))


def placement(version: int = 2, **changes: Any) -> Placement:
    """Eight shards, three workers, two hosts; worker 2 has the fewest."""
    owners = tuple(WorkerId(worker) for worker in (0, 0, 2, 0, 1, 1, 1, 2))
    return Placement(Layout(LayoutVersion(version), owners, HOSTS), (0,) * 8, **changes)


def test_layout_without_sizes(job: JobDir, capsys: Capture) -> None:
    assert "has no layout yet" in fails(capsys, "layout", job.path)
    job.write_layout(placement(), Step(5))
    assert main(["layout", job.path]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "shop: layout 2, 3 workers on 2 hosts, 8 shards",
        "  host-0: 5 shards",
        "    worker 0  ████████████████████  3 shards  0-1, 3",
        "    worker 2  █████████████░░░░░░░  2 shards  2, 7",
        "  host-1: 3 shards",
        "    worker 1  ████████████████████  3 shards  4-6",
        "  skew 1.12: worker 0 has 3 shards, the mean is 2.7",
    ]


def test_layout_with_sizes(job: JobDir, capsys: Capture) -> None:
    job.write_layout(placement(), Step(5))
    sizes = [1_000, 1_000, 500, 2_000, 3_000, 3_000, 2_000, 1_500]
    job.write_status({"state": "stopped", "sizes": {"bytes": sizes, "step": 1_234}})
    assert main(["layout", job.path]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "shop: layout 2, 3 workers on 2 hosts, 8 shards, 14kB at step 1,234",
        "  host-0: 5 shards, 6.0kB",
        "    worker 0  ██████████░░░░░░░░░░  3 shards  4.0kB  0-1, 3",
        "    worker 2  █████░░░░░░░░░░░░░░░  2 shards  2.0kB  2, 7",
        "  host-1: 3 shards, 8.0kB",
        "    worker 1  ████████████████████  3 shards  8.0kB  4-6",
        "  skew 1.71: worker 1 has 8.0kB, the mean is 4.7kB; the largest shard is 4 with 3.0kB",
    ]
    assert main(["layout", job.path, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["workers"][1] == {"worker": 1, "host": "host-1", "shards": [4, 5, 6], "bytes": 8_000}
    assert shown["hosts"][0] == {"host": "host-0", "workers": [0, 2], "shards": 5, "bytes": 6_000}
    assert (shown["version"], shown["bytes"], shown["skew"], shown["cuts"]) == (2, 14_000, 1.714, [])
    # Sizes of another number of shards are of another layout.
    job.write_status({"state": "stopped", "sizes": {"bytes": sizes[:4], "step": 1}})
    assert ab.Job(job.path).layout()["bytes"] is None


def test_layout_of_an_empty_state(job: JobDir, capsys: Capture) -> None:
    job.write_layout(placement(), Step(0))
    job.write_status({"state": "stopped", "sizes": {"bytes": [0] * 8, "step": 0}})
    assert main(["layout", job.path]) == 0
    assert "worker 1  ░░░░░░░░░░░░░░░░░░░░  3 shards  0B  4-6" in capsys.readouterr().out


def test_layout_in_the_middle_of_a_migration(job: JobDir, capsys: Capture) -> None:
    low, end = hash_range(4, 8)
    cut = Cut(low + (end - low) // 4, WorkerId(2), Incarnation(1))
    job.write_layout(placement(cuts={ShardId(4): cut}), Step(5))
    status = {"state": "running", "sizes": {"bytes": [1_000] * 8, "step": 9}, "steps": 10}
    job.write_status({**status, "migration": account()})
    script = Script(account())
    script.status = status
    with run_by(job, script):
        assert main(["layout", job.path]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "shop: layout 2, 3 workers on 2 hosts, 8 shards, 8.0kB at step 9",
        "  host-0: 6 shards, 5.2kB",
        "    worker 0  ████████████████████  3 shards  3.0kB  0-1, 3",
        "    worker 2  ███████████████░░░░░  3 shards  2.2kB  2, 4, 7",
        "  host-1: 3 shards, 2.8kB",
        "    worker 1  ██████████████████░░  3 shards  2.8kB  4-6",
        "  skew 1.12: worker 0 has 3.0kB, the mean is 2.7kB; the largest shard is 0 with 1.0kB",
        f"  rescaling {progress_line(account())}",
        "    shard 4 █████░░░░░░░░░░░░░░░ 25% with worker 2 on host-0, the rest with worker 1 on host-1",
    ]
    assert ab.Job(job.path).layout()["cuts"] == [
        {"shard": 4, "from": 1, "to": 2, "cursor": "8800000000000000", "moved": 0.25}
    ]


def test_layout_of_a_job_that_ended_in_the_middle_of_a_migration(job: JobDir, capsys: Capture) -> None:
    layout = placement().layout
    job.write_layout(placement(intent=Intent(7, layout, layout, "fluid", "auto")), Step(5))
    job.write_status({"state": "running", "migration": account()})
    assert main(["layout", job.path]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "  a rescaling was under way when the job ended: the next run goes on with it"
    )
    assert ab.Job(job.path).layout()["migration"] is None


def test_layout_of_a_running_job_is_weighed(job: JobDir) -> None:
    job.write_layout(placement(), Step(5))
    script = Script()
    script.status["sizes"] = {"bytes": [10] * 8, "step": 10}
    with run_by(job, script):
        assert ab.Job(job.path).layout()["bytes"] == 80
        assert script.asked == [("/weigh", {})]
        # Whoever may not command it sees what the directory has.
        script.refusal = UserError("not now")
        assert ab.Job(job.path).layout()["bytes"] is None


@pytest.fixture
def greenwich() -> Iterator[None]:
    """Local time is UTC."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def test_history(job: JobDir, capsys: Capture, monkeypatch: pytest.MonkeyPatch, greenwich: None) -> None:
    one = Layout(LayoutVersion(0), (WorkerId(0),) * 8, (HostId("host-0"),))
    monkeypatch.setattr("anabranch.runtime.jobdir.time.time", lambda: 1_700_000_000.0)
    job.write_layout(Placement(one, (0,) * 8), Step(0))
    job.write_layout(
        placement(1),
        Step(12_345),
        {"strategy": "fluid", "bytes": 4_500_000, "seconds": 3.21, "other": 1},
    )
    assert main(["layout", job.path, "--history"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "layout  since                  step  workers  hosts  shards  strategy  moved   took",
        "     0  2023-11-14 22:13:20       0        1      1       8  start",
        "     1  2023-11-14 22:13:20  12,345        3      2       8  fluid     4.5MB  3.2 s",
    ]
    assert history_lines([ab.Job(job.path).history()[1] | {"cancelled": True}])[1].split("8  ")[1] == (
        "fluid, cancelled  4.5MB  3.2 s"
    )
    assert main(["layout", job.path, "--history", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == ab.Job(job.path).history()
    assert shown[1] == {
        "version": 1,
        "time": 1_700_000_000.0,
        "step": 12_345,
        "workers": 3,
        "hosts": ["host-0", "host-1"],
        "shards": 8,
        "strategy": "fluid",
        "cancelled": False,
        "bytes_moved": 4_500_000,
        "seconds": 3.21,
    }


def test_runs() -> None:
    assert runs([]) == ""
    assert runs([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert runs([0, 2, 4, 6, 8]) == "0, 2, 4, 6, …"


# hosts


def test_hosts_of_a_running_job(job: JobDir, capsys: Capture) -> None:
    with run_by(job, Script()) as script:
        script.hosts = [
            {
                "host": "alpha",
                "workers": [0, 2],
                "shards": 16,
                "bytes": 2_200_000,
                "alive": True,
                "used": True,
            },
            {"host": "b", "workers": [1], "shards": 1, "bytes": None, "alive": False, "used": True},
            {"host": "c", "workers": [], "shards": 3, "bytes": 5, "alive": True, "used": False},
            {"host": "d", "workers": [], "shards": 0, "bytes": 0, "alive": True, "used": False},
            {"host": "e", "workers": [], "shards": 0, "bytes": None, "alive": False, "used": False},
        ]
        assert main(["hosts", job.path]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "alpha  workers 0, 2 · 16 shards · 2.2MB",
            "b      worker 1 · 1 shard · does not answer",
            "c      no worker · 3 shards · 5B",
            "d      empty: a rescale can use it, and it can be shut down",
            "e      gone",
        ]
        assert main(["hosts", job.path, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"hosts": script.hosts}


def test_hosts_of_a_job_that_does_not_run(job: JobDir, capsys: Capture) -> None:
    job.write_layout(placement(), Step(5))
    assert main(["hosts", job.path]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "host-0  workers 0, 2 · 5 shards",
        "host-1  worker 1 · 3 shards",
    ]
    assert ab.Job(job.path).hosts()[1] == {
        "host": "host-1",
        "workers": [1],
        "shards": 3,
        "bytes": None,
        "alive": None,
        "used": True,
    }
    assert host_lines([]) == []


# The Python handle


def test_a_handle_needs_no_spark(job: JobDir) -> None:
    code = (
        "import sys; import anabranch as ab; "
        f"assert ab.Job({job.path!r}).name == 'shop'; assert 'pyspark' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    with pytest.raises(JobDirError, match="does not exist"):
        ab.Job(f"{job.path}/no")


def test_rescale_from_python(job: JobDir) -> None:
    handle = ab.Job(Path(job.path))
    assert repr(handle) == f"Job({job.path!r})"
    with pytest.raises(JobDirError, match="is not running; start it with `anabranch run"):
        handle.rescale(4)
    with run_by(job, Script(account(), account(**DONE))) as script:
        result = handle.rescale(4, hosts=("a", "b"), strategy="fluid", budget=1_000, remove_hosts=["c"])
        assert result == account(**DONE)
        assert script.asked == [
            (
                "/rescale",
                {
                    "workers": 4,
                    "hosts": ["a", "b"],
                    "strategy": "fluid",
                    "budget": 1_000,
                    "remove_hosts": ["c"],
                },
            )
        ]
        assert handle.rescale(4, wait=False)["state"] == "preparing"
        script.accounts = [account(state="failed", error="no room")]
        with pytest.raises(EngineError, match="rescaling 7 failed: no room; the layout is as before"):
            handle.rescale(4)
        script.accounts = [account(state="cancelled")]
        with pytest.raises(UserError, match="was cancelled"):
            handle.rescale(4)
        assert handle.cancel_rescale()["state"] == "cancelled"
        assert handle.cancel_rescale(wait=False)["state"] == "preparing"
        for wrong in (
            {"strategy": "warm", "workers": 1},
            {"budget": 0, "workers": 1},
            {"hosts": "a"},
            {"remove_hosts": "a"},
            {},
        ):
            with pytest.raises(ConfigError):
                handle.rescale(**wrong)  # type: ignore[arg-type]


def test_stop_and_checkpoint_from_python(job: JobDir, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = ab.Job(job.path)
    assert handle.stop() == {"state": "new"}
    assert handle.status() == {"state": "new"}
    with pytest.raises(JobDirError, match="nothing new to checkpoint"):
        handle.checkpoint()
    with job.locked():
        with pytest.raises(JobDirError, match="has not stopped within 0 s"):
            handle.stop(timeout=0)
        assert job.stop_asked()
        with pytest.raises(JobDirError, match="has made no checkpoint within 0 s"):
            handle.checkpoint(timeout=0)
        # The coordinator takes the wish away when it is fulfilled.
        monkeypatch.setattr("anabranch.runtime.jobhandle.time.sleep", lambda seconds: job.clear("checkpoint"))
        handle.checkpoint()

    locked = job.locked()
    locked.__enter__()

    def ends(seconds: float) -> None:
        assert job.stop_asked()
        assert job.asked("force")
        locked.__exit__(None, None, None)
        job.write_status({"state": "failed", "error": "UserError: bad"})

    monkeypatch.setattr("anabranch.runtime.jobhandle.time.sleep", ends)
    with pytest.raises(JobDirError, match="failed before it could stop: UserError: bad"):
        handle.stop(force=True)
