"""One operator of a flow's graph, as the user built it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from anabranch.connect.sink import Sink
from anabranch.connect.source import Source
from anabranch.model.ids import OperatorId
from anabranch.operators.kernel import OnError, Schema, StatefulKernel, StatelessKernel

Role = Literal["input", "stateless", "key_by", "stateful", "union", "output"]


@dataclass(eq=False, slots=True)
class Node:
    """An operator; an edge is a reference from a node to its inputs."""

    id: OperatorId
    """Unique in the flow."""
    name: str
    """What the user called it: the id, but for outputs, which have names of their own."""
    role: Role
    kind: str
    """What the user called: "map", "count", …"""
    inputs: tuple[Node, ...]
    schema: Schema
    """Columns of the rows that it gives."""
    append_only: bool
    """Whether no row that it gives can have a negative weight."""
    keys: tuple[str, ...] = ()
    """The columns that the rows are keyed by; empty when they are not keyed."""
    on_error: OnError = "stop"
    source: Source | None = None
    sink: Sink | None = None
    stateless: StatelessKernel | None = None
    stateful: StatefulKernel | None = None
    detail: dict[str, Any] = field(default_factory=dict)
    """Parameters that are part of the flow's fingerprint and of the printed plan."""
