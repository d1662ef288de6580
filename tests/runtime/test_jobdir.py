"""The job directory: who may write to it, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import anabranch as ab
from anabranch.errors import CorruptError, Fenced, JobDirError
from anabranch.flow.plan import Plan, make_plan
from anabranch.model.ids import Epoch, HostId, Step
from anabranch.model.layout import FixedSharding, initial_layout
from anabranch.model.placement import Placement, next_version
from anabranch.runtime.jobdir import JobDir
from anabranch.storage import record


def plan(key: str = "key", name: str = "f", extra: bool = False, top: bool = False) -> Plan:
    flow = ab.Flow(name)
    keyed = flow.input("rows", ab.generator(rows=10)).key_by(key)
    (keyed.max("id", name="agg") if top else keyed.sum("id", name="agg")).output("out")
    if extra:
        keyed.distinct(name="extra").output("more")
    return make_plan(flow)


def test_a_new_job(tmp_path: Path) -> None:
    jobdir = JobDir(tmp_path / "deep" / "job")
    assert not jobdir.exists()
    with jobdir.locked() as epoch:
        assert epoch == 1
        job = jobdir.create(plan())
    assert jobdir.exists()
    assert jobdir.job() == record.read(jobdir.storage, "job.json")
    assert jobdir.job()["id"] == job["id"]
    assert jobdir.placement() is None
    assert jobdir.status() == {"state": "new"}
    jobdir.check_same_flow(plan())


def test_epochs_grow(tmp_path: Path) -> None:
    epochs = []
    for _ in range(3):
        with JobDir(tmp_path).locked() as epoch:
            epochs.append(epoch)
    assert epochs == [Epoch(1), Epoch(2), Epoch(3)]


def test_the_second_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    with JobDir(tmp_path).locked():
        assert JobDir(tmp_path).running()
        with (
            pytest.raises(JobDirError, match=rf"being run by process {os.getpid()} on .*anabranch stop"),
            JobDir(tmp_path).locked(),
        ):
            pass
    assert not JobDir(tmp_path).running()


def test_looking_does_not_keep_a_job_from_starting(tmp_path: Path) -> None:
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            JobDir(tmp_path).running()

    watchers = [threading.Thread(target=look) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    try:
        for _ in range(20):
            with JobDir(tmp_path).locked():
                pass
    finally:
        done.set()
        for watcher in watchers:
            watcher.join()


HOLDER = """
import sys, pathlib, signal
from anabranch.runtime.jobdir import JobDir
with JobDir(pathlib.Path(sys.argv[1])).locked():
    print("locked", flush=True)
    signal.pause()
