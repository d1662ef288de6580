"""What becomes of the output of a step: the contract of `write(step, output)`.

The log has output for the steps `first` to `last` − 1.  Output of a step

* below `first` was produced before and deleted since: it is discarded;
* inside was produced before, and now again by a replay: it is compared with what was recorded, and discarded;
* at `last` is new: it is appended, and `last` grows by one;
* beyond `last` is an error: a step is missing in between.

Output is compared as a Z-set, by its rows and its order-independent hash, which do not depend on the number of
workers.  So a replay may run at another scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from anabranch.errors import EngineError, ReplayError
from anabranch.log.steplog import StepLog
from anabranch.model.ids import Step


class Verdict(Enum):
    """What `OutputLog.judge` says."""

    DISCARD = "discard"
    APPEND = "append"


class OutputLog:
    """The outputs of a job's steps, as its commit records have them."""

    def __init__(self, log: StepLog, first: Step, last: Step) -> None:
        self._log = log
        self.first = first
        self.last = last

    def judge(self, step: Step, outputs: Mapping[str, Mapping[str, Any]]) -> Verdict:
        """What to do with a step's output: name to `rows` and `hash`.

        Raises:
            ReplayError: it was recorded before and is another now.
            EngineError: the step is beyond the end of the log.
        """
        if step > self.last:
            raise EngineError(f"output of step {step} came before that of step {self.last}")
        if step == self.last:
            return Verdict.APPEND
        if step >= self.first:
            self._compare(step, outputs)
        return Verdict.DISCARD

    def appended(self) -> None:
        """The output of step `last` is durable and visible."""
        self.last = Step(self.last + 1)

    def _compare(self, step: Step, outputs: Mapping[str, Mapping[str, Any]]) -> None:
        commit = self._log.commit(step)
        if commit is None:
            raise EngineError(f"the commit record of step {step} vanished while the step was replayed")
        recorded = commit["outputs"]
        for name in sorted(recorded.keys() | outputs.keys()):
            before = _summary(recorded.get(name))
            after = _summary(outputs.get(name))
            if before != after:
                raise ReplayError(
                    f"step {step}, output {name!r}: a replay gave {after[0]:,} rows (hash {after[1]:016x}), recorded "
                    f"are {before[0]:,} rows (hash {before[1]:016x}). A function of the flow does not depend on its "
                    "arguments alone (time, randomness, a file), or its code was changed; make it so and run again. "
                    "Nothing was published"
                )


def _summary(output: Mapping[str, Any] | None) -> tuple[int, int]:
    return (0, 0) if output is None else (output["rows"], output["hash"])
