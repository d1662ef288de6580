"""The harm that can be done to a job, each with a weight.

An action is given the round; it raises `Failed` when the job does something that it must not.  One that takes the
driver down leaves it down: the round starts the next one.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from chaos.job import Driver, Failed, command, python_workers, send, wait_until
from chaos.rescales import cancel, leave_host, rescale

if TYPE_CHECKING:
    from chaos.round import Round

_PATIENCE = 120.0


@dataclass(frozen=True)
class Action:
    """What to do, how likely it is, and when it can be done at all."""

    do: Callable[[Round], None]
    weight: float
    possible: Callable[[Round], bool] = lambda round_: True


# Kills.


def kill_worker(round_: Round) -> None:
    cluster = round_.cluster
    found = python_workers(cluster.below()) if cluster is not None else round_.driver.workers()
    if not found:
        round_.counts["missed"] += 1
        return
    victim = round_.rng.choice(found)
    if send(victim, signal.SIGKILL):
        round_.count("kills", f"killed Python worker {victim.pid}")


def kill_driver(round_: Round) -> None:
    """The driver's Python alone.  Its JVM, with the tasks under way, may live on for a while beside the next one."""
    round_.driver.below()
    send(round_.driver.top, signal.SIGKILL)
    round_.driver.process.wait()
    round_.count("kills", "killed the driver")


def kill_jvm(round_: Round) -> None:
    jvm = round_.driver.jvm()
    if jvm is None or not send(jvm, signal.SIGKILL):
        return
    round_.count("kills", "killed the driver's JVM")
    if round_.driver.wait(_PATIENCE) is None:
        raise Failed(f"the driver still runs {_PATIENCE:.0f} s after its JVM was killed")
    round_.tell(f"the driver said: {round_.driver.said()[-200:]}")


def kill_all(round_: Round) -> None:
    executors = round_.cluster.below() if round_.cluster is not None else []
    round_.driver.kill_tree()
    for process in executors:
        send(process, signal.SIGKILL)
    round_.count("kills", "killed everything")


def kill_executor(round_: Round) -> None:
    assert round_.cluster is not None
    found = round_.cluster.executors()
    if found and send(victim := round_.rng.choice(found), signal.SIGKILL):
        round_.count("kills", f"killed executor {victim.pid}")


def kill_host(round_: Round) -> None:
    """A whole host while the others go on, with its disk; one that is new takes its place, at once or later."""
    cluster = round_.cluster
    assert cluster is not None
    host = round_.rng.choice(cluster.hosts)
    cluster.lose(host)
    round_.count("kills", f"killed host {host}")
    if round_.rng.random() < 0.5:
        join_host(round_)


def join_host(round_: Round) -> None:
    assert round_.cluster is not None
    host = round_.cluster.unused()
    round_.cluster.join(host)
    round_.tell(f"host {host} joins")


def ghosts(round_: Round) -> None:
    """The driver, while its JVM and Python workers stand still: they wake up, in the middle of a task, beside the next.

    The JVM must sleep, too: when it died, the kernel would end the sleepers below it by SIGHUP.
    """
    asleep = [process for process in round_.driver.below() if send(process, signal.SIGSTOP)]
    send(round_.driver.top, signal.SIGKILL)
    round_.driver.process.wait()
    round_.haunt(asleep)
    round_.count("kills", f"killed the driver; {len(asleep)} processes below it sleep")


# Orderly stops, and a second driver.


def restart(round_: Round) -> None:
    """An orderly stop; the next driver may have another number of workers."""
    round_.stop()


def zombie(round_: Round) -> None:
    """A driver that stands still keeps its job: another one is refused.  It goes on as if nothing had been."""
    first = round_.driver
    send(first.top, signal.SIGSTOP)
    try:
        second = Driver(round_.arguments(), round_.root / f"second-{round_.number()}", round_.env)
        status = second.wait(_PATIENCE)
        second.clean_up()
    finally:
        send(first.top, signal.SIGCONT)
    round_.count("refused", f"a second driver was refused: {second.said()[-160:]}")
    if status != 1:
        raise Failed(f"a second driver beside a stopped one ended with {status}, expected 1: {second.said()}")
    if str(first.process.pid) not in second.said():
        raise Failed(f"the refusal does not name process {first.process.pid}: {second.said()}")


# Damage while the job is down.


def lose_host(round_: Round) -> None:
    kill_all(round_)
    host = round_.rng.choice(round_.hosts())
    shutil.rmtree(host, ignore_errors=True)
    round_.count("damages", f"removed {host}")


