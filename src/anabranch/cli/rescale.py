"""`anabranch rescale`: ask for another layout, and watch the way there.  And how `status` tells of it."""

from __future__ import annotations

import json
import shutil
import sys
import time
from argparse import Namespace
from typing import Any, TextIO

from anabranch.cli.display import bar, human, plural
from anabranch.errors import ConfigError, JobDirError
from anabranch.runtime.jobhandle import ENDED, Job, check_cancelled, check_done

_PLAIN_EVERY = 1.0
_PHASES = {
    "queued": "waiting for the rescaling before it",
    "preparing": "preparing",
    "copying": "copying",
    "moving": "moving",
    "dropping": "dropping old copies",
    "stopping": "stopping, to start again",
}

Json = dict[str, Any]


def rescale(options: Namespace) -> int:
    job = Job(options.dir)
    where = job.jobdir.path
    wishes = options.workers is not None or options.hosts is not None or bool(options.remove_host)
    if options.cancel and wishes:
        raise ConfigError("--cancel goes without --workers, --hosts and --remove-host: it only turns back")
    if not wishes and not options.cancel:
        raise ConfigError("say what to change: --workers, --hosts or --remove-host; or --cancel")
    if options.cancel and not job.running():
        raise JobDirError(f"{where} is not running, so no rescaling is under way")
    if not job.running():
        many = "N" if options.workers is None else options.workers
        raise JobDirError(
            f"{where} is not running; `anabranch run FLOW.py --dir {where} --workers {many}` starts it so"
        )
    if options.cancel:
        migration = job.cancel_rescale(wait=False)
        if not migration:
            print("{}" if options.json else "the rescalings that were queued are cancelled")
            return 0
    else:
        migration = job.rescale(
            options.workers,
            hosts=options.hosts,
            strategy=options.strategy,
            budget=options.budget,
            remove_hosts=options.remove_host,
            wait=False,
        )
    if options.wait:
        migration, waited = _watch(job, migration, options)
        if not waited:
            sys.stderr.write(_left_alone(migration, where, options.cancel) + "\n")
            return 130
    if options.json:
        print(json.dumps(migration))
    if options.wait:
        (check_cancelled if options.cancel else check_done)(migration)
    if not options.json:
        print(
            _ending(migration) if migration["state"] in ENDED else _accepted(migration, where, options.cancel)
        )
    return 0


def _watch(job: Job, migration: Json, options: Namespace) -> tuple[Json, bool]:
    """The last account that came, and whether the user has waited for the end."""
    progress = ProgressDisplay()
    try:
        for shown in job.watch(migration, options.timeout):
            migration = shown
            if not options.json and shown["state"] not in ENDED:
                progress.show(shown)
    except KeyboardInterrupt:
        return migration, False
    finally:
        progress.close()
    return migration, True


class ProgressDisplay:
    """One line that is rewritten on a terminal; elsewhere one a second at most, when there is news."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self._said = ""
        self._next = 0.0

    def show(self, migration: Json) -> None:
        line = progress_line(migration)
        if self.live:
            width = shutil.get_terminal_size().columns
            self.stream.write(f"\r\x1b[K{line[: width - 1]}")
            self.stream.flush()
        elif line != self._said and time.monotonic() >= self._next:
            self._next = time.monotonic() + _PLAIN_EVERY
            self.stream.write(line + "\n")
            self.stream.flush()
        self._said = line

    def close(self) -> None:
        """Leave the line as if nothing had been there."""
        if self.live and self._said:
            self.stream.write("\r\x1b[K")
            self.stream.flush()


def progress_line(migration: Json) -> str:
    """How far a rescaling under way has come."""
    if migration["state"] == "queued":
        return f"{change(migration)}: {_phase(migration)}"
    parts = [f"{change(migration)}, {strategy(migration)} {_bar(migration)} {_phase(migration)}"]
    parts += [*_moved(migration), *_left(migration)]
    if migration["latency_now"] is not None:
        parts.append(_latency(migration))
    return " · ".join(parts)


def migration_lines(migration: Json | None, running: bool) -> list[str]:
    """What `status` says of the rescaling under way, or of the last one."""
    if migration is None:
        return []
    head = f"{change(migration)}, {strategy(migration)}"
    if migration["state"] in ENDED:
        said = f"  rescaled   {head}: {migration['state']} after {_seconds(migration['seconds'])}"
        if migration["state"] == "done":
            said += f", layout {migration['layout']}"
            more = ", ".join([*_moved(migration), *_longest(migration)])
        else:
            more = migration["error"]
        return [said, _indented(more)] if more else [said]
    if not running:
        return [
            f"  rescaling  {head}: under way when the job ended",
            _indented("the next run goes on with the layout of before or after"),
        ]
    lines = [f"  rescaling  {head}: {_phase(migration)}"]
    if migration["state"] != "queued":
        parts = [*_moved(migration), *_left(migration)]
        lines.append(_indented(f"{_bar(migration)} {', '.join(parts)}".rstrip()))
        if migration["latency_now"] is not None:
            lines.append(_indented(", ".join([_latency(migration), *_longest(migration)])))
    return lines


def change(migration: Json) -> str:
    """What changes: 2 → 4 workers, and the hosts and shards if they do."""
    before, after = migration["from"], migration["to"]
    parts = [_arrow(before["workers"], after["workers"], "worker")]
    if len(before["hosts"]) != len(after["hosts"]):
        parts.append(_arrow(len(before["hosts"]), len(after["hosts"]), "host"))
    elif set(before["hosts"]) != set(after["hosts"]):
        parts.append("other hosts")
    if before["shards"] != after["shards"]:
        parts.append(_arrow(before["shards"], after["shards"], "shard"))
    return ", ".join(parts)


def strategy(migration: Json) -> str:
    """The strategy, and that it was chosen for the user if it was."""
    resolved, asked = migration["strategy"], migration["asked"]
    return str(resolved) if asked in (resolved, None) else f"{resolved} ({asked})"


def duration(seconds: float) -> str:
    """About how long: 3 s, 4 min, 2 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6_000 else f"{seconds / 3600:.0f} h"


