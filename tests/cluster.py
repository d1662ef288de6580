"""A real Spark standalone cluster on loopback addresses: a master and one worker process per host.  Hosts join and die.

And how a flow is run there, and where its tasks have run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pyspark

HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"


class Cluster:
    """The running cluster: its master's address and each host's own state directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = _free_port()
        self.master = f"spark://127.0.0.1:{self.port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        """By host, and the master's."""

    def state_dir(self, host: str) -> Path:
        return self.root / "disks" / host

    def arguments(self, **conf: str) -> list[str]:
        """What `anabranch run` needs to use it, with more settings of Spark."""
        settings = {
            "spark.executor.memory": "600m",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            **conf,
        }
        return ["--master", self.master, *(f"--conf={name}={value}" for name, value in settings.items())]

    def start(self, hosts: tuple[str, ...]) -> None:
        self._spawn(
            "master", {}, "org.apache.spark.deploy.master.Master",
            "--host", "127.0.0.1", "--port", str(self.port), "--webui-port", "0",
        )  # fmt: skip
        _wait_for("127.0.0.1", self.port)
        for host in hosts:
            self.join(host)

    def join(self, host: str) -> None:
        """Start a host's Spark worker; running applications get an executor there by themselves."""
        self.state_dir(host).mkdir(parents=True, exist_ok=True)
        self._spawn(
            host, {"ANABRANCH_STATE_DIR": str(self.state_dir(host)), "SPARK_LOCAL_IP": host},
            "org.apache.spark.deploy.worker.Worker",
            "--host", host, "--cores", "1", "--memory", "700m", "--webui-port", "0",
            "--work-dir", str(self.root / "work" / host), self.master,
        )  # fmt: skip

    def shut_down(self, host: str) -> None:
        """Kill a host's Spark worker and its executors; the disk stays."""
        _kill(self.processes.pop(host))

    def lose(self, host: str) -> None:
        """A host dies with its disk."""
        self.shut_down(host)
        # Spark's Python processes notice that their executor is gone, and may write until then.
        while self.state_dir(host).exists():
            shutil.rmtree(self.state_dir(host), ignore_errors=True)

    def _spawn(self, name: str, env: dict[str, str], *command: str) -> None:
        environment = {**os.environ, **env, "SPARK_DAEMON_MEMORY": "256m", "PYSPARK_PYTHON": sys.executable}
        with open(self.root / f"{name}.log", "wb") as log:
            self.processes[name] = subprocess.Popen(
                [str(_CLASS), *command], env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def stop(self) -> None:
        for process in self.processes.values():
            _kill(process)


@contextlib.contextmanager
def standalone_cluster(root: Path, hosts: tuple[str, ...] = HOSTS) -> Iterator[Cluster]:
    root.mkdir(parents=True, exist_ok=True)
    cluster = Cluster(root)
    try:
        cluster.start(hosts)
        yield cluster
    finally:
        cluster.stop()


def run_command(directory: Path, flow: str) -> list[str]:
    """`anabranch run` of a flow, by its text, in a job directory; what it says is JSON."""
    script = directory.parent / "clusterflow.py"
    script.write_text(flow)
    return [
        *(sys.executable, "-m", "anabranch.cli.main", "run", str(script)),
        *("--dir", str(directory), "--json"),
    ]


def recording(events: Path) -> dict[str, str]:
    """Settings with which Spark writes down what it does, in one file in a folder."""
    events.mkdir()
    return {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": f"file://{events}",
        "spark.eventLog.rolling.enabled": "false",
        "spark.eventLog.compress": "false",
    }


def places_of_tasks(events: Path, *, only_steps: bool = False) -> dict[int, list[str]]:
    """Where tasks ran, by the number of the worker."""
    stages: set[int] = set()
    places: dict[int, list[str]] = defaultdict(list)
    for line in next(events.iterdir()).read_text().splitlines():
        event = json.loads(line)
        # Whatever else the coordinator asks of hosts is done in the stage that made their handles, and another one.
        if event["Event"] == "SparkListenerJobStart" and len(event["Stage IDs"]) > 2:
            stages |= set(event["Stage IDs"])
        elif event["Event"] == "SparkListenerTaskEnd" and (event["Stage ID"] in stages or not only_steps):
            places[event["Task Info"]["Index"]].append(event["Task Info"]["Host"])
    return places


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its executors: they are of its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for(host: str, port: int, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
            return
        time.sleep(0.1)
    raise TimeoutError(f"nothing listens at {host}:{port}")
