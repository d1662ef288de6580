"""Two pools of Python processes on every host: one for the tasks of steps, one for the work beside them.

Spark keeps idle Python processes in a pool, one for each environment that tasks ask for, and forks another where none is
idle.  With one pool for all, a checkpoint took a process that had the step's shards open, and the step got a new one: 0.4 s
with a million keys, instead of 0.1.  So background work asks for an environment of its own.  Its processes have a low
priority for life, with all threads of the libraries in them; an unprivileged process could not raise it again for a
step.
"""

from __future__ import annotations

import os

BACKGROUND_VARIABLE = "ANABRANCH_BACKGROUND"
_NICE = 10
"""A busy machine gives the process a tenth of what a step's task gets.  Not the idle class: on a machine that is never
idle a checkpoint would never end, and undo records would pile up."""


def settle() -> None:
    """Give this process, and those that it will fork, the priority of its pool."""
    if os.environ.get(BACKGROUND_VARIABLE):
        try:
            os.setpriority(os.PRIO_PROCESS, 0, _NICE)
        except OSError:
            # A sandbox may forbid it: the work is the same, at normal priority.
            return