def _accepted(migration: Json, where: str, cancel: bool) -> str:
    if cancel:
        return f"rescaling {migration['id']} turns back; `anabranch status {where}` shows it"
    state = "is queued" if migration["state"] == "queued" else "has begun"
    return f"rescaling {migration['id']} {state}: {change(migration)}; `anabranch status {where}` shows it"


def _left_alone(migration: Json, where: str, cancel: bool) -> str:
    """What becomes of a rescaling that nobody waits for any more."""
    shows, back = f"`anabranch status {where}` shows it", f"`anabranch rescale {where} --cancel`"
    if cancel:
        return f"the way back goes on; {shows}"
    if migration["state"] == "queued":
        return f"the rescaling is still queued; {shows}, {back} forgets it and turns back the one under way"
    return f"the rescaling goes on; {shows}, {back} turns it back"


def _ending(migration: Json) -> str:
    if migration["state"] == "done" and migration["from"] == migration["to"]:
        hosts = ", ".join(migration["to"]["hosts"])
        return f"nothing changes: the job has {change(migration)} on {hosts} already"
    if migration["state"] == "cancelled":
        return f"rescaling {migration['id']} was cancelled after {_seconds(migration['seconds'])}; the layout is as before"
    parts = [f"rescaled {change(migration)} in {_seconds(migration['seconds'])}, {strategy(migration)}"]
    parts += _moved(migration) + _longest(migration)
    return " · ".join([*parts, f"layout {migration['layout']}"])


def _arrow(before: int, after: int, noun: str) -> str:
    return plural(after, noun) if before == after else f"{before:,} → {plural(after, noun)}"


def _bar(migration: Json) -> str:
    if migration.get("resharding"):
        return bar(migration["copied"] / migration["resharding"], 1)
    # Bytes tell of the shard on its way too, but their total is an estimate; shards are counted.
    done = max(
        migration[f"{unit}_moved"] / total
        for unit in ("bytes", "shards")
        for total in [migration[f"{unit}_total"] or 1]
    )
    return bar(done, 1)


def _left(migration: Json) -> list[str]:
    seconds = migration["eta_seconds"]
    done = not migration.get("resharding") and _whole(migration)
    return [] if seconds is None or done else [f"{duration(seconds)} left"]


def _whole(migration: Json) -> bool:
    return bool(migration["shards_moved"] == migration["shards_total"])


def _phase(migration: Json) -> str:
    if migration.get("cancelled") and migration["state"] not in ENDED:
        return "turning back"
    return _PHASES.get(migration["state"], str(migration["state"]))


def _moved(migration: Json) -> list[str]:
    shards, all_shards = migration["shards_moved"], migration["shards_total"]
    resharding = _resharding(migration)
    if not all_shards:
        if resharding:
            # Whether any moves behind that is not known yet.
            return resharding
        # While it is being prepared, nobody knows yet; a start anew rebuilds shards, and moves none.
        known = migration["state"] in ("moving", "dropping", "done") and migration["strategy"] != "stop-start"
        return ["no shard leaves its host"] if known else []
    back = " back" if migration.get("cancelled") else ""
    parts = [*resharding, f"{shards:,} of {plural(all_shards, 'shard')}{back}"]
    if migration["bytes_total"]:
        total = "" if _whole(migration) else f" of {human(migration['bytes_total'])}B"
        parts.append(f"{human(migration['bytes_moved'])}B{total}")
    return parts


def _resharding(migration: Json) -> list[str]:
    """That shards split or merge just now, if they do."""
    shards = migration.get("resharding")
    if shards is None:
        return []
    splits = shards == max(migration["from"]["shards"], migration["to"]["shards"])
    copied = f", {migration['copied']:,} copied" if migration["copied"] else ""
    return [f"{'splitting' if splits else 'merging'} into {plural(shards, 'shard')}{copied}"]


def _latency(migration: Json) -> str:
    now, before = migration["latency_now"], migration["latency_before"]
    return f"step {now * 1000:.0f} ms" + ("" if before is None else f" (before: {before * 1000:.0f})")


def _longest(migration: Json) -> list[str]:
    longest = migration["longest_step"]
    return [] if longest is None else [f"longest step {longest * 1000:.0f} ms"]


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else duration(seconds)


def _indented(text: str) -> str:
    return " " * 13 + text
