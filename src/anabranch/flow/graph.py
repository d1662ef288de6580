"""The nodes of a flow, and the ids that they get.

Must not know what an operator does.
"""

from __future__ import annotations

from typing import Any

from anabranch.errors import FlowError
from anabranch.flow.checks import check_name, check_on_error
from anabranch.flow.deadletters import DEAD_LETTERS
from anabranch.flow.node import Node, Role
from anabranch.model.ids import OperatorId
from anabranch.operators.kernel import OnError, Schema


class Graph:
    """Nodes in the order of building, so that each comes after its inputs."""

    def __init__(self, name: str, on_error: OnError) -> None:
        check_name("flow", name)
        check_on_error(f"flow {name!r}", on_error)
        self.name = name
        self.on_error: OnError = on_error
        self.nodes: list[Node] = []
        # Numbers the operators of a kind that the user did not name, in the order of building:
        # the id is then a matter of place, the same every time the file is loaded.
        self._counts: dict[str, int] = {}

    @property
    def inputs(self) -> dict[str, Node]:
        return {node.id: node for node in self.nodes if node.role == "input"}

    @property
    def outputs(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes if node.role == "output"}

    def add(
        self,
        role: Role,
        kind: str,
        inputs: tuple[Node, ...],
        schema: Schema,
        append_only: bool,
        *,
        name: str | None,
        on_error: OnError | None = None,
        **fields: Any,
    ) -> Node:
        """A new node; `fields` are those of `Node`."""
        operator = self._operator_id(kind, name)
        if on_error is not None:
            check_on_error(f"operator {operator!r}", on_error)
        node = Node(
            id=operator,
            name=name or operator,
            role=role,
            kind=kind,
            inputs=inputs,
            schema=dict(schema),
            append_only=append_only,
            on_error=on_error or self.on_error,
            **fields,
        )
        self.nodes.append(node)
        return node

    def _operator_id(self, kind: str, name: str | None) -> OperatorId:
        taken = {node.id for node in self.nodes}
        if name is not None:
            check_name(kind, name)
            # An output may be called like the operator it shows.
            operator = OperatorId(f"{name}.output" if kind == "output" else name)
            if operator in taken or (kind == "output" and name == DEAD_LETTERS):
                what = "output" if kind == "output" else "operator"
                raise FlowError(f"{kind} {name!r}: the flow {self.name!r} already has an {what} of that name")
            return operator
        while True:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            candidate = OperatorId(f"{kind}_{self._counts[kind]}")
            if candidate not in taken:
                return candidate
