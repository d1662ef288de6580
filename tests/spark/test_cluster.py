"""On a real standalone cluster of three hosts, each with a state directory of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from anabranch.runtime.jobdir import JobDir
from anabranch.runtime.outputs import table
from chaos.cluster import HOSTS, Cluster
from cluster import places_of_tasks, recording, run_command, standalone_cluster

pytestmark = pytest.mark.cluster

FLOW = '''
import os
import signal
from pathlib import Path

import anabranch as ab

FLAG = os.environ.get("KILL_FLAG")


def executor_of(process):
    """The JVM above a Python task: the daemon's parent."""
    for _ in range(2):
        process = int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return process


def kill_once(row, flag=FLAG):
    if flag is not None:
        try:
            os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return row
        os.kill(executor_of(os.getpid()), signal.SIGKILL)
    return row


flow = ab.Flow("cluster")
rows = flow.input("rows", ab.generator(rows=60_000, keys=500, seed=9))
totals = rows.key_by("key").aggregate(n=ab.count(), total=ab.sum("value"))
totals.map(kill_once).output("totals")
totals.select("n").key_by("n").count().output("sizes")
'''


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):
    with standalone_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def run_flow(directory: Path, *arguments: str, env: dict[str, str] | None = None) -> list[dict[str, object]]:
    done = subprocess.run(
        [*run_command(directory, FLOW), "--until-idle", "--max-step-rows", "10000", *arguments],
        env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def on_cluster(
    cluster: Cluster,
    directory: Path,
    conf: dict[str, str] | None = None,
    env: dict[str, str] | None = None,
) -> list[dict[str, object]]:
    return run_flow(directory, *cluster.arguments(**(conf or {})), "--workers", "6", env=env)


def outputs(directory: Path) -> dict[str, list[tuple[object, ...]]]:
    return {name: sorted(table(JobDir(directory), name).rows()) for name in ("totals", "sizes")}


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("embedded") / "job"
    run_flow(directory, "--workers", "3", "--hosts", "3")
    assert {path.name for path in (directory / "state").iterdir()} == {"host-0", "host-1", "host-2"}
    return directory


@pytest.mark.slow
def test_every_task_runs_where_its_shards_are(cluster: Cluster, embedded: Path, tmp_path: Path) -> None:
    events = tmp_path / "events"
    seen = on_cluster(cluster, tmp_path / "job", recording(events))
    assert not [event for event in seen if event["event"] == "fault"]
    placement = JobDir(tmp_path / "job").placement()
    assert placement is not None
    layout = placement.layout
    assert set(layout.workers) == set(HOSTS)
    places = places_of_tasks(events)
    assert sum(map(len, places.values())) > 6 * 3 * 5
    assert {worker: {host} for worker, host in enumerate(layout.workers)} == {
        worker: set(hosts) for worker, hosts in places.items()
    }
    job = JobDir(tmp_path / "job").job()["id"]
    for host in HOSTS:
        here = {path.name for path in (cluster.state_dir(host) / job / host).glob("shard-*")}
        mine = {f"shard-{s:05d}" for s, owner in enumerate(layout.shards) if layout.workers[owner] == host}
        assert here == mine
    assert outputs(tmp_path / "job") == outputs(embedded)


def test_a_killed_executor(cluster: Cluster, embedded: Path, tmp_path: Path) -> None:
    seen = on_cluster(cluster, tmp_path / "job", env={"KILL_FLAG": str(tmp_path / "killed")})
    assert (tmp_path / "killed").exists()
    assert [event for event in seen if event["event"] == "fault"]
    assert outputs(tmp_path / "job") == outputs(embedded)
