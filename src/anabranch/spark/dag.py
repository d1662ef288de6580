"""Build a step's RDDs with as few calls into the JVM as can be.

PySpark's own `mapPartitions`, `partitionBy` and `union` make about 80 calls for a step of two stages: they look up
the same classes, convert the same environment and pickle the same closures every time.  Here what stays is
made once and a step makes about ten calls.  Blobs travel as they are: nothing is pickled on the way.

This speaks to the classes below PySpark's RDD (`PythonRDD`, `PairwiseRDD`), as PySpark itself does, and is why
the version of PySpark is pinned.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pyspark import SparkContext
from pyspark.core.rdd import _load_from_socket
from pyspark.serializers import NoOpSerializer

from anabranch.model.ids import HostId
from anabranch.spark.pools import POOL_VARIABLE, Pool

Task = Callable[[int, Iterator[bytes]], Iterable[bytes]]
"""(partition, arrived blobs) to blobs; an instance of a class that workers can import, so that it pickles small."""
Routed = Callable[[int, Iterator[bytes]], Iterable[tuple[int, bytes]]]
"""The same, each blob with its receiver."""

_RAW = NoOpSerializer()
_KEY = struct.Struct("!q")
_PARTITIONER_ID = 0x616E6162
"""Spark takes two Python partitioners of equal size for the same when their ids are."""


class Exchanging:
    """Runs a task whose blobs have receivers, in the form that Spark's shuffle wants: key, value, key, value."""

    def __init__(self, task: Routed) -> None:
        self.task = task

    def __call__(self, partition: int, arrived: Iterator[bytes]) -> Iterator[bytes]:
        for receiver, blob in self.task(partition, arrived):
            yield _KEY.pack(receiver)
            yield blob


class Dag:
    """Makes RDDs (of the JVM, as handles) on one Spark context, for the steps or for the work beside them."""

    def __init__(
        self, context: SparkContext, broadcasts: Sequence[Any] = (), *, pool: Pool = Pool.STEPS
    ) -> None:
        jvm = context._jvm
        assert jvm is not None
        self.context = context
        self._function = jvm.SimplePythonFunction
        self._python_rdd = jvm.PythonRDD
        self._pairwise = jvm.PairwiseRDD
        self._partitioner = jvm.PythonPartitioner
        self._java_rdd = jvm.org.apache.spark.api.java.JavaRDD
        self._sequence = jvm.PythonUtils.toSeq
        self._environment = jvm.java.util.HashMap()
        for name, value in context.environment.items():
            self._environment.put(name, value)
        if pool is not Pool.STEPS:
            self._environment.put(POOL_VARIABLE, pool.value)
        self._includes = jvm.java.util.ArrayList()
        for include in context._python_includes or ():
            self._includes.append(include)
        self._broadcasts = jvm.java.util.ArrayList()
        for broadcast in broadcasts:
            self._broadcasts.append(broadcast._jbroadcast)
        self._partitioners: dict[int, Any] = {}

    def handles(self, hosts: Sequence[HostId], placed: bool) -> Any:
        """One partition for each worker, whose content does not matter; where `placed`, cached on the worker's host."""
        jvm = self.context._jvm
        assert jvm is not None
        elements = jvm.java.util.ArrayList()
        for worker, host in enumerate(hosts):
            element = bytearray(_KEY.pack(worker))
            elements.append(jvm.scala.Tuple2(element, self._sequence([host] if placed else [])))
        tag = jvm.scala.reflect.ClassTag.apply(jvm.java.lang.Class.forName("[B"))
        preferring = self.context._jsc.sc().makeRDD(self._sequence(elements), tag)
        if not placed:
            return preferring
        cached, _ = self.exchanged(preferring, Exchanging(make_handle), len(hosts))
        cached.cache()
        self.collect(cached, drain)
        return cached

    def exchanged(self, before: Any, task: Task, workers: int) -> tuple[Any, Any]:
        """The RDD of what each worker receives when `task` runs on every partition of `before`; and its shuffle."""
        pairs = self._pairwise(self._mapped(before, task)).asJavaPairRDD()
        if workers not in self._partitioners:
            self._partitioners[workers] = self._partitioner(workers, _PARTITIONER_ID)
        shuffled = pairs.partitionBy(self._partitioners[workers])
        return self._python_rdd.valueOfPair(shuffled).rdd(), shuffled

    def beside(self, handles: Any, exchanged: Any) -> Any:
        """Both in one, partition by partition; the handles count twice, and so decide where a task runs."""
        gateway = self.context._gateway
        assert gateway is not None
        rdds = gateway.new_array(self._java_rdd, 3)
        rdds[0] = rdds[1] = handles.toJavaRDD()
        rdds[2] = exchanged.toJavaRDD()
        return self.context._jsc.union(rdds).rdd()

    def collect(self, before: Any, task: Task) -> list[bytes]:
        """Run `task` on every partition; all that it yields."""
        served = self._python_rdd.collectAndServe(self._mapped(before, task))
        with _load_from_socket(served, _RAW) as stream:
            return list(stream)

    def _mapped(self, before: Any, task: Task) -> Any:
        command = pickle.dumps((task, None, _RAW, _RAW), protocol=5)
        function = self._function(
            bytearray(command),
            self._environment,
            self._includes,
            self.context.pythonExec,
            self.context.pythonVer,
            self._broadcasts,
            self.context._javaAccumulator,
        )
        return self._python_rdd(before, function, False, False)


def make_handle(partition: int, elements: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    """From the worker's number, an empty blob for that worker."""
    for element in elements:
        yield _KEY.unpack(element)[0], b""


def drain(partition: int, arrived: Iterator[bytes]) -> Iterator[bytes]:
    """Read all and give nothing; a task that leaves input unread costs its Python process."""
    for _ in arrived:
        pass
    return iter(())