def corrupt_state(round_: Round) -> None:
    """One shard's file: half of it gone, its header zero, other bytes altogether, or no file."""
    kill_all(round_)
    victim = round_.rng.choice([path for host in round_.hosts() for path in sorted(host.glob("*/data.mdb"))])
    data = bytearray(victim.read_bytes())
    how = round_.rng.choice(("half", "header", "bytes", "gone"))
    if how == "half":
        data = data[: len(data) // 2]
    elif how == "header":
        data[:8192] = bytes(8192)
    elif how == "bytes":
        data = bytearray(round_.rng.randbytes(len(data)))
    if how == "gone":
        victim.unlink()
    else:
        victim.write_bytes(data)
    round_.damaged = victim
    round_.count("damages", f"damaged {victim} ({how})")


def corrupt_piece(round_: Round) -> None:
    """A file of the newest checkpoint, and a host's state with it, so that the one before has to do.

    If that host does not need the file, nobody notices, and checkpoints are built upon it; there is a backup then.
    """
    kill_all(round_)
    victim = round_.rng.choice(_own_files(_versions(round_)[-1]))
    round_.backups[victim] = victim.read_bytes()
    _flip(victim, round_)
    host = round_.rng.choice(round_.hosts())
    shutil.rmtree(host, ignore_errors=True)
    round_.count("damages", f"damaged {victim}, removed {host}")


def corrupt_snapshot(round_: Round) -> None:
    """The newest snapshot of the step log; the one before and a longer tail add up to the same."""
    kill_all(round_)
    victim = _snapshots(round_)[-1]
    _flip(victim, round_)
    round_.count("damages", f"damaged {victim}")


def _flip(path: Path, round_: Round) -> None:
    data = bytearray(path.read_bytes())
    data[round_.rng.randrange(len(data))] ^= 1 << round_.rng.randrange(8)
    path.write_bytes(data)


def _snapshots(round_: Round) -> list[Path]:
    return sorted((round_.job / "log").glob("snapshot-*.json"))


def _versions(round_: Round) -> list[Path]:
    """Checkpoints that are complete, the newest last."""
    found = [path.parent for path in (round_.job / "checkpoints").glob("*/manifest*")]
    return sorted(found, key=lambda path: int(path.name))


def _own_files(version: Path) -> list[Path]:
    return sorted(path for path in version.rglob("*") if path.is_file())


# A full disk.


def fill_disk(round_: Round) -> None:
    """No room for a while.  The job may wait or stop, and says why; it goes on when there is room again."""
    ballast = round_.disk / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
    round_.count("damages", "filled the disk")
    wait_until(lambda: not round_.driver.running, 4)
    ballast.unlink()
    # It may be slow to notice, or wait for room: the round knows why, should it stop later.
    round_.was_full = True


def make_disk(path: Path, megabytes: int) -> bool:
    """Mount a small disk; False where that is not allowed."""
    path.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)]
    return subprocess.run(mount, capture_output=True, check=False).returncode == 0


def remove_disk(path: Path, keep: Path | None) -> None:
    """Unmount; what was on it is copied to `keep` first, if that is given."""
    if keep is not None:
        shutil.copytree(path, keep, dirs_exist_ok=True)
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def status(job: Path) -> str:
    """What `anabranch status` says; it must always work."""
    done = subprocess.run(command("status", str(job)), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failed(f"anabranch status: {done.stderr}")
    return done.stdout


def _embedded(round_: Round) -> bool:
    return round_.cluster is None


ACTIONS: dict[str, Action] = {
    "worker": Action(kill_worker, 150),
    "driver": Action(kill_driver, 8),
    "jvm": Action(kill_jvm, 4),
    "all": Action(kill_all, 6),
    "executor": Action(kill_executor, 100, lambda r: r.cluster is not None),
    "host": Action(kill_host, 6, lambda r: r.cluster is not None and len(r.cluster.hosts) > 1),
    "join_host": Action(join_host, 6, lambda r: r.cluster is not None and len(r.cluster.hosts) < 3),
    "leave_host": Action(leave_host, 12, lambda r: r.cluster is not None and len(r.cluster.hosts) > 1),
    "ghosts": Action(ghosts, 5, _embedded),
    "restart": Action(restart, 6),
    "zombie": Action(zombie, 2),
    "rescale": Action(rescale, 90),
    "cancel": Action(cancel, 40, lambda r: r.rescales.open),
    "lose_host": Action(lose_host, 4, lambda r: bool(r.hosts())),
    "corrupt_state": Action(corrupt_state, 3, lambda r: bool(r.hosts())),
    "corrupt_piece": Action(corrupt_piece, 4, lambda r: len(_versions(r)) > 1 and bool(r.hosts())),
    "corrupt_snapshot": Action(corrupt_snapshot, 6, lambda r: len(_snapshots(r)) > 1),
    "disk_full": Action(fill_disk, 4, lambda r: r.small_disk and _embedded(r)),
}
"""Every action by name; `--actions` chooses among them.  Those that need something first, such as a second snapshot of the
log, weigh more when they can be done."""
