"""The flow that crash tests run."""

from __future__ import annotations

from typing import Any

FLOW: dict[str, Any] = {
    "name": "crash",
    "inputs": {
        "orders": {"kind": "jsonl", "weights": True},
        "items": {"kind": "iterable", "weights": False},
        "people": {"kind": "parquet", "weights": False},
        "lines": {"kind": "text", "weights": False, "bad": True},
    },
    "nodes": [
        {"op": "input", "input": "orders", "of": []},
        {"op": "input", "input": "items", "of": []},
        {"op": "input", "input": "people", "of": []},
        {"op": "input", "input": "lines", "of": []},
        {
            "op": "join", "of": [0, 2], "keys": ["a", "s"], "how": "full",
            "take": {"n": "left", "x": "right", "d": "left"},
        },
        {
            "op": "aggregate", "of": [4], "keys": ["s"], "made": False,
            "slots": {"a": ["count", None], "n": ["max", "n"], "x": ["sum", "x"], "d": ["min", "d"]},
        },
        {"op": "stateful_map", "of": [1], "keys": ["a"], "weights": False},
        {"op": "union", "of": [3, 1]},
        {"op": "distinct", "of": [7], "keys": ["a"]},
        {"op": "stateful_batches", "of": [3], "keys": ["s"], "weights": False},
        {"op": "reduce", "of": [0], "keys": ["a"], "weights": True},
    ],
    "outputs": {"joined": 4, "totals": 5, "gaps": 6, "distinct": 8, "sums": 9, "folded": 10},
}  # fmt: skip
"""Inputs of every replayable kind and one that cannot replay, two regions in a row, and dead letters."""
