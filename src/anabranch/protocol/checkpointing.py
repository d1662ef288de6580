"""When to checkpoint, when its manifest may be committed, and what may be forgotten after it.

Theory of operation
-------------------
A checkpoint as of step *c* is the state after all steps below *c*.  It is made in the background while steps
go on, in three moves: `StartSnapshot` writes the pieces, `CommitManifest` makes them a version once the outputs of
every step below *c* are published, `TrimTo` frees what only older versions needed.  One is under way at a time.

One is due when there is something new since the newest version and
a clock says so (`every_seconds` since the last one began), or the steps do (`every_steps` since the newest
version's step), or the undo ring does (more than `undo_limit_bytes` since then: the ring is what survivors go
back by, and it can only be cut behind a version), or somebody asked, or the flow stops.

Who asks wants everything up to that moment.  A snapshot that is under way serves an ask whose step is not beyond its
own; a later ask is served by the next one.  A failed snapshot never stops the flow: it is tried again under a new
number, after a pause that doubles, from the same base; whoever asks in between cuts the pause short.

Safety: **nothing is forgotten that the oldest kept version needs, and no version holds a step whose output is not
visible.**

Invariants that `validate` asserts:

- CKP-1  kept versions ascend in number and in step, and there are at most `KEPT` of them;
- CKP-2  a snapshot under way has a number and a step above every kept version's, and its base is the newest of them;
- CKP-3  its step is not beyond the next step to run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from anabranch.model.ids import Step
from anabranch.protocol.pauses import Pauses

KEPT = 2
"""How many versions stay: when the newest turns out to be damaged, there is one more."""


_RETRY = Pauses(first=1.0, longest=60.0)
_START = Step(0)


@dataclass(frozen=True, slots=True)
class Settings:
    """None turns a rule off."""

    every_seconds: float | None = 30.0
    every_steps: int | None = None
    undo_limit_bytes: int | None = 1 << 30
    retry: Pauses = _RETRY


@dataclass(frozen=True, slots=True)
class Kept:
    """A committed version: the state after all steps below `step`."""

    version: int
    step: Step


# Events


@dataclass(frozen=True, slots=True)
class Tick:
    """`now` is any clock that does not go back, in seconds."""

    now: float


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """`undo_bytes`: what the step added to the undo ring."""

    step: Step
    undo_bytes: int


@dataclass(frozen=True, slots=True)
class Published:
    """The outputs of all steps up to and including `step` are visible."""

    step: Step


@dataclass(frozen=True, slots=True)
class SnapshotDone:
    """All pieces are durable."""

    version: int
    step: Step


@dataclass(frozen=True, slots=True)
class SnapshotFailed:
    """The pieces, or the manifest after them, could not be written."""

    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class ManifestCommitted:
    version: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """The shards were brought to `step`: what was under way is void, versions beyond it are no base any more."""

    step: Step


@dataclass(frozen=True, slots=True)
class Asked:
    """A checkpoint of everything committed so far, please."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The flow stops; no step follows the last one that was reported."""


Event = (
    Tick
    | StepCommitted
    | Published
    | SnapshotDone
    | SnapshotFailed
    | ManifestCommitted
    | Recovered
    | Asked
    | StopAsked
)


# Commands


@dataclass(frozen=True, slots=True)
class StartSnapshot:
    """Write what steps in [since, at_step) changed; everything when `since` is None."""

    version: int
    at_step: Step
    since: Step | None


@dataclass(frozen=True, slots=True)
class CommitManifest:
    version: int


@dataclass(frozen=True, slots=True)
class TrimTo:
    """Versions, step log and input logs are needed from `step` on, and nothing before it."""

    step: Step


@dataclass(frozen=True, slots=True)
class Served:
    """Every ask so far is served; the newest version holds what it wanted."""

    version: int | None


@dataclass(frozen=True, slots=True)
class WaitFor:
    """What a stop waits for, in words for the user."""

    reason: str


@dataclass(frozen=True, slots=True)
class MayStop:
    """The final checkpoint holds every committed step."""

    version: int | None


Command = StartSnapshot | CommitManifest | TrimTo | Served | WaitFor | MayStop


@dataclass(frozen=True, slots=True)
class _Running:
    version: int
    step: Step
    since: Step | None
    written: bool = False
    committing: bool = False


