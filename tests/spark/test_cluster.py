"""On a real standalone cluster of three hosts, each with a state directory of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import anabranch as ab
from anabranch.log.steplog import StepLog
from anabranch.runtime.jobdir import JobDir
from chaos.cluster import HOSTS, Cluster
from cluster import check_totals, places_of_tasks, recording, run_command, standalone_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROWS, KEYS, SEED = 60_000, 500, 9
FLOW = f'''
import os
import signal
from pathlib import Path

import anabranch as ab

FLAG = os.environ.get("KILL_FLAG")


def executor_of(process):
    """The JVM above a Python task: the daemon's parent."""
    for _ in range(2):
        process = int(Path(f"/proc/{{process}}/stat").read_text().rsplit(")", 1)[1].split()[1])
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
rows = flow.input("rows", ab.generator(rows={ROWS}, keys={KEYS}, seed={SEED}))
totals = rows.key_by("key").aggregate(n=ab.count(), total=ab.sum("value"))
totals.map(kill_once).output("totals")
totals.select("n").key_by("n").count().output("sizes")
'''


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):
    with standalone_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def on_cluster(
    cluster: Cluster,
    directory: Path,
    conf: dict[str, str] | None = None,
    env: dict[str, str] | None = None,
) -> list[dict[str, object]]:
    limits = ("--until-idle", "--max-step-rows", "10000", "--workers", "6")
    done = subprocess.run(
        [*run_command(directory, FLOW), *limits, *cluster.arguments(**(conf or {}))],
        env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(directory: Path) -> None:
    source = ab.generator(rows=ROWS, keys=KEYS, seed=SEED)
    check_totals(directory, "rows", source)
    assert StepLog(JobDir(directory).log).load().input_rows == ROWS


def test_every_task_runs_where_its_shards_are(cluster: Cluster, tmp_path: Path) -> None:
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
    check(tmp_path / "job")


def test_a_killed_executor(cluster: Cluster, tmp_path: Path) -> None:
    seen = on_cluster(cluster, tmp_path / "job", env={"KILL_FLAG": str(tmp_path / "killed")})
    assert (tmp_path / "killed").exists()
    assert [event for event in seen if event["event"] == "fault"]
    check(tmp_path / "job")