"""


def test_the_lock_of_a_dead_process_is_free(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        assert JobDir(tmp_path).running()
        with pytest.raises(JobDirError, match=f"process {holder.pid} on"), JobDir(tmp_path).locked():
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert not JobDir(tmp_path).running()
        with JobDir(tmp_path).locked() as epoch:
            assert epoch == 2


def test_a_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    refused = pytest.raises(JobDirError, match=r"not empty and is not a job directory.*'thesis.tex'")
    with refused, JobDir(tmp_path).locked():
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(JobDirError, match=r"is not a job directory"):
        JobDir(tmp_path).job()
    with pytest.raises(JobDirError, match=r"nowhere does not exist.*anabranch run"):
        JobDir(tmp_path / "nowhere").job()


@pytest.mark.parametrize("path", ["file", "file/job"])
def test_a_file_is_no_directory(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("precious")
    with (
        pytest.raises(JobDirError, match=r"file.* cannot be used as a job directory: "),
        JobDir(tmp_path / path).locked(),
    ):
        pass
    with pytest.raises(JobDirError, match=r"is not a job directory|does not exist"):
        JobDir(tmp_path / path).job()
    assert not JobDir(tmp_path / path).running()


def test_a_coordinator_that_died_at_once_left_nothing_that_matters(tmp_path: Path) -> None:
    with JobDir(tmp_path).locked():
        for folder in ("epochs", "layouts", "log", "inputs", "outputs", "state", "control"):
            (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / ".job.json.0123.tmp").touch()
    with JobDir(tmp_path).locked():
        JobDir(tmp_path).create(plan())
    assert JobDir(tmp_path).exists()


def test_a_half_deleted_job_is_not_started_anew(tmp_path: Path) -> None:
    jobdir = JobDir(tmp_path)
    with jobdir.locked():
        jobdir.create(plan())
        jobdir.write_layout(Placement(initial_layout(2, [HostId("h")], FixedSharding(4)), (0,) * 4), Step(0))
    (tmp_path / "job.json").unlink()
    with pytest.raises(JobDirError, match=r"no job.json, and has 'layouts'"), jobdir.locked():
        pass


def test_layouts_are_kept(tmp_path: Path) -> None:
    jobdir = JobDir(tmp_path)
    with jobdir.locked():
        jobdir.create(plan())
    placement = Placement(initial_layout(2, [HostId("h")], FixedSharding(4)), (0, 7, 0, 7))
    jobdir.write_layout(placement, Step(0), {"kind": "first"})
    assert jobdir.placement() == placement
    with pytest.raises(Fenced, match=r"layout 0 was written by another coordinator"):
        jobdir.write_layout(placement, Step(0))
    moved = next_version(placement, placement.layout, cuts={})
    assert jobdir.placement(moved) == moved
    jobdir.write_layout(next_version(moved, placement.layout), Step(9))
    assert jobdir.placement(moved).version == 2
    assert [(one["step"], one["why"]) for one in jobdir.layouts()] == [(0, {"kind": "first"}), (9, {})]


def test_a_lost_layout_is_told(tmp_path: Path) -> None:
    jobdir = JobDir(tmp_path)
    with jobdir.locked():
        jobdir.create(plan())
    record.create(jobdir.log, "000000000/000000000000.commit", {})
    with pytest.raises(CorruptError, match=r"layouts is empty, but steps were planned"):
        jobdir.placement()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"key": "value"},
            [r"operator 'key_by_1': keys was \['key'\], is \['value'\]", r"operator 'agg': schema was"],
        ),
        ({"name": "g"}, [r"the flow was called 'f', is called 'g'"]),
        ({"extra": True}, [r"operator 'extra' is new", r"operator 'more.output' is new"]),
        ({"top": True}, [r"operator 'agg': kind was 'sum', is 'max'"]),
    ],
    ids=["key", "name", "more", "kind"],
)
def test_a_changed_flow_is_told_what_changed(
    tmp_path: Path, changed: dict[str, Any], said: list[str]
) -> None:
    jobdir = JobDir(tmp_path)
    with jobdir.locked():
        jobdir.create(plan())
    for message in said:
        with pytest.raises(JobDirError, match=message):
            jobdir.check_same_flow(plan(**changed))


def test_a_changed_order_of_columns_is_told(tmp_path: Path) -> None:
    def ordered(*columns: str) -> Plan:
        flow = ab.Flow("f")
        source = ab.iterable([], schema=dict.fromkeys(columns, int))
        flow.input("rows", source).distinct(name="d").output("out")
        return make_plan(flow)

    jobdir = JobDir(tmp_path)
    with jobdir.locked():
        jobdir.create(ordered("b", "a"))
    jobdir.check_same_flow(ordered("b", "a"))
    with pytest.raises(
        JobDirError, match=r"operator 'd': schema was {'b': .*, 'a': .*}, is {'a': .*, 'b': .*}"
    ):
        jobdir.check_same_flow(ordered("a", "b"))


def test_an_operator_that_is_gone_is_told(tmp_path: Path) -> None:
    jobdir = JobDir(tmp_path)
    with jobdir.locked():
        jobdir.create(plan(extra=True))
    with pytest.raises(
        JobDirError, match=r"operator 'extra' is gone; operator 'more.output' is gone\. Run the flow"
    ):
        jobdir.check_same_flow(plan())


def test_another_format_is_refused(tmp_path: Path) -> None:
    jobdir = JobDir(tmp_path)
    with jobdir.locked():
        job = jobdir.create(plan())
    record.replace(jobdir.storage, "job.json", {**job, "format": 99})
    with pytest.raises(JobDirError, match=r"has format 99, this version of Anabranch reads format 1"):
        jobdir.job()


def test_a_damaged_job_is_told(tmp_path: Path) -> None:
    jobdir = JobDir(tmp_path)
    with jobdir.locked():
        jobdir.create(plan())
    (tmp_path / "job.json").write_text("{}")
    with pytest.raises(CorruptError, match=r"job.json"):
        jobdir.job()


def test_wishes(tmp_path: Path) -> None:
    jobdir = JobDir(tmp_path)
    jobdir.clear_wishes()
    assert not jobdir.stop_asked()
    jobdir.ask_to_stop()
    jobdir.ask_to_stop()
    assert jobdir.stop_asked()
    jobdir.clear_wishes()
    assert not jobdir.stop_asked()
