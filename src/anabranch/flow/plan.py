"""From a graph to stages: depths, channels, regions, order, fingerprint.

An operator's depth is the number of distributors on the longest way to it.  All operators
of depth *d* run in stage *d*.  Where an edge leads from one depth to a deeper one, rows travel in a channel:

- `exchange`: behind a distributor; rows go to the worker that owns their key's shard;
- `forward`: an operator needs rows of a shallower stage without re-keying; they stay on
  their worker and only wait for its later stage.

PLAN-1  Every input of an operator comes from its own stage or from exactly one channel that ends there.
PLAN-2  Rows of equal key meet in one worker: all exchanges of a flow use one hash and one layout.
PLAN-3  A channel is filled in one stage only, so a stage has one output stream.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from anabranch.errors import FlowError
from anabranch.flow.deadletters import DEAD_LETTER_SCHEMA as DEAD_LETTER_SCHEMA
from anabranch.flow.deadletters import DEAD_LETTERS as DEAD_LETTERS
from anabranch.flow.graph import Graph
from anabranch.flow.node import Node
from anabranch.model.ids import OperatorId, RegionId
from anabranch.operators.kernel import Combining


@dataclass(frozen=True, slots=True)
class Channel:
    """Rows on their way from one stage to a deeper one."""

    number: int
    kind: Literal["exchange", "forward"]
    producer: OperatorId
    start: int
    end: int
    keys: tuple[str, ...]
    combine: OperatorId | None
    """The aggregate whose partials travel here instead of rows."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A node, and what the plan found out about it."""

    node: Node
    depth: int
    region: RegionId | None
    """Set for stateful operators: the region whose marker and undo record cover their tables."""
    feeds: tuple[OperatorId | int, ...]
    """For each input, the operator of the same stage or the number of the channel that it comes from."""
    ordered: bool
    """Whether the rows that it gives must carry the order columns."""
    origin: int
    """Number of the operator; the `__origin` of rows that begin here."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A flow, ready to be run.  Immutable; shipped to every worker."""

    name: str
    operators: tuple[Planned, ...]
    """In an order in which every operator comes after its inputs."""
    channels: tuple[Channel, ...]
    depth: int
    fingerprint: str

    def stage(self, depth: int) -> list[Planned]:
        """What runs in a stage; distributors are part of what leaves it."""
        return [p for p in self.operators if p.depth == depth and p.node.role != "key_by"]

    def leaving(self, depth: int) -> list[Channel]:
        return [channel for channel in self.channels if channel.start == depth]

    def operator(self, operator: OperatorId) -> Planned:
        return next(planned for planned in self.operators if planned.node.id == operator)

    def regions(self, depth: int) -> list[RegionId]:
        return sorted({p.region for p in self.operators if p.region is not None and p.depth == depth})

    @property
    def inputs(self) -> dict[str, Node]:
        return {p.node.id: p.node for p in self.operators if p.node.role == "input"}

    @property
    def outputs(self) -> dict[str, Node]:
        return {p.node.name: p.node for p in self.operators if p.node.role == "output"}


def make_plan(flow: Graph) -> Plan:
    """Plan a flow.  Raises FlowError when nothing of it could ever be seen."""
    if not flow.inputs:
        raise FlowError(f"flow {flow.name!r} has no input; add one with flow.input(name, source)")
    if not flow.outputs:
        raise FlowError(f"flow {flow.name!r} has no output; add one with stream.output(name, sink)")
    nodes = _needed(flow)
    depths = _depths(nodes)
    ordered = _ordered(nodes)
    regions = _regions(nodes, depths)
    channels: dict[tuple[Any, ...], Channel] = {}
    operators = []
    for origin, node in enumerate(nodes):
        feeds = tuple(_feed(node, parent, depths, channels) for parent in node.inputs)
        operators.append(
            Planned(node, depths[node.id], regions.get(node.id), feeds, node.id in ordered, origin)
        )
    return Plan(
        name=flow.name,
        operators=tuple(operators),
        channels=tuple(channels.values()),
        depth=max(depths.values()),
        fingerprint=_fingerprint(flow.name, nodes),
    )


