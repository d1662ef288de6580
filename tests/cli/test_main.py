"""Commands that need no Spark, called in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import anabranch as ab
from anabranch.cli.main import main
from anabranch.flow.plan import make_plan
from anabranch.log.steplog import Progress, StepLog
from anabranch.model.batch import STEP, WEIGHT
from anabranch.model.ids import Epoch, Step
from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.status import StatusBoard

FLOW = """
import anabranch as ab

flow = ab.Flow("shop")
rows = flow.input("rows", ab.generator(rows=100))
rows.key_by("key").count(name="counts").output("counts")
"""

Capture = pytest.CaptureFixture[str]


def write_flow(tmp_path: Path, text: str = FLOW, name: str = "shop.py") -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def fails(capsys: Capture, *arguments: str) -> str:
    """The one line that the command says before it fails."""
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("anabranch: ")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    return captured.err


def test_plan(tmp_path: Path, capsys: Capture) -> None:
    path = write_flow(tmp_path)
    assert main(["plan", path]) == 0
    text = capsys.readouterr().out
    assert text.startswith("flow shop  fingerprint ")
    assert "counts (count)  ← channel 0  region counts" in text
    assert main(["plan", f"{path}:flow", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["stages"] == 2
    assert text.split()[3] == shown["fingerprint"][:16]


def test_plan_of_a_relative_path(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    write_flow(tmp_path, "import helper\n" + FLOW)
    (tmp_path / "helper.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "shop.py"]) == 0
    assert capsys.readouterr().out.startswith("flow shop")
    write_flow(tmp_path, FLOW + "rows.nothing()\n", "wrong.py")
    assert "wrong.py, line 7: AttributeError" in fails(capsys, "plan", "wrong.py")


def test_planning_does_without_spark(tmp_path: Path) -> None:
    code = (
        "import sys; from anabranch.cli.main import main; "
        f"assert main(['plan', {write_flow(tmp_path)!r}]) == 0; assert 'pyspark' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        (None, "", r"shop.py: there is no such file"),
        ("x = 1\n", "", r"shop.py builds no flow"),
        (FLOW + "other = ab.Flow('other')\n", "", r"has 2 flows (flow, other); name one: "),
        (FLOW, ":nope", r"no flow is called 'nope'; it has ['flow']"),
        ("x = 1\ny = x / 0\n", "", r"shop.py, line 2: ZeroDivisionError: division by zero"),
        ("def f():\n    raise KeyError('k')\n\nf()\n", "", r"shop.py, line 2: KeyError: 'k'"),
        ("import anabranch as ab\nflow = ab.Flow('no name')\n", "", r"shop.py, line 2: flow 'no name'"),
        (
            "import anabranch as ab\n\nrows = ab.generator(rows=-1)\n",
            "",
            r"shop.py, line 3: generator: partitions",
        ),
        ("x = (\n", "", r"SyntaxError"),
        ("import anabranch as ab\nflow = ab.Flow('f')\n", "", r"flow 'f' has no input"),
        (FLOW + "again = flow\n", ":again", None),
        (FLOW + "again = flow\n", "", None),
    ],
)
def test_flow_files(
    tmp_path: Path, capsys: Capture, text: str | None, target: str, message: str | None
) -> None:
    path = str(tmp_path / "shop.py") if text is None else write_flow(tmp_path, text)
    if message is None:
        assert main(["plan", path + target]) == 0
    else:
        assert message in fails(capsys, "plan", path + target)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["rescue"], "invalid choice: 'rescue'"),
        (["run", "flow.py"], "required: --dir"),
        (["run", "flow.py", "--dir", "x", "--workers", "many"], "--workers: invalid int value: 'many'"),
        (["run", "flow.py", "--dir", "x", "--conf", "spark.ui.port"], "'spark.ui.port' is not KEY=VALUE"),
        (["run", "flow.py", "--dir", "x", "--conf", "=1"], "'=1' is not KEY=VALUE"),
        (["output", "x", "out", "--table", "--changes"], "not allowed with"),
    ],
)
def test_wrong_calls(capsys: Capture, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0"], "workers=0: must be a whole number of at least 1"),
        (["--step-ms", "0"], "target_seconds=0.0: must be more than 0"),
        (["--hosts", "2", "--master", "spark://x:7077"], "--hosts is for embedded runs"),
        (
            ["--conf", "spark.task.maxFailures=4"],
            "--conf spark.task.maxFailures=4: this setting is fixed at 1",
        ),
    ],
)
def test_wrong_settings_of_run(tmp_path: Path, capsys: Capture, arguments: list[str], message: str) -> None:
    path = write_flow(tmp_path)
    assert message in fails(capsys, "run", path, "--dir", str(tmp_path / "job"), *arguments)


def test_run_in_a_foreign_directory(tmp_path: Path, capsys: Capture) -> None:
    path = write_flow(tmp_path)
    assert "is not empty and is not a job directory" in fails(capsys, "run", path, "--dir", str(tmp_path))
    assert [file.name for file in tmp_path.iterdir() if file.name != "__pycache__"] == ["shop.py"]


@pytest.mark.parametrize("command", ["status", "stop", "output"])
def test_no_job(tmp_path: Path, capsys: Capture, command: str) -> None:
    assert "does not exist; `anabranch run" in fails(capsys, command, str(tmp_path / "no"))
    assert "is not a job directory" in fails(capsys, command, str(tmp_path))


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    """A job that ran two steps and stopped."""
    flow = ab.Flow("shop")
    rows = flow.input("rows", ab.iterable([], schema={"item": str, "n": int, "raw": bytes}))
    sink = ab.parquet()
    rows.output("sold", sink)
    jobdir = JobDir(tmp_path / "job")
    with jobdir.locked() as epoch:
        jobdir.create(make_plan(flow))
        board = StatusBoard(jobdir, "shop", epoch)
    log = StepLog(jobdir.log)
    progress = Progress()
    steps: list[list[tuple[Any, ...]]] = [
        [("pen", 1, b"\xff", 1), ("ink", 2, b"", 1)],
        [("pen", 1, b"\xff", -1)],
    ]
    for number, changed in enumerate(steps):
        frame = pl.DataFrame(changed, schema={**rows.schema, WEIGHT: pl.Int64()}, orient="row")
        staged = sink.stage(
            frame.with_columns(pl.lit(number, pl.Int64).alias(STEP)),
            jobdir.outputs.child("sold"),
            f"s{number}",
        )
        sink.publish(jobdir.outputs.child("sold"), [staged])
        outputs = {"sold": {"rows": frame.height, "files": [staged.to_json()]}}
        commit = {"step": number, "epoch": 1, "input_rows": 5, "outputs": outputs, "touched": {}}
        log.write_plan(Step(number), Epoch(1), {}, 0)
        log.write_commit(Step(number), commit)
        progress.advance({"slices": {}}, commit)
    board.stopped(progress)
    return jobdir


def test_status(job: JobDir, capsys: Capture) -> None:
    assert main(["status", str(job.path)]) == 0
    text = capsys.readouterr().out
    assert text.splitlines() == ["shop: stopped", "  steps      2", "  rows       10 in, 3 out"]
    assert main(["status", str(job.path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["state"], shown["steps"], shown["dir"]) == ("stopped", 2, str(job.path))


def test_status_of_a_job_that_died(job: JobDir, capsys: Capture) -> None:
    job.write_status({**job.status(), "state": "running", "error": None})
    assert main(["status", str(job.path)]) == 0
    assert capsys.readouterr().out.startswith("shop: died\n")
    job.storage.delete("status.json")
    assert main(["status", str(job.path)]) == 0
    assert capsys.readouterr().out == "shop: new\n"


def test_stop_of_a_job_that_does_not_run(job: JobDir, capsys: Capture) -> None:
    assert main(["stop", str(job.path)]) == 0
    assert capsys.readouterr().out == f"{job.path} is not running\n"
    assert main(["stop", str(job.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"was_running": False, "state": "stopped", "steps": 2}
    assert not job.stop_asked()


def test_stop_says_what_it_waits_for(job: JobDir, capsys: Capture) -> None:
    with job.locked():
        job.write_status({**job.status(), "state": "running"})
        message = fails(capsys, "stop", str(job.path), "--timeout", "0.2")
    assert (
        "has not stopped within 0.2 s; it is waiting for the step under way. `stop --force` stops it now"
        in message
    )
    assert job.stop_asked()


def test_waiting_is_told_of(job: JobDir, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = ["state to be synced to disk", "the final checkpoint"]
    locked = job.locked()
    locked.__enter__()

    def goes_on(seconds: float) -> None:
        if not reasons:
            locked.__exit__(None, None, None)
            return
        job.write_status({**job.status(), "waiting_for": reasons.pop(0)})
        job.clear("checkpoint")

    monkeypatch.setattr("anabranch.runtime.jobhandle.time.sleep", goes_on)
    monkeypatch.setattr("anabranch.runtime.jobhandle._TELL_EVERY", 0.0)
    assert main(["checkpoint", str(job.path)]) == 0
    assert capsys.readouterr() == ("no checkpoints\n", "waiting for the checkpoint to be written …\n")
    assert main(["stop", str(job.path)]) == 0
    out, err = capsys.readouterr()
    assert out == "stopped after 2 steps\n"
    assert err == "waiting for state to be synced to disk …\nwaiting for the final checkpoint …\n"
    assert "is not running, so there is nothing new to checkpoint; `anabranch checkpoint" in fails(
        capsys, "checkpoint", str(job.path)
    )


def test_output(job: JobDir, capsys: Capture) -> None:
    path = str(job.path)
    assert main(["output", path]) == 0
    assert capsys.readouterr().out == "sold\ndead_letters\n"
    assert main(["output", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ["sold", "dead_letters"]

    assert main(["output", path, "sold", "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"item": "ink", "n": 2, "raw": ""}
    ]
    assert main(["output", path, "sold", "--changes", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["item"], line["__weight"], line["__step"]) for line in lines] == [
        ("pen", 1, 0),
        ("ink", 1, 0),
        ("pen", -1, 1),
    ]
    assert lines[0]["raw"] == "/w=="

    assert main(["output", path, "sold", "--table"]) == 0
    text = capsys.readouterr().out
    assert "ink" in text
    assert "pen" not in text
    assert "__weight" not in text
    assert text.endswith("\n1 row\n")
    assert main(["output", path, "sold", "--changes", "--limit", "2"]) == 0
    assert capsys.readouterr().out.endswith("2 of 3 changes\n")
    assert main(["output", path, "dead_letters", "--json"]) == 0
    assert capsys.readouterr().out == ""
    assert "no output 'nope'; it has sold, dead_letters" in fails(capsys, "output", path, "nope")
    assert "--limit -1: must be at least 0" in fails(capsys, "output", path, "sold", "--limit", "-1")


def test_verbose_shows_the_trace(tmp_path: Path, capsys: Capture, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["--verbose", "status", str(tmp_path)]) == 1
    assert "Traceback" in caplog.text


def test_an_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    flow = tmp_path / "flow.py"
    flow.write_text(
        "import anabranch as ab\nflow = ab.Flow('f')\nflow.input('i', ab.iterable([], schema={'größer': str})).output('o')\n"
    )
    command = [sys.executable, "-m", "anabranch.cli.main", "plan", str(flow)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "anabranch: the output cannot be written: No space left on device\n",
    )
    ascii_only = subprocess.run(
        command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, check=False
    )
    assert (ascii_only.returncode, ascii_only.stderr) == (0, "")
    assert "gr??er" in ascii_only.stdout
