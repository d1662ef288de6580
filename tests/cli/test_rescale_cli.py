"""`rescale`, and `status` of a rescaling, against a control server that plays a script; no Spark."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest

import anabranch as ab
from anabranch.cli import rescale as rescale_module
from anabranch.cli.main import main
from anabranch.cli.rescale import ProgressDisplay, change, duration, migration_lines, progress_line
from anabranch.errors import ConfigError, JobDirError
from anabranch.runtime.jobdir import JobDir
from scripted import DONE, Capture, Json, Script, account, fails, new_job, run_by


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    return new_job(tmp_path)


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
        copied=0,
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
    half = splitting | {"state": "copying", "copied": 48, "eta_seconds": 4.4}
    head = head.replace("░" * 20, "█" * 15 + "░" * 5)
    assert progress_line(half) == f"{head} copying · splitting into 64 shards, 48 copied · 4 s left"
    # Turned back.
    head = head.replace("█", "░")
    assert progress_line(splitting | {"resharding": 32}) == f"{head} moving · merging into 32 shards"
    # They move first.
    merging = account(
        to={"workers": 1, "hosts": ["host-0"], "shards": 1},
        resharding=1,
        copied=1,
        shards_moved=16,
        bytes_moved=900_000,
        eta_seconds=None,
        latency_now=None,
    )
    assert progress_line(merging) == (
        "2 → 1 worker, 32 → 1 shard, fluid (auto) ████████████████████ moving · merging into 1 shard, 1 copied · "
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
