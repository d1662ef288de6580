"""Make a golden job directory with this version of the engine: `python tests/golden/make_golden.py NAME`.

It has two checkpoints, and steps after them that only the log and the shards have.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from pathlib import Path

from golden_flow import ROWS, STEPS, golden_flow

from anabranch.runtime.run import run


def main() -> None:
    name = sys.argv[1]
    with tempfile.TemporaryDirectory() as scratch:
        job = Path(scratch) / "job"
        each = {"workers": 2, "first_step_rows": ROWS, "max_step_rows": ROWS}
        run(golden_flow(), job, shards=4, recovery_partitions=3, steps=2, **each)
        run(golden_flow(), job, steps=2, **each)
        run(golden_flow(), job, steps=STEPS - 4, checkpoint_seconds=None, **each)
        (job / "spark.log").unlink(missing_ok=True)
        with tarfile.open(Path(__file__).parent / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(job, "job")


if __name__ == "__main__":
    main()
