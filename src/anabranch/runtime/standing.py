"""Where a run stands: the placement of state, the steps that it has seen, and the epoch in which it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from anabranch.log.steplog import Progress
from anabranch.model.ids import Attempt, Epoch, ShardId, Step
from anabranch.model.layout import Layout
from anabranch.model.placement import Placement
from anabranch.spark.spec import Assigned, Lost, Moving, StepSpec


@dataclass(frozen=True, slots=True)
class Moves:
    """What a step does besides its work: the placement that it leaves, and what travels for that."""

    placement: Placement
    moving: tuple[Moving, ...] = ()


@dataclass(slots=True)
class Standing:
    """All that the tasks of a step must be told, besides what the step reads.

    A recovery makes a new one, in a new epoch; steps advance it.
    """

    job: str
    epoch: Epoch
    placement: Placement
    """As of the last committed step.  Its layout also has the seats of input partitions, which are not recorded."""
    progress: Progress
    """What the shards have seen; behind the step log only while steps are replayed."""
    keep_undo_from: Step
    """The shards can go back to the state before this step."""
    state_root: str
    outputs_root: str
    marks_since: Step | None = None
    """The step of the checkpoint that the next one follows; None where the next one is a full one."""
    hold_undo_from: Step | None = field(default=None)
    """A copy beside the steps wants to know what changed since this step."""

    @property
    def layout(self) -> Layout:
        return self.placement.layout

    @property
    def incarnations(self) -> tuple[int, ...]:
        return self.placement.incarnations

    def seat(self, layout: Layout) -> None:
        """Take over the seats of input partitions."""
        self.placement = replace(self.placement, layout=layout)

    def spec(
        self,
        attempt: Attempt,
        work: Sequence[Sequence[Assigned]] = (),
        *,
        moves: Moves | None = None,
        replay: bool = False,
        lost: Sequence[Lost] = (),
        isolate: bool = False,
        weigh: bool = False,
        write_back: tuple[ShardId, ...] = (),
    ) -> StepSpec:
        """An attempt of the next step."""
        step = self.progress.next_step
        placement = self.placement if moves is None else moves.placement
        keep = (
            self.keep_undo_from
            if self.hold_undo_from is None
            else min(self.keep_undo_from, self.hold_undo_from)
        )
        return StepSpec(
            job=self.job,
            epoch=self.epoch,
            step=step,
            attempt=attempt,
            layout=replace(placement.layout, inputs={}),
            incarnations=placement.incarnations,
            cuts=placement.cuts,
            generation=placement.generation,
            moving=() if moves is None else moves.moving,
            marks_since=self.marks_since,
            markers=self.progress.markers,
            work=tuple(map(tuple, work)) or ((),) * len(placement.layout.workers),
            state_root=self.state_root,
            outputs_root=self.outputs_root,
            # A step that fails is undone by the record that it wrote itself.
            keep_undo_from=Step(max(0, min(keep, step - 1))),
            replay=replay,
            lost=tuple(lost),
            isolate=isolate,
            weigh=weigh,
            write_back=write_back,
        )