def _needed(flow: Graph) -> list[Node]:
    """Nodes that lead to an output, and all inputs, in the order of building."""
    seen: set[OperatorId] = set()
    todo = [node for node in flow.nodes if node.role in ("output", "input")]
    while todo:
        node = todo.pop()
        if node.id not in seen:
            seen.add(node.id)
            todo.extend(node.inputs)
    return [node for node in flow.nodes if node.id in seen]


def _depths(nodes: Iterable[Node]) -> dict[OperatorId, int]:
    depths: dict[OperatorId, int] = {}
    for node in nodes:
        depths[node.id] = max(
            (depths[parent.id] + (parent.role == "key_by") for parent in node.inputs), default=0
        )
    return depths


def _ordered(nodes: list[Node]) -> set[OperatorId]:
    """Operators whose rows must carry the order columns: an operator downstream asks for them."""
    ordered: set[OperatorId] = set()
    for node in reversed(nodes):
        asks = node.stateful.ordered if node.stateful is not None else node.id in ordered
        if asks and node.role != "output":
            ordered.update(parent.id for parent in node.inputs)
    return ordered


def _regions(nodes: list[Node], depths: dict[OperatorId, int]) -> dict[OperatorId, RegionId]:
    """Name the region of each stateful operator.

    Operators of one depth that are linked by edges, or fed by one distributor, are one region, named after the
    first of them.  A distributor joins those that it feeds, never those with what feeds it.
    """
    leader: dict[tuple[OperatorId, int], tuple[OperatorId, int]] = {}

    def find(place: tuple[OperatorId, int]) -> tuple[OperatorId, int]:
        while leader.setdefault(place, place) != place:
            place = leader[place]
        return place

    for node in nodes:
        depth = depths[node.id]
        for parent in node.inputs:
            linked = parent.role == "key_by" or depths[parent.id] == depth
            if linked and node.role != "key_by":
                leader[find((node.id, depth))] = find((parent.id, depth))
    names: dict[tuple[OperatorId, int], RegionId] = {}
    return {
        node.id: names.setdefault(find((node.id, depths[node.id])), RegionId(node.id))
        for node in nodes
        if node.stateful is not None
    }


def _feed(
    node: Node,
    parent: Node,
    depths: dict[OperatorId, int],
    channels: dict[tuple[Any, ...], Channel],
) -> OperatorId | int:
    end = depths[node.id]
    if node.role == "key_by" or (parent.role != "key_by" and depths[parent.id] == end):
        return parent.id
    kind: Literal["exchange", "forward"] = "exchange" if parent.role == "key_by" else "forward"
    combine = None
    if kind == "exchange" and isinstance(node.stateful, Combining) and not node.stateful.ordered:
        combine = node.id
    key = (parent.id, end, combine)
    if key not in channels:
        channels[key] = Channel(len(channels), kind, parent.id, depths[parent.id], end, parent.keys, combine)
    return channels[key].number


def _fingerprint(name: str, nodes: Iterable[Node]) -> str:
    """Identifies the graph, its types and parameters, not the code of the user's functions."""
    described = [describe(node) for node in nodes]
    # Keys are not sorted: rows are stored in the order of their columns.
    text = json.dumps({"flow": name, "operators": described}, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def describe(node: Node) -> dict[str, Any]:
    """A node as JSON: what the fingerprint is made of, and what `anabranch plan --json` prints."""
    return {
        "id": node.id,
        "name": node.name,
        "kind": node.kind,
        "inputs": [parent.id for parent in node.inputs],
        "schema": {column: str(dtype) for column, dtype in node.schema.items()},
        "keys": list(node.keys),
        "append_only": node.append_only,
        **node.detail,
    }
