"""Get a plan, with the user's functions in it, to every Python process of Spark, once.

Spark's broadcast gives each process the bytes once; they are unpickled when first asked for and kept.
A plan is code that the user runs, sent by the driver that runs it: nothing here reads storage.
"""

from __future__ import annotations

import gc
import logging
import pickle
import uuid
from typing import Any

from py4j.protocol import Py4JError
from pyspark import SparkContext, cloudpickle

from anabranch.errors import FlowError
from anabranch.flow.plan import Plan

log = logging.getLogger(__name__)

_KEPT = 4
_plans: dict[str, Plan] = {}


class ShippedPlan:
    """A handle that tasks can carry."""

    def __init__(self, context: SparkContext, plan: Plan) -> None:
        self.id = uuid.uuid4().hex
        try:
            data = cloudpickle.dumps(plan)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise FlowError(
                f"flow {plan.name!r} cannot be sent to workers: {error}; a function of it holds something that only "
                "exists in this process, such as an open file, a lock or a connection"
            ) from error
        self.broadcast: Any = context.broadcast(data)

    @property
    def loaded(self) -> bool:
        """In a task: whether its process has had the plan before."""
        return self.id in _plans

    def plan(self) -> Plan:
        """The plan, in a task."""
        plan = _plans.get(self.id)
        if plan is None:
            while len(_plans) >= _KEPT:
                del _plans[next(iter(_plans))]
            plan = _plans[self.id] = pickle.loads(self.broadcast.value)
            _settle()
        return plan

    def release(self) -> None:
        """Free the executors' copies (driver)."""
        try:
            self.broadcast.unpersist()
        except (Py4JError, OSError) as error:
            log.warning("could not release a plan error=%s", error)


def _settle() -> None:
    """Take what is loaded now out of the garbage collector's sight.

    PySpark's worker process runs a full collection after every task.  With Arrow, NumPy, Polars and the plan loaded
    that took 40 ms, three quarters of the process's time in small steps; of what is new since, it takes none.
    """
    gc.collect()
    gc.freeze()
