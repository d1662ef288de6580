"""A distinct type for every number and name that could be mistaken for another."""

from __future__ import annotations

from typing import NewType

Step = NewType("Step", int)
"""One full execution of the flow over a recorded slice of every input: 0, 1, 2, …"""

Attempt = NewType("Attempt", int)
"""How often a step has been tried before in this epoch; part of the fence."""

Epoch = NewType("Epoch", int)
"""How many coordinators a job has had; a later one fences out the earlier ones."""

WorkerId = NewType("WorkerId", int)
"""One partition of every Spark stage, 0 … W−1."""

ShardId = NewType("ShardId", int)
"""A slice of the key space by hash, 0 … S−1.  State belongs to it, never to a worker."""

HostId = NewType("HostId", str)
"""A machine (or, embedded, a directory) that holds the shards of its workers."""

OperatorId = NewType("OperatorId", str)
"""Stable name of an operator in a flow; names its table in every shard."""

RegionId = NewType("RegionId", str)
"""Stable name of the operators between one distributor and the next."""

PartitionId = NewType("PartitionId", str)
"""Name of one independently ordered part of an input, unique within that input."""

Incarnation = NewType("Incarnation", int)
"""Which copy of a shard this is; a migrated or re-created shard gets a new one."""

LayoutVersion = NewType("LayoutVersion", int)
"""Serial number of a layout."""
