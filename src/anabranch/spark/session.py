"""Start and stop the Spark context that carries a flow.

Spark's settings here are part of the guarantees: a failed task aborts the job at once, so that the
coordinator, and nobody else, runs a step again.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pyspark import SparkConf, SparkContext

from anabranch.errors import ConfigError, SparkLost

log = logging.getLogger(__name__)

GUARANTEES: Mapping[str, str] = {
    # Otherwise Spark would quietly finish a step on another host, over an empty store.
    "spark.task.maxFailures": "1",
    "spark.stage.maxConsecutiveAttempts": "1",
    "spark.speculation": "false",
    "spark.python.worker.reuse": "true",
    "spark.python.daemon.module": "anabranch.spark.daemon",
    "spark.dynamicAllocation.enabled": "false",
}
"""Settings that a user cannot change."""

DEFAULTS: Mapping[str, str] = {
    # Halves the fixed cost of a stage.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "2g",
    # A task must wait for its home: elsewhere it would only find that its shards are not there.
    "spark.locality.wait": "30s",
    # Blobs are few and large, and mostly stay on one machine: compressing costs more than it saves.
    "spark.shuffle.compress": "false",
    "spark.shuffle.spill.compress": "false",
    "spark.rdd.compress": "false",
    "spark.broadcast.compress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # The JVM moves blobs and computes nothing: the quick compiler and the simple collector leave the cores to the
    # workers.  On 2 cores, steps of 1,000 rows took 70 ms instead of 90, and the first ones 200 ms instead of 290.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}

_SLOTS = 16
"""Of an embedded run on all cores, at the least: a flow may be given more workers than there are cores."""

_ONE_THREAD = {"POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1", "ARROW_NUM_THREADS": "1"}
"""Workers are the parallelism: a kernel with threads of its own would fight its neighbours."""


@contextmanager
def spark_context(
    name: str, master: str, conf: Mapping[str, str], log_file: Path | None, ui: bool = False
) -> Iterator[SparkContext]:
    """A Spark context whose JVM writes its console noise to `log_file`."""
    check_java()
    settings = settings_for(name, master, conf, ui)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    spark_conf = SparkConf(loadDefaults=True)
    for key, value in settings.items():
        spark_conf.set(key, value)
    # Spark's Python processes inherit the JVM's environment.  Given to SparkContext instead, every task would
    # carry it along.
    with _errors_to(log_file), _environment({**_ONE_THREAD, "PYTHONPATH": _own_modules()}):
        # SparkContext puts its own handler for Ctrl-C in the place of whatever was there.
        interrupted = signal.getsignal(signal.SIGINT)
        context = SparkContext(conf=spark_conf)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupted)
        context.setLogLevel("ERROR")
    try:
        yield context
    finally:
        try:
            context.stop()
        except OSError as error:
            # Its JVM was killed.  The next context of this process must not look for it.
            log.warning("Spark did not stop error=%s", error)
            SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None


def check_alive(context: SparkContext) -> None:
    """Raises SparkLost when the JVM below a context is gone.  Costs a system call.

    A flow without input asks nothing of Spark, and would not notice for hours.
    """
    process = getattr(context._gateway, "proc", None)
    if process is not None and process.poll() is not None:
        raise spark_lost()


def spark_lost() -> SparkLost:
    return SparkLost(
        "Spark's JVM has died; run the same command again to go on after the last committed step"
    )


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for processes that are started inside."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _own_modules() -> str:
    """Where the driver finds modules that are not installed, such as those beside the flow's file: workers on the
    same machine look there too."""
    return os.pathsep.join(
        path
        for path in sys.path
        if path and not path.startswith((sys.prefix, sys.base_prefix)) and os.path.isdir(path)
    )


@contextmanager
def borrowed(context: SparkContext) -> Iterator[SparkContext]:
    """Use a context that somebody else made and will stop.  Raises ConfigError when its settings break a guarantee."""
    conf = context.getConf()
    for key, value in GUARANTEES.items():
        if key != "spark.dynamicAllocation.enabled" and conf.get(key) != value:
            raise ConfigError(f"the Spark context has {key}={conf.get(key)}; a flow needs {value}")
    yield context


def settings_for(name: str, master: str, conf: Mapping[str, str], ui: bool) -> dict[str, str]:
    """The whole configuration.  Raises ConfigError when `conf` would break a guarantee."""
    for key, value in conf.items():
        if key in GUARANTEES and GUARANTEES[key] != value:
            raise ConfigError(
                f"--conf {key}={value}: this setting is fixed at {GUARANTEES[key]}, because the exactly-once "
                "guarantee stands on it"
            )
    settings = {"spark.app.name": f"anabranch {name}", "spark.master": _with_spare_slot(master), **DEFAULTS}
    settings["spark.ui.enabled"] = str(ui).lower()
    if not master.startswith("local"):
        # Executors on other machines must reach the driver; Spark finds its address by itself.
        del settings["spark.driver.host"], settings["spark.driver.bindAddress"]
        settings |= {f"spark.executorEnv.{key}": value for key, value in _ONE_THREAD.items()}
    return {**settings, **conf, **GUARANTEES}


def _with_spare_slot(master: str) -> str:
    """An embedded master with one slot more than asked for, and with room for more workers than cores.

    Checkpoints are Spark jobs of their own that run at low priority; in a slot of the steps, their priority would
    become that of the steps that wait for it.  A slot is a thread of the JVM: one that nobody needs costs nothing.
    """
    embedded = re.fullmatch(r"local(?:\[(\d+|\*)\])?", master)
    if embedded is None:
        return master
    slots = max(_SLOTS, os.cpu_count() or 1) if embedded[1] == "*" else int(embedded[1] or 1)
    return f"local[{slots + 1}]"


def check_java() -> None:
    """Say in one line what is missing, before Spark says it in fifty."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not os.access(java, os.X_OK):
        raise ConfigError(
            "Java was not found and Spark needs Java 17: install it (Debian: apt-get install openjdk-17-jre-headless) "
            "or set JAVA_HOME"
        )
    try:
        subprocess.run([java, "-version"], check=True, capture_output=True, timeout=60)
    except (subprocess.SubprocessError, OSError) as error:
        raise ConfigError(f"Java at {java} does not run: {error}") from None


@contextmanager
def _errors_to(log_file: Path | None) -> Iterator[None]:
    """Let the JVM that is started inside write its standard error to a file.

    It inherits the descriptor for life, so its later noise goes there too.
    """
    if log_file is None:
        yield
        return
    try:
        # Beside an object store, nobody else has made this machine's directory of the job yet.
        log_file.parent.mkdir(parents=True, exist_ok=True)
        target = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise ConfigError(f"{log_file} cannot be written: {error.strerror}") from error
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        os.dup2(target, 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)
        os.close(target)
