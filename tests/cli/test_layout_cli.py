"""`layout` and `hosts` against a control server that plays a script; no Spark."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import anabranch as ab
from anabranch.cli.hosts import host_lines
from anabranch.cli.layout import history_lines, runs
from anabranch.cli.main import main
from anabranch.cli.rescale import progress_line
from anabranch.errors import UserError
from anabranch.model.ids import HostId, Incarnation, LayoutVersion, ShardId, Step, WorkerId
from anabranch.model.layout import Layout
from anabranch.model.placement import Cut, Intent, Placement
from anabranch.model.ranges import hash_range
from anabranch.runtime.jobdir import JobDir
from scripted import Capture, Script, account, fails, new_job, run_by


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    return new_job(tmp_path)


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
