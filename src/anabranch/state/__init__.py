"""Sharded state on local disk: shard stores, step transactions with undo, and what operators see of them;
and checkpoints of it in storage.

`store`        one LMDB environment per shard: identity, growth, full disks, the cache of open ones
`transaction`  the write transaction of one stage in one shard: fence, markers, undo
`undo`         the ring of undo records: rolling back
`worker`       all of a worker's shards as keyed tables, for one stage of one attempt of one step
`asof`         a shard as of an earlier step, read while the flow goes on
`transfer`     keys taken out of a shard for another store; `cargo` is what travels
`arrival`      keys put into a store by the step that moves them; `history` is what is known of the time before
`copying`      a copy of a shard, made beside the steps, that a step switches to
`removal`      stores that count no more
`manifest`     what a checkpoint consists of, and what the next one writes anew
`pieces`       the files of a checkpoint; `chains` puts them together
`snapshot`     a host's share of a checkpoint
`versions`     the checkpoints in storage: committed, checked, trimmed
`restore`      shards rebuilt from a checkpoint; `survey` says what is there of a shard
`database`     the versioned key-value contract, on the same mechanism

Must not know: flows, operators, Spark, the coordinator.
"""
