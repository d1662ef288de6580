"""Numbers that come a few at a time, and who sees them: a flow without state, to rescale while it runs.

    anabranch run examples/hello.py --dir job --workers 2
    tail -f job/spark.log | grep seen
    anabranch rescale job --workers 3

What functions print is in `spark.log`.
"""

from pyspark import TaskContext

import anabranch as ab


def see(row):
    # Only told, never put into the row: who sees a number may change, what comes out of it may not.
    print(f"worker {TaskContext.get().partitionId()}: seen {row.number}", flush=True)
    return row.number


flow = ab.Flow("hello")
numbers = flow.input("numbers", ab.generator(rate=6, partitions=6, columns={"number": ab.index()}))
numbers.map(see, schema={"number": int}).output("numbers")
