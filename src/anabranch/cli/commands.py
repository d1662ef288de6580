"""What each command does."""

from __future__ import annotations

import json
import signal
import sys
import time
from argparse import Namespace
from types import FrameType
from typing import Any

import polars as pl

from anabranch.cli.checkpoints import checkpoint_lines
from anabranch.cli.display import JsonDisplay, TextDisplay, human, plural, tell_waiting
from anabranch.cli.job import open_job
from anabranch.cli.load import load_flow
from anabranch.cli.rescale import migration_lines
from anabranch.errors import ConfigError
from anabranch.flow.plan import make_plan
from anabranch.flow.render import as_json, as_text
from anabranch.model.batch import WEIGHT
from anabranch.runtime.jobhandle import Job
from anabranch.runtime.outputs import changes, json_ready, output_names, table
from anabranch.runtime.settings import Settings

_SHOWN = 50
LIVE_STATES = ("starting", "recovering", "running", "idle", "stopping")
"""States that only a running coordinator is in."""


def run(options: Namespace) -> int:
    # Spark is a second's import; the other commands do without.
    from anabranch.runtime.coordinator import Coordinator

    settings = Settings(
        workers=options.workers,
        hosts=options.hosts,
        master=options.master,
        conf=dict(options.conf),
        target_seconds=options.step_ms / 1000,
        max_step_rows=options.max_step_rows,
        max_step_bytes=options.max_step_mb << 20,
        shards=options.shards,
        state_dir=options.state_dir,
        until_idle=options.until_idle,
        steps=options.steps,
        ui=options.ui,
        recovery_partitions=options.recovery_partitions,
        retain_steps=options.retain_steps,
        **_checkpoint_every(options.checkpoint_every),
    )
    display: JsonDisplay | TextDisplay = JsonDisplay() if options.json else TextDisplay()
    plan = make_plan(load_flow(options.flow, for_workers=True))
    coordinator = Coordinator(plan, options.dir, settings, display)

    def stop(signum: int, frame: FrameType | None) -> None:
        # The second time, the user means it: fall back to Python's own way.
        coordinator.request_stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def listen() -> None:
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)

    listen()
    # PySpark puts a handler of its own, which cancels the step under way, in the place of ours.
    display.when_started = listen
    display.stopped(coordinator.run())
    return 0


def _checkpoint_every(given: list[tuple[str, float]] | None) -> dict[str, Any]:
    if not given:
        return {}
    units = [unit for unit, _ in given]
    if len(set(units)) < len(units) or ("never" in units and len(units) > 1):
        raise ConfigError("--checkpoint-every: give a time, a number of steps or both, or never")
    every = dict(given)
    return {
        "checkpoint_seconds": every.get("seconds"),
        "checkpoint_steps": int(every["steps"]) if "steps" in every else None,
    }


def status(options: Namespace) -> int:
    jobdir = open_job(options.dir)
    found = jobdir.status()
    running = jobdir.running()
    if not running and found["state"] in LIVE_STATES:
        found["state"] = "died"
    if options.json:
        print(json.dumps({**found, "dir": str(jobdir.path)}, indent=2))
        return 0
    print(f"{jobdir.job()['flow']}: {found['state']}")
    if "steps" in found:
        print(f"  steps      {found['steps']:,}")
        print(f"  rows       {found['input_rows']:,} in, {found['output_rows']:,} out")
    if "workers" in found:
        hosts = ", ".join(found["hosts"])
        print(
            f"  workers    {found['workers']} on {hosts}; {found['shards']} shards, layout {found['layout']}"
        )
    for migration in [found.get("migration"), *(found.get("queued", ()) if running else ())]:
        for line in migration_lines(migration, running):
            print(line)
    if running and "step_seconds" in found:
        print(f"  last step  {found['step_seconds'] * 1000:.0f} ms; {human(found['rows_per_second'])} rows/s")
        print(f"  backlog    {found['backlog_rows']:,} rows, {human(found['backlog_bytes'])}B")
    if running:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["started"]))
        print(f"  process    {found['process']}, since {since}")
    for fault in found.get("faults", [])[-3:]:
        print(f"  fault      step {fault['step']}, attempt {fault['attempt']}: {fault['error']}")
    for note in found.get("notes", [])[-3:]:
        print(f"  note       {note['text']}")
    if running and found.get("waiting_for"):
        print(f"  waiting    for {found['waiting_for']}")
    for line in checkpoint_lines(jobdir):
        print(line)
    if found.get("error"):
        print(f"  error      {found['error']}")
    return 0


def stop(options: Namespace) -> int:
    job = Job(options.dir)
    was_running = job.running()
    found = job.stop(
        force=options.force, timeout=options.timeout, tell=None if options.json else tell_waiting
    )
    steps = found.get("steps", 0)
    state = "stopped" if found["state"] in LIVE_STATES else found["state"]
    if options.json:
        print(json.dumps({"was_running": was_running, "state": state, "steps": steps}))
    else:
        print(
            f"stopped after {plural(steps, 'step')}" if was_running else f"{job.jobdir.path} is not running"
        )
    return 0


def plan(options: Namespace) -> int:
    made = make_plan(load_flow(options.flow))
    print(json.dumps(as_json(made), indent=2, default=str) if options.json else as_text(made))
    return 0


def output(options: Namespace) -> int:
    jobdir = open_job(options.dir)
    if options.name is None:
        names = output_names(jobdir)
        print(json.dumps(names) if options.json else "\n".join(names))
        return 0
    if options.limit is not None and options.limit < 0:
        raise ConfigError(f"--limit {options.limit}: must be at least 0")
    frame = changes(jobdir, options.name) if options.changes else table(jobdir, options.name)
    if not options.changes and frame.height and (frame.get_column(WEIGHT) == 1).all():
        frame = frame.drop(WEIGHT)
    limit = options.limit if options.limit is not None else (frame.height if options.json else _SHOWN)
    shown = frame.head(limit)
    if options.json:
        if shown.height:
            sys.stdout.write(json_ready(shown).write_ndjson())
        return 0
    with pl.Config(
        tbl_rows=-1,
        tbl_cols=-1,
        tbl_hide_dataframe_shape=True,
        tbl_width_chars=160,
        fmt_str_lengths=60,
        tbl_hide_column_data_types=True,
    ):
        print(shown)
    part = f"{shown.height:,} of " if shown.height < frame.height else ""
    print(part + plural(frame.height, "change" if options.changes else "row"))
    return 0
