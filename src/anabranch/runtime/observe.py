"""What a run tells those who watch it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from anabranch.errors import AnabranchError
from anabranch.log.steplog import Progress
from anabranch.model.ids import Step
from anabranch.model.layout import Layout


@dataclass(frozen=True, slots=True)
class StepDone:
    """One step, after it became visible."""

    step: Step
    rows: int
    output_rows: int
    dead_letters: int
    seconds: float
    """From planning to visible."""
    backlog_rows: int
    backlog_bytes: int
    workers: int
    commit_seconds: float = 0.0
    """Of `seconds`, those after the Spark job: for the plan record, the previous step's publishing, the commit record."""
    output_seconds: float = 0.0
    """Of `seconds`, those in which the slowest worker staged outputs."""


class Listener(Protocol):
    """Called from the step loop; must return at once."""

    def started(self, layout: Layout, progress: Progress) -> None: ...

    def step(self, done: StepDone, progress: Progress) -> None: ...

    def idle(self, progress: Progress) -> None: ...

    def fault(self, step: Step, attempt: int, error: AnabranchError) -> None: ...

    def replaying(self, step: Step, first: Step, end: Step) -> None:
        """A committed step is run again, one of `first` to `end` − 1."""
        ...

    def note(self, text: str) -> None:
        """Something that the user should know, and need not act on."""
        ...

    def stopping(self, waiting_for: str) -> None: ...


class Silent:
    """Watches without a word."""

    def started(self, layout: Layout, progress: Progress) -> None:
        pass

    def step(self, done: StepDone, progress: Progress) -> None:
        pass

    def idle(self, progress: Progress) -> None:
        pass

    def fault(self, step: Step, attempt: int, error: AnabranchError) -> None:
        pass

    def replaying(self, step: Step, first: Step, end: Step) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def stopping(self, waiting_for: str) -> None:
        pass
