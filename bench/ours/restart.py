"""A keyed sum over a directory of Parquet files that are there or will come, until it is killed.

Every step prints how many rows were taken in all, so that whoever kills it knows when.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import anabranch as ab
from anabranch.log.steplog import Progress
from anabranch.runtime.observe import Silent, StepDone
from bench.ours.common import MASTER
from bench.ours.keyed_sum import flow_over


class Saying(Silent):
    def step(self, done: StepDone, progress: Progress) -> None:
        print(json.dumps({"rows": progress.input_rows}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    args = parser.parse_args()
    # Whoever measures says when there is a checkpoint.
    ab.run(
        flow_over(args.data),
        args.work / "job",
        workers=2,
        master=MASTER,
        checkpoint_seconds=3600.0,
        listener=Saying(),
    )


if __name__ == "__main__":
    main()
