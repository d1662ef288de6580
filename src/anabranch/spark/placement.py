"""Keep workers at the host that holds their shards.

A *handle* is one cached partition per worker, made on the host that the layout names.  Every stage is a
narrow union of the handles (twice, so that they outvote the shuffle's own preference) with what was
exchanged, so Spark runs the task where its handle is cached.  Handles are rebuilt for each layout
and before each retry: a lost executor takes its handles along.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

from pyspark import SparkContext
from pyspark.core.rdd import RDD
from pyspark.serializers import BatchedSerializer, CPickleSerializer

from anabranch.model.ids import HostId


def receiver_of(worker: int) -> int:
    """The partitioner of every exchange: the key is the receiving worker.

    One function object for all exchanges: Spark takes two partitioners for equal only then.
    """
    return worker


def make_handles(context: SparkContext, hosts: Sequence[HostId], placed: bool) -> RDD[tuple[int, bytes]]:
    """One cached partition per worker, on its host where `placed` (a cluster); anywhere else."""
    count = len(hosts)
    if placed:
        handles = _preferring(context, hosts).partitionBy(count, receiver_of)
    else:
        handles = context.parallelize([(worker, b"") for worker in range(count)], count).partitionBy(
            count, receiver_of
        )
    handles.persist()
    handles.count()
    return handles


def _preferring(context: SparkContext, hosts: Sequence[HostId]) -> RDD[tuple[int, bytes]]:
    """An RDD with one element per worker, whose partitions prefer the workers' hosts."""
    jvm = context._jvm
    assert jvm is not None
    elements = jvm.java.util.ArrayList()
    for worker, host in enumerate(hosts):
        # A batch of one pickled pair, as PySpark's batched serializer would write it.
        element = bytearray(pickle.dumps([(worker, b"")], protocol=5))
        preferred = jvm.PythonUtils.toSeq([host])
        elements.append(jvm.scala.Tuple2(element, preferred))
    sequence = jvm.PythonUtils.toSeq(elements)
    tag = jvm.scala.reflect.ClassTag.apply(jvm.java.lang.Class.forName("[B"))
    jrdd = context._jsc.sc().makeRDD(sequence, tag).toJavaRDD()
    return RDD(jrdd, context, BatchedSerializer(CPickleSerializer()))


def executor_hosts(context: SparkContext) -> list[str]:
    """The machines that have executors now, in a stable order; embedded, the driver is the executor."""
    executors = context._jsc.sc().statusStore().executorList(True)
    found = [executors.apply(place) for place in range(executors.size())]
    embedded = context.master.startswith("local")
    return sorted({one.hostPort().rpartition(":")[0] for one in found if embedded or one.id() != "driver"})
