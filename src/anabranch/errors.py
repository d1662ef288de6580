"""Every error that Anabranch raises on purpose.

    AnabranchError
    ├── UserError                 the user can mend it; the CLI shows it without a stack trace
    │   ├── FlowError             the graph is wrong: a column, a name, a type, a key
    │   ├── ConfigError           a wrong argument, setting or environment
    │   ├── JobDirError           the job directory is missing, foreign, locked or half-deleted
    │   ├── RecordError           a record could not be read, or a user's function failed on it
    │   ├── InputChangedError     a source answered differently than when it was recorded
    │   ├── ReplayError           a step that was run again gave other output than was recorded
    │   └── StorageFullError      a disk that state, logs or outputs live on is full
    └── EngineError               our fault, or the machine's; the step is re-run or the flow stops
        ├── SparkLost             Spark's JVM is gone; the run ends, and another can go on
        ├── Starved               work beside the steps gets next to no processor time
        ├── StepAborted           a task refused to go on; nothing of the step is visible
        │   ├── IncompleteInput   a stage did not get all that its senders sent
        │   ├── Fenced            a newer coordinator, step or attempt has written here
        │   ├── WrongHost         the task runs on a host that does not hold its shards
        │   └── ShardMismatch     a shard on disk is not the one that the coordinator expects
        └── CorruptError          stored bytes fail their checksum or do not parse

A message names the thing, says what was expected and what was found, and what to do.
"""

from __future__ import annotations


class AnabranchError(Exception):
    """Root of the tree above."""


class UserError(AnabranchError):
    """Something that the user can mend."""


class FlowError(UserError):
    """The flow's graph is wrong; raised while it is built."""


class ConfigError(UserError):
    """A wrong argument, setting or environment."""


class JobDirError(UserError):
    """The job directory cannot be used as asked."""


class RecordError(UserError):
    """One record is bad.  Carries where it came from, so that a dead letter can say so too.

    Every field is a string and the constructor takes them by position, so that the
    error survives pickling between Spark's Python processes and the driver.
    """

    def __init__(self, where: str, reason: str, record: str = "") -> None:
        super().__init__(where, reason, record)
        self.where = where
        self.reason = reason
        self.record = record

    def __str__(self) -> str:
        shown = self.record if len(self.record) <= 200 else self.record[:200] + "…"
        tail = f"; record: {shown}" if shown else ""
        return f"{self.where}: {self.reason}{tail}"


class InputChangedError(UserError):
    """A source no longer has what was recorded of it."""


class ReplayError(UserError):
    """A replayed step gave other output than was recorded."""


class StorageFullError(UserError):
    """A disk is full."""


class EngineError(AnabranchError):
    """A fault of the engine or of the machine below it."""


class SparkLost(EngineError):
    """Spark's JVM is gone, and this run with it."""


class Starved(EngineError):
    """Work beside the steps gets next to no processor time; it is done again at a higher priority."""


class StepAborted(EngineError):
    """A task refused to go on; the coordinator may re-run the step."""


class IncompleteInput(StepAborted):
    """A stage's input lacks blobs or rows of a sender."""


class Fenced(StepAborted):
    """The stored fence is newer than the writer's."""


class WrongHost(StepAborted):
    """The task landed on a host that does not hold its shards."""


class ShardMismatch(StepAborted):
    """A shard on disk differs from what the coordinator expects."""


class CorruptError(EngineError):
    """Stored bytes are damaged."""
