"""Side-by-side measuring: rows of results, their table and JSON file, and peers in environments of their own.

A suite is a script with a `main` that hands its benchmarks, which build `Row`s, to `run_chosen`. Both sides run in one
invocation, in turn, so that a slow minute of the machine hits both; a figure is the median over those turns.
A peer is a script in `bench/peers` that prints one JSON object as its last line and knows nothing of us.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PEERS = ROOT / "bench" / "peers"
VENVS = ROOT / ".bench-venvs"
LOGS = ROOT / "build" / "bench" / "logs"

ARROW = ("pyarrow==26.0.1", "numpy==2.4.6")

# What each peer needs. Python's transformWithState needs pandas and protobuf, which Spark does not install.
PACKAGES: dict[str, tuple[str, ...]] = {
    "spark": ("pyspark==4.3.0", "pandas==3.1.1", "protobuf==6.33.5", *ARROW),
    # Spark imports pandas, NumPy and Arrow at its start wherever they are, which a query without them need not pay for.
    "bare-spark": ("pyspark==4.3.0",),
    "bytewax": ("bytewax==0.21.1", *ARROW),
}


class PeerFailed(Exception):
    """A peer ended badly or printed no result; the message says where its log is."""


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison. `ratio` is ours / theirs; `bound` reads like ">= 4" or "<= 0.4"; `holds` judges it."""

    name: str
    ours: float
    theirs: float
    unit: str
    ratio: float
    bound: str
    holds: bool


