"""What the shards of a run weigh, as far as is known.

Must not know: what for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from anabranch.model.ids import ShardId, Step
from anabranch.runtime.standing import Standing


class Scales:
    """The bytes of each shard, as last weighed."""

    def __init__(self) -> None:
        self.sizes: dict[ShardId, int] = {}
        """Of every shard of the layout in which they were weighed, or of none."""
        self.wanted = False
        """Whether the next step is to weigh shards."""
        self.weighed_at = Step(0)

    def take(
        self, found: Iterable[Mapping[ShardId, int]], standing: Standing, at: Step | None = None
    ) -> None:
        """Take in the bytes of copies, by slot, as of a step, or of the last one; unless newer ones are known."""
        at = standing.progress.next_step if at is None else at
        shards = len(standing.layout.shards)
        if len(self.sizes) == shards and self.weighed_at > at:
            return
        sizes = dict.fromkeys(map(ShardId, range(shards)), 0)
        for one in found:
            for slot, size in one.items():
                sizes[ShardId(slot % shards)] += size
        self.sizes, self.weighed_at = sizes, at

    def to_json(self) -> dict[str, Any] | None:
        """For `status`: the bytes of each shard, where they are known, and as of which step."""
        if not self.sizes:
            return None
        return {"bytes": [self.sizes[shard] for shard in sorted(self.sizes)], "step": self.weighed_at}