class Checkpointer:
    """The machine.

    Args:
        kept: committed versions, oldest first; without any, the first checkpoint holds everything.
        next_version: above every number that was ever begun, so that no piece is written twice.
        next_step: the step after the last committed one.
        published: the next step whose outputs are not known to be visible.
    """

    def __init__(
        self,
        settings: Settings,
        kept: tuple[Kept, ...] = (),
        next_version: int = 1,
        next_step: Step = _START,
        published: Step = _START,
        now: float = 0.0,
    ) -> None:
        self._settings = settings
        self._kept = kept[-KEPT:]
        self._next_version = next_version
        self._next_step = next_step
        self._published = published
        self._now = now
        self._began = now  # when the last snapshot was started
        self._running: _Running | None = None
        self._undo = 0  # bytes in the ring since the base of the next snapshot
        self._undo_before = 0  # of those, the ones that the running snapshot makes superfluous
        self._asked: Step | None = None
        self._stopping = False
        self._may_stop = False
        self._failures = 0
        self._failure = ""
        self._retry_at = now
        self._waits_for = ""

    @property
    def newest(self) -> Kept | None:
        return self._kept[-1] if self._kept else None

    @property
    def running(self) -> int | None:
        """The number of the snapshot under way."""
        return None if self._running is None else self._running.version

    def handle(self, event: Event) -> list[Command]:
        done: list[Command] = []
        match event:
            case Tick(now):
                self._now = max(self._now, now)
            case StepCommitted(step, undo_bytes):
                self._next_step = Step(step + 1)
                self._undo += undo_bytes
            case Published(step):
                self._published = max(self._published, Step(step + 1))
            case SnapshotDone(version, step):
                if self._running is not None and (version, step) == (
                    self._running.version,
                    self._running.step,
                ):
                    self._running = replace(self._running, written=True)
            case SnapshotFailed(version, reason):
                self._fail(version, reason)
            case ManifestCommitted(version):
                done = self._committed(version)
            case Recovered(step):
                self._recovered(step)
            case Asked():
                self._asked = self._next_step
                self._retry_at = self._now
            case StopAsked():
                self._stopping = True
                self._retry_at = self._now
        return [*done, *self._next_commands()]

    def validate(self) -> None:
        assert len(self._kept) <= KEPT, "CKP-1"
        for older, newer in zip(self._kept, self._kept[1:], strict=False):
            assert older.version < newer.version, "CKP-1"
            assert older.step < newer.step, "CKP-1"
        if self._running is not None:
            for kept in self._kept:
                assert kept.version < self._running.version, "CKP-2"
                assert kept.step < self._running.step, "CKP-2"
            assert self._running.since == (self.newest.step if self.newest else None), "CKP-2"
            assert self._running.step <= self._next_step, "CKP-3"

    def _fail(self, version: int, reason: str) -> None:
        if version != self.running:
            return
        self._running = None
        self._retry_at = self._now + self._settings.retry.after(self._failures)
        self._failures += 1
        self._failure = reason

    def _committed(self, version: int) -> list[Command]:
        running = self._running
        if running is None or version != running.version:
            return []
        self._running = None
        self._failures, self._failure = 0, ""
        self._undo -= self._undo_before
        self._kept = (*self._kept, Kept(version, running.step))[-KEPT:]
        return [TrimTo(self._kept[0].step)] if len(self._kept) == KEPT else []

    def _recovered(self, step: Step) -> None:
        self._running = None
        self._undo = 0
        self._next_step = step
        self._kept = tuple(kept for kept in self._kept if kept.step <= step)

    def _next_commands(self) -> list[Command]:
        commands: list[Command] = []
        if self._asked is not None and self._holds(self._asked):
            self._asked = None
            commands.append(Served(self.newest.version if self.newest else None))
        running = self._running
        if running is None and self._due():
            since = self.newest.step if self.newest else None
            self._running = _Running(self._next_version, self._next_step, since)
            self._next_version += 1
            self._began, self._undo_before = self._now, self._undo
            commands.append(StartSnapshot(self._running.version, self._running.step, since))
        elif (
            running is not None
            and running.written
            and not running.committing
            and running.step <= self._published
        ):
            self._running = replace(running, committing=True)
            commands.append(CommitManifest(running.version))
        if self._stopping and not self._may_stop:
            commands += self._stop_commands()
        return commands

    def _holds(self, step: Step) -> bool:
        """Whether the newest version has all steps below this one.  The empty state needs no version."""
        return step <= (self.newest.step if self.newest else 0)

    def _due(self) -> bool:
        if self._holds(self._next_step) or self._now < self._retry_at:
            return False
        asked = self._asked is not None and self._asked <= self._next_step
        if self._stopping or asked or self._failures:
            return True
        rules = self._settings
        since = self.newest.step if self.newest else 0
        return (
            (rules.every_seconds is not None and self._now - self._began >= rules.every_seconds)
            or (rules.every_steps is not None and self._next_step - since >= rules.every_steps)
            or (rules.undo_limit_bytes is not None and self._undo > rules.undo_limit_bytes)
        )

    def _stop_commands(self) -> list[Command]:
        if self._running is None and self._holds(self._next_step):
            self._may_stop = True
            return [MayStop(self.newest.version if self.newest else None)]
        reason = self._reason_to_wait()
        if reason == self._waits_for:
            return []
        self._waits_for = reason
        return [WaitFor(reason)]

    def _reason_to_wait(self) -> str:
        running = self._running
        if running is None:
            pause = max(0.0, self._retry_at - self._now)
            return (
                f"the final checkpoint: it failed ({self._failure}) and is tried again in {pause:.0f} s; "
                "`stop --force` stops now and loses nothing"
            )
        what = (
            "the final checkpoint"
            if running.step == self._next_step
            else "a checkpoint that comes before the final one"
        )
        name = f"{what} (version {running.version}, before step {running.step})"
        if running.committing:
            return f"the manifest of {name}"
        if running.written:
            return f"the outputs of step {running.step - 1} to be published, to commit {name}"
        return f"{name} to be written"
