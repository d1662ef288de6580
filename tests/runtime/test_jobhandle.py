"""`ab.Job` against a control server that plays a script; no Spark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import anabranch as ab
from anabranch.errors import ConfigError, EngineError, JobDirError, UserError
from anabranch.runtime.control import ControlServer
from anabranch.runtime.jobdir import JobDir
from scripted import DONE, Json, Script, account, new_job, run_by


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    return new_job(tmp_path)


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


def test_a_job_that_ends_before_the_turn_of_one_that_is_queued(job: JobDir) -> None:
    handle = ab.Job(job.path)
    with run_by(job, Script(account(id=6), first=account(state="queued"))):
        accounts = handle.watch(handle.rescale(4, wait=False))
        next(accounts)
    with pytest.raises(JobDirError, match="ended before the turn of rescaling 7 came: it is forgotten"):
        next(accounts)


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
