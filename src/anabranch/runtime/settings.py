"""What a run can be told, with the defaults that fit a laptop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from anabranch.errors import ConfigError
from anabranch.runtime.sizing import FIRST_ROWS


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run a flow; none of it changes what the flow computes.

    Args:
        workers: partitions of every stage; None takes what the job had, or one per core of this machine.
        hosts: embedded only: logical hosts with state directories of their own.
        master: a Spark master; the default is embedded, on all cores.
        conf: more Spark settings.
        target_seconds: how long a step should last.
        first_step_rows: rows of the first step, before anything is known about how long they take.
        max_step_rows, max_step_bytes: limits of one step, so that memory is bounded.
        shards: a fixed number of shards for a new job; None takes about 16 for each worker.
        state_dir: where hosts keep their shards; None: in the job directory.
        until_idle: stop when all input there is has been read.
        steps: stop after so many steps.
        checkpoint_seconds: a checkpoint is begun when the last one is this old; None: not by time.
        checkpoint_steps: the same, in steps.  With neither, there are none but those that are asked for.
        recovery_partitions: into how many parts checkpoints are cut, fixed when the job is made; None: 32.
        retain_steps: for how many steps outputs are kept; None: for ever.
        max_attempts: how often a step is tried before the flow goes back to a checkpoint.
        ui: whether Spark's own web page is reachable.
    """

    workers: int | None = None
    hosts: int | None = None
    master: str = "local[*]"
    conf: Mapping[str, str] = field(default_factory=dict)
    target_seconds: float = 0.2
    first_step_rows: int = FIRST_ROWS
    max_step_rows: int = 20_000_000
    max_step_bytes: int = 256 << 20
    shards: int | None = None
    state_dir: str | None = None
    until_idle: bool = False
    steps: int | None = None
    checkpoint_seconds: float | None = 30.0
    checkpoint_steps: int | None = None
    recovery_partitions: int | None = None
    retain_steps: int | None = None
    max_attempts: int = 5
    ui: bool = False

    def __post_init__(self) -> None:
        for name, least in (
            ("workers", 1),
            ("hosts", 1),
            ("shards", 1),
            ("steps", 0),
            ("first_step_rows", 1),
            ("max_step_rows", 1),
            ("max_step_bytes", 1),
            ("checkpoint_steps", 1),
            ("recovery_partitions", 1),
            ("retain_steps", 1),
            ("max_attempts", 1),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise ConfigError(f"{name}={value!r}: must be a whole number of at least {least}")
        if self.workers is not None and self.workers > 1024:
            raise ConfigError(f"workers={self.workers}: at most 1024")
        if self.shards is not None and self.shards > 65_536:
            raise ConfigError(f"shards={self.shards}: at most 65536")
        if self.recovery_partitions is not None and self.recovery_partitions > 65_536:
            raise ConfigError(f"recovery_partitions={self.recovery_partitions}: at most 65536")
        if self.checkpoint_seconds is not None and not self.checkpoint_seconds > 0:
            raise ConfigError(f"checkpoint_seconds={self.checkpoint_seconds!r}: must be more than 0")
        if not self.target_seconds > 0:
            raise ConfigError(f"target_seconds={self.target_seconds!r}: must be more than 0")
        if self.hosts is not None and not self.embedded:
            raise ConfigError(
                "--hosts is for embedded runs; on a cluster, the hosts are those of its executors"
            )

    @property
    def checkpoints(self) -> bool:
        """Whether checkpoints are made by themselves."""
        return self.checkpoint_seconds is not None or self.checkpoint_steps is not None

    @property
    def embedded(self) -> bool:
        return self.master.startswith("local")
