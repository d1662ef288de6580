"""Which machines of a cluster can hold shards."""

from __future__ import annotations

from pyspark import SparkContext


def executor_hosts(context: SparkContext) -> list[str]:
    """The machines that have executors now, in a stable order; embedded, the driver is the executor."""
    executors = context._jsc.sc().statusStore().executorList(True)
    found = [executors.apply(place) for place in range(executors.size())]
    embedded = context.master.startswith("local")
    return sorted({one.hostPort().rpartition(":")[0] for one in found if embedded or one.id() != "driver"})
