"""Where a run stands: the layout, the steps that its shards have seen, and the epoch in which it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from anabranch.log.steplog import Progress
from anabranch.model.ids import Attempt, Epoch, Step
from anabranch.model.layout import Layout
from anabranch.spark.spec import Assigned, Lost, StepSpec


@dataclass(slots=True)
class Standing:
    """All that the tasks of a step must be told, besides what the step reads.

    A recovery makes a new one, in a new epoch; steps advance it.
    """

    job: str
    epoch: Epoch
    layout: Layout
    incarnations: tuple[int, ...]
    """Of each shard: the epoch in which it was last rebuilt, 0 for one that never was."""
    progress: Progress
    """What the shards have seen; behind the step log only while steps are replayed."""
    keep_undo_from: Step
    """The shards can go back to the state before this step."""
    state_root: str
    outputs_root: str

    def spec(
        self,
        attempt: Attempt,
        work: Sequence[Sequence[Assigned]] = (),
        *,
        replay: bool = False,
        lost: Sequence[Lost] = (),
        isolate: bool = False,
    ) -> StepSpec:
        """An attempt of the next step."""
        step = self.progress.next_step
        return StepSpec(
            job=self.job,
            epoch=self.epoch,
            step=step,
            attempt=attempt,
            layout=replace(self.layout, inputs={}),
            incarnations=self.incarnations,
            markers=self.progress.markers,
            work=tuple(map(tuple, work)) or ((),) * len(self.layout.workers),
            state_root=self.state_root,
            outputs_root=self.outputs_root,
            # A step that fails is undone by the record that it wrote itself.
            keep_undo_from=Step(max(0, min(self.keep_undo_from, step - 1))),
            replay=replay,
            lost=tuple(lost),
            isolate=isolate,
        )
