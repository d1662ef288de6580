"""Sharded state on local disk: shard stores, step transactions with undo, and what operators see of them.

`store`        one LMDB environment per shard: identity, growth, full disks, the cache of open ones
`transaction`  the write transaction of one stage in one shard: fence, markers, undo
`undo`         the ring of undo records: rolling back, and what changed since
`worker`       all of a worker's shards as keyed tables, for one stage of one attempt of one step
`database`     the versioned key-value contract, on the same mechanism

Must not know: flows, operators, Spark, the coordinator.
"""
