"""The command as users run it: a process of its own, with Spark inside."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anabranch.runtime.jobdir import JobDir

WAIT = 120.0

FLOW = """
import os
from pathlib import Path
import anabranch as ab

def split(line):
    return line.split()

flow = ab.Flow("wordcount")
lines = flow.input("lines", ab.files(Path(__file__).parent / "lines"))
lines.flat_map(split).key_by("value").count().output("counts")
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "anabranch.cli.main", *arguments]


def call(*arguments: str) -> str:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def write_flow(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "a.txt").write_text("to be or not to be\n")
    (tmp_path / "flow.py").write_text(FLOW)
    return str(tmp_path / "flow.py"), str(tmp_path / "job")


def test_run_until_idle_and_look_at_it(tmp_path: Path) -> None:
    flow, job = write_flow(tmp_path)
    shown = call("run", flow, "--dir", job, "--workers", "2", "--until-idle", "--json")
    events = [json.loads(line) for line in shown.splitlines()]
    kinds = [event["event"] for event in events]
    assert [kind for kind in kinds if kind != "stopping"] == ["started", "step", "stopped"]
    assert events[-2] == {"event": "stopping", "waiting_for": "state to be synced to disk"}
    assert events[0] == {"event": "started", "workers": 2, "shards": 32, "step": 0}
    assert events[1] | {"seconds": 0} == {
        "event": "step",
        "step": 0,
        "rows": 1,
        "output_rows": 4,
        "dead_letters": 0,
        "seconds": 0,
        "backlog_rows": 0,
        "backlog_bytes": 0,
        "workers": 2,
    }
    assert events[-1] == {"event": "stopped", "steps": 1, "input_rows": 1, "output_rows": 4}

    assert "wordcount: stopped\n  steps      1\n" in call("status", job)
    assert json.loads(call("status", job, "--json"))["hosts"] == ["host-0"]
    rows = [json.loads(line) for line in call("output", job, "counts", "--table", "--json").splitlines()]
    assert {row["value"]: row["count"] for row in rows} == {"to": 2, "be": 2, "or": 1, "not": 1}
    changes = [json.loads(line) for line in call("output", job, "counts", "--changes", "--json").splitlines()]
    assert {(row["__step"], row["__weight"]) for row in changes} == {(0, 1)}
    assert "4 rows" in call("output", job, "counts")
    assert "is not running" in call("stop", job)


def test_a_running_job_is_stopped_from_outside(tmp_path: Path) -> None:
    flow, job = write_flow(tmp_path)
    jobdir = JobDir(Path(job))
    with subprocess.Popen(
        command("run", flow, "--dir", job, "--workers", "2"), stderr=subprocess.PIPE, text=True
    ) as running:
        wait_for(lambda: jobdir.status()["state"] == "idle" or running.poll() is not None)
        assert call("status", job).startswith("wordcount: idle\n")
        assert json.loads(call("stop", job, "--json")) == {
            "was_running": True,
            "state": "stopped",
            "steps": 1,
        }
        _, told = running.communicate(timeout=WAIT)
    assert running.returncode == 0
    # Without a terminal there are plain lines.
    assert "\x1b" not in told
    lines = told.splitlines()
    assert lines[0] == "running with 2 workers on 1 host, 32 shards"
    assert re.fullmatch(
        r"step 0 · \S+ rows/s · \d+ ms · backlog 0 rows · 1 rows in, 4 out · 2 workers", lines[1]
    )
    assert lines[2].startswith("stopping: waiting for the final checkpoint (version 1, before step 1)")
    assert lines[-1] == "stopped after 1 step: 1 rows in, 4 rows out"


def test_ctrl_c_on_a_terminal(tmp_path: Path) -> None:
    flow, job = write_flow(tmp_path)
    jobdir = JobDir(Path(job))
    # The process is the leader of the terminal's foreground group, as in a shell: the JVM gets the Ctrl-C, too.
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, command("run", flow, "--dir", job, "--workers", "2"))
    shown = b""

    def read_until(text: bytes) -> None:
        nonlocal shown
        deadline = time.monotonic() + WAIT
        while text not in shown:
            assert time.monotonic() < deadline, shown.decode()
            try:
                shown += os.read(terminal, 4096)
            except OSError:  # Linux's way to say that nobody holds the other end.
                break

    try:
        read_until(b"idle, waiting for input")
        (tmp_path / "lines" / "b.txt").write_text("be\n")
        wait_for(lambda: jobdir.status().get("steps") == 2)
        os.write(terminal, b"\x03")
        read_until(b"rows out")
        _, status = os.waitpid(process, 0)
    except BaseException:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        raise
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0
    text = shown.decode()
    assert re.search(r"\r\x1b\[Kstep 0 · \S+ rows/s · \d+ ms · backlog 0 rows", text)
    assert "stopped after 2 steps: 2 rows in, " in text
    assert "Traceback" not in text
    assert jobdir.status()["state"] == "stopped"
    assert not jobdir.running()