def compare(
    name: str, ours: float, theirs: float, unit: str, *, least: float | None = None, most: float | None = None
) -> Row:
    """A row whose ratio must be at least `least`, or at most `most`; exactly one of them is given.

    >>> compare("sum", 8.0, 2.0, "rows/s", least=3).holds
    True
    """
    if (least is None) == (most is None):
        raise ValueError(f"benchmark {name!r} needs exactly one of `least` and `most`")
    ratio = ours / theirs if theirs else (1.0 if not ours else sys.float_info.max)
    if least is not None:
        return Row(name, ours, theirs, unit, ratio, f">= {least:g}", ratio >= least)
    assert most is not None
    return Row(name, ours, theirs, unit, ratio, f"<= {most:g}", ratio <= most)


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text: names left, figures right."""
    head = ("name", "ours", "theirs", "unit", "ratio", "bound", "holds")
    body = [
        (
            r.name,
            figure(r.ours),
            figure(r.theirs),
            r.unit,
            f"{r.ratio:.2f}",
            r.bound,
            "yes" if r.holds else "NO",
        )
        for r in rows
    ]
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
    left = {0, 3}

    def line(cells: Sequence[str]) -> str:
        pairs = zip(cells, widths, strict=True)
        return "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(pairs)).rstrip()

    return "\n".join([line(head), line(["-" * w for w in widths]), *(line(cells) for cells in body)])


def figure(value: float) -> str:
    """Four significant digits for small values, whole numbers with separators for large ones."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def finish(benchmark: str, rows: Sequence[Row]) -> int:
    """Prints the table, writes `bench/results/<benchmark>.json`, gives the exit code: 0 if all bounds hold.

    A quick run writes to the same file: what is there is what was last measured.
    """
    print(f"\n{benchmark}\n{table(rows)}", flush=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    target = RESULTS / f"{benchmark}.json"
    target.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    missed = [row.name for row in rows if not row.holds]
    if missed:
        print(f"missed: {', '.join(missed)}", flush=True)
    return 1 if missed else 0


@dataclass(frozen=True, slots=True)
class Options:
    """`quick`: a small run that still measures. `only`: names of benchmarks' rows to run; empty means all."""

    quick: bool
    rounds: int
    only: tuple[str, ...]


Benchmark = Callable[[Options], list[Row]]


def options(description: str, argv: Sequence[str] | None = None, *, rounds: int = 3) -> Options:
    """The command line that every benchmark has; `rounds` is what a run that is not quick does by default."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a small run that still measures")
    parser.add_argument("--rounds", type=int, help=f"turns per side (default: {rounds}, quick: 1)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="measure this row only; repeatable"
    )
    args = parser.parse_args(argv)
    turns = args.rounds if args.rounds is not None else (1 if args.quick else rounds)
    if turns < 1:
        parser.error(f"--rounds must be at least 1, not {turns}")
    return Options(quick=args.quick, rounds=turns, only=tuple(args.only))


def run_chosen(suite: str, benchmarks: Mapping[str, Benchmark], chosen: Options) -> int:
    """Run the benchmarks of a suite that were asked for, or all; the exit status.

    One whose side fails is said to have failed at the end, and what the others have measured in an hour is kept.
    """
    unknown = set(chosen.only) - benchmarks.keys()
    if unknown:
        names = ", ".join(sorted(unknown))
        print(f"no benchmark is called {names}; there are {', '.join(benchmarks)}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    failed: list[str] = []
    for name in chosen.only or benchmarks:
        print(f"{name} …", flush=True)
        try:
            rows += benchmarks[name](chosen)
        except PeerFailed as error:
            failed.append(f"{name} failed: {error}")
            print(failed[-1], flush=True)
    suffix = "-" + "-".join(chosen.only) if chosen.only else ""
    status = finish(f"{suite}{suffix}", rows)
    print(*failed, sep="\n", end="\n" if failed else "", flush=True)
    return 1 if failed else status


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def alternate(
    ours: Callable[[], float],
    theirs: Callable[[], float],
    rounds: int,
    *,
    best_theirs: Literal["max", "min"] | None = None,
) -> tuple[float, float]:
    """Runs both sides `rounds` times in turn, each going first in half of the rounds; medians of both.

    With `best_theirs`, the peer gets its best round instead of its median: a claim that holds against that
    does not rest on the peer's bad luck.
    """
    mine: list[float] = []
    peers: list[float] = []
    for number in range(rounds):
        turns = [(ours, mine), (theirs, peers)]
        for run, found in turns if number % 2 == 0 else reversed(turns):
            found.append(run())
    if best_theirs is None:
        return median(mine), median(peers)
    return median(mine), max(peers) if best_theirs == "max" else min(peers)


def environment(peer: str) -> Path:
    """The Python of the peer's own virtual environment; made on first use and when its packages change."""
    venv = VENVS / peer
    python = venv / "bin" / "python"
    packages = PACKAGES[peer]
    stamp = venv / "packages.txt"
    wanted = "\n".join(packages) + "\n"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing {peer}: {' '.join(packages)}", flush=True)
    shutil.rmtree(venv, ignore_errors=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"install-{peer}.log"
    with log.open("wb") as out:
        for command in (
            [sys.executable, "-m", "venv", str(venv)],
            [str(python), "-m", "pip", "install", "--disable-pip-version-check", *packages],
        ):
            if subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode != 0:
                raise PeerFailed(f"could not install peer {peer!r} ({' '.join(packages)}): see {log}")
    # Written last: an environment that an interrupt left half made has no stamp and is made again.
    stamp.write_text(wanted)
    return python


def ours(script: str, *args: object, timeout: float = 900) -> dict[str, Any]:
    """Runs `bench/ours/<script>.py` in a process of its own, as peers run, and returns its result."""
    return _run(
        script, [sys.executable, "-m", f"bench.ours.{script}", *(str(arg) for arg in args)], ROOT, timeout
    )


def peer(script: str, *args: object, timeout: float = 900) -> dict[str, Any]:
    """Runs `bench/peers/<script>.py` in its environment and returns the JSON object of its last line.

    The environment is the script's name up to the first underscore. The log of a failure is kept and named.

    Raises:
        PeerFailed: it exited with an error, took longer than `timeout` seconds, or printed no result.
    """
    name = script.partition("_")[0]
    command = [str(environment(name)), str(PEERS / f"{script}.py"), *(str(arg) for arg in args)]
    with tempfile.TemporaryDirectory(prefix="bench-peer-") as work:
        return _run(script, command, Path(work), timeout)


def inherited() -> dict[str, str]:
    """The environment of a side: a peer must not run with our interpreter, our Spark or our module path."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("SPARK_", "PYSPARK_", "PYTHON"))}


def _run(script: str, command: list[str], work: Path, timeout: float) -> dict[str, Any]:
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{script}-{os.getpid()}-{time.monotonic_ns()}.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=work,
            env=inherited(),
            start_new_session=True,
        ) as child,
    ):
        try:
            printed, _ = child.communicate(timeout=timeout)
            outcome = f"exit code {child.returncode}"
        except subprocess.TimeoutExpired:
            printed, outcome = "", f"no end within {timeout:g} s"
        finally:
            # The JVM and the worker processes of a peer are in its session: none outlives this call.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    result = _last_object(printed)
    if result is None or child.returncode != 0:
        with log.open("a") as out:
            out.write(f"\n--- stdout ---\n{printed}\n--- {outcome}\n")
        raise PeerFailed(f"{script} gave no result ({outcome}): see {log}")
    log.unlink()
    return result


def _last_object(printed: str) -> dict[str, Any] | None:
    for text in reversed(printed.splitlines()):
        if text.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                return dict(json.loads(text))
    return None


@contextlib.contextmanager
def scratch(name: str) -> Iterator[Path]:
    """An empty directory on the repository's disk, where both sides write; removed at the end."""
    parent = ROOT / "build" / "bench"
    parent.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
