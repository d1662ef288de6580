"""Minimum-cost maximum flow over small integer networks: what `assign` stands on.

Primal-dual: one Dijkstra per distinct cost of a path, and all flow of that cost at once by blocking flows.
The networks of `assign` have few distinct costs, so a solution takes a handful of passes over the edges.

Must not know: what the nodes stand for.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

_FAR = float("inf")


class Network:
    """A directed network with capacities and non-negative integer costs.

    Edge *e* and its reverse are `e` and `e ^ 1`; the flow over *e* is the capacity of `e ^ 1`.
    """

    def __init__(self) -> None:
        self._heads: list[int] = []
        self._capacities: list[int] = []
        self._costs: list[int] = []
        self._edges: list[list[int]] = []

    def add_node(self) -> int:
        """A new node."""
        self._edges.append([])
        return len(self._edges) - 1

    def add_edge(self, tail: int, head: int, capacity: int, cost: int) -> int:
        """A new edge; its number asks for the flow later."""
        edge = len(self._heads)
        self._heads += (head, tail)
        self._capacities += (capacity, 0)
        self._costs += (cost, -cost)
        self._edges[tail].append(edge)
        self._edges[head].append(edge + 1)
        return edge

    def flow(self, edge: int) -> int:
        """The flow over an edge after `solve`."""
        return self._capacities[edge ^ 1]

    def solve(self, source: int, sink: int) -> int:
        """Send as much as possible from source to sink at the least cost; the amount sent."""
        potentials = [0] * len(self._edges)
        sent = 0
        while self._reprice(source, sink, potentials):
            while levels := self._levels(source, sink, potentials):
                sent += self._block(source, sink, potentials, levels)
        return sent

    def _reprice(self, source: int, sink: int, potentials: list[int]) -> bool:
        """Make the cheapest residual paths to the sink cost zero; False if there is none."""
        distances: list[float] = [_FAR] * len(self._edges)
        distances[source] = 0
        queue = [(0, source)]
        while queue:
            distance, node = heappop(queue)
            if distance > distances[node]:
                continue
            for edge in self._edges[node]:
                if self._capacities[edge]:
                    head = self._heads[edge]
                    further = distance + self._costs[edge] + potentials[node] - potentials[head]
                    if further < distances[head]:
                        distances[head] = further
                        heappush(queue, (further, head))
        if distances[sink] == _FAR:
            return False
        # Nodes beyond the sink are capped at its distance, which keeps reduced costs non-negative.
        for node, found in enumerate(distances):
            potentials[node] += int(min(found, distances[sink]))
        return True

    def _free(self, node: int, edge: int, potentials: list[int]) -> bool:
        reduced = self._costs[edge] + potentials[node] - potentials[self._heads[edge]]
        return self._capacities[edge] > 0 and reduced == 0

    def _levels(self, source: int, sink: int, potentials: list[int]) -> list[int]:
        """Hops from the source over free edges (−1: out of reach); empty if the sink is out of reach."""
        levels = [-1] * len(self._edges)
        levels[source] = 0
        queue = deque([source])
        while queue:
            node = queue.popleft()
            for edge in self._edges[node]:
                head = self._heads[edge]
                if levels[head] < 0 and self._free(node, edge, potentials):
                    levels[head] = levels[node] + 1
                    queue.append(head)
        return levels if levels[sink] >= 0 else []

    def _block(self, source: int, sink: int, potentials: list[int], levels: list[int]) -> int:
        """Saturate all shortest free paths; the amount sent."""
        tried = [0] * len(self._edges)
        path: list[int] = []
        sent = 0
        node = source
        while True:
            if node == sink:
                amount = min(self._capacities[edge] for edge in path)
                for edge in path:
                    self._capacities[edge] -= amount
                    self._capacities[edge ^ 1] += amount
                sent += amount
                path, node = [], source
                continue
            edges = self._edges[node]
            while tried[node] < len(edges):
                edge = edges[tried[node]]
                if levels[self._heads[edge]] == levels[node] + 1 and self._free(node, edge, potentials):
                    break
                tried[node] += 1
            else:
                if not path:
                    return sent
                node = self._heads[path.pop() ^ 1]
                tried[node] += 1
                continue
            path.append(edge)
            node = self._heads[edge]
