"""A real Spark standalone cluster of loopback hosts, each with a state directory of its own.  Hosts join, die and leave."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path

import psutil
import pyspark

from chaos.job import wait_until

_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
_DEPLOY = "org.apache.spark.deploy"


def host_name(number: int) -> str:
    """An address of this machine's own."""
    return f"127.0.0.{number + 2}"


HOSTS = tuple(map(host_name, range(3)))


class Cluster:
    """A master, and one worker process per host."""

    def __init__(self, root: Path, hosts: Sequence[str], env: Mapping[str, str]) -> None:
        self.root = root
        self.hosts: list[str] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.master = f"spark://127.0.0.1:{self.port}"
        self._env = {
            **env,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "PYSPARK_PYTHON": sys.executable,
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._first = list(hosts)
        self._joined: set[str] = set()

    def start(self) -> None:
        where = ["--host", "127.0.0.1", "--port", str(self.port), "--webui-port", "0"]
        self._spawn("master", {}, f"{_DEPLOY}.master.Master", *where)
        if not wait_until(self._listening, 60, 0.1):
            raise TimeoutError(f"no Spark master at {self.master}")
        for host in self._first:
            self.join(host)

    def join(self, host: str) -> None:
        """Start a host's Spark worker; running applications get an executor there by themselves."""
        own = {"ANABRANCH_STATE_DIR": str(self.state_dir(host)), "SPARK_LOCAL_IP": host}
        size = ["--cores", "1", "--memory", "700m", "--webui-port", "0"]
        work = ["--work-dir", str(self.root / "work" / host)]
        self.state_dir(host).mkdir(parents=True, exist_ok=True)
        self._spawn(host, own, f"{_DEPLOY}.worker.Worker", "--host", host, *size, *work, self.master)
        self.hosts.append(host)
        self._joined.add(host)

    def unused(self) -> str:
        """An address that no host had."""
        return next(name for name in map(host_name, count()) if name not in self._joined)

    def shut_down(self, host: str) -> None:
        """Kill all that runs on a host; the disk stays."""
        below = self.below(host)
        _kill([self._processes.pop(host)], below)
        self.hosts.remove(host)

    def lose(self, host: str) -> None:
        """A host dies with its disk."""
        self.shut_down(host)
        # Its Python processes may write until they are gone.
        while self.state_dir(host).exists():
            shutil.rmtree(self.state_dir(host), ignore_errors=True)

    def arguments(self, **conf: str) -> list[str]:
        """What `anabranch run` needs to use it, with more settings of Spark."""
        settings = {
            "spark.executor.memory": "600m",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            **conf,
        }
        return ["--master", self.master, *(f"--conf={key}={value}" for key, value in settings.items())]

    def state_dir(self, host: str) -> Path:
        return self.root / "disks" / host

    def below(self, host: str | None = None) -> list[psutil.Process]:
        """Executors and their Python processes, of one host or of all."""
        found: list[psutil.Process] = []
        for name, process in self._processes.items():
            if host is None or name == host:
                with contextlib.suppress(psutil.Error):
                    found += psutil.Process(process.pid).children(recursive=True)
        return found

    def executors(self) -> list[psutil.Process]:
        found = []
        for process in self.below():
            with contextlib.suppress(psutil.Error):
                if "CoarseGrainedExecutorBackend" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def stop(self) -> None:
        _kill(self._processes.values(), self.below())

    def _spawn(self, name: str, env: dict[str, str], *arguments: str) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.root / f"{name}.log", "wb") as log:
            self._processes[name] = subprocess.Popen(
                [str(_CLASS), *arguments],
                env={**self._env, **env},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _listening(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False


def _kill(processes: Iterable[subprocess.Popen[bytes]], below: list[psutil.Process]) -> None:
    """Processes with their groups, and then what was below them in groups of its own."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for orphan in below:
        with contextlib.suppress(psutil.Error):
            orphan.kill()
