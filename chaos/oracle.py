"""What each step of a described flow must give, in plain Python.

Shares no code with the engine: no import of it, other algorithms.  Aggregates, joins and distinct are computed from
all rows of the keys that a step touches, before and after it; the difference is the step's change.  Sums are
fractions, rounded once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

Row = tuple[Any, ...]
Delta = list[tuple[Row, int]]
"""Rows with weights; in order where order means something."""
ZSet = Counter[Row]

COLUMNS = ("a", "s", "n", "x", "d")
_A, _S, _N, _X, _D = range(5)
_FILLERS = {"a": 7, "s": "made", "n": None, "x": 0.5, "d": None}
_HOWS_BOTH = ("inner", "left", "full")


class Oracle:
    """A described flow with its state.  `step` is called once for each step, in order."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        self._nodes = description["nodes"]
        self._inputs = description["inputs"]
        self._outputs = description["outputs"]
        self._running = [_KINDS[node["op"]](node) for node in self._nodes]

    def step(self, inputs: Mapping[str, Delta]) -> dict[str, ZSet]:
        """The change of every output, given what each input contributed, in the order of its partitions."""
        deltas: list[Delta] = []
        for node, run in zip(self._nodes, self._running, strict=True):
            if node["op"] == "input":
                deltas.append(list(inputs.get(node["input"], ())))
            else:
                deltas.append(run(*(deltas[place] for place in node["of"])))
        return {name: zset(deltas[place]) for name, place in self._outputs.items()}


def zset(delta: Iterable[tuple[Row, int]]) -> ZSet:
    """Equal rows added up, zeros left out."""
    total: ZSet = Counter()
    for row, weight in delta:
        total[row] += weight
    return Counter({row: weight for row, weight in total.items() if weight})


# Linear operators: a change for a change.


def _input(node: Mapping[str, Any]) -> Callable[..., Delta]:
    return list


def _filter(node: Mapping[str, Any]) -> Callable[[Delta], Delta]:
    column, modulus, rest = COLUMNS.index(node["column"]), node["mod"], node["rest"]
    wanted: bool = node.get("side", True)

    def chosen(row: Row) -> bool:
        found: bool = row[column] is not None and row[column] % modulus == rest
        return found == wanted

    return lambda delta: [(row, weight) for row, weight in delta if chosen(row)]


def _map(node: Mapping[str, Any]) -> Callable[[Delta], Delta]:
    def shift(row: Row) -> Row:
        return (row[_A], row[_S], None if row[_N] is None else row[_N] + 1, *row[_X:])

    def rekey(row: Row) -> Row:
        return ((row[_N] or 0) % 7, (row[_S] or "none")[0], *row[_N:])

    fn = shift if node["kind"] == "shift" else rekey
    return lambda delta: [(fn(row), weight) for row, weight in delta]


def _flat_map(node: Mapping[str, Any]) -> Callable[[Delta], Delta]:
    def copies(row: Row) -> list[Row]:
        n = row[_N]
        return [] if n is None else [(*row[:_N], n + more, *row[_X:]) for more in range(n % 3)]

    return lambda delta: [(copy, weight) for row, weight in delta for copy in copies(row)]


def _with(node: Mapping[str, Any]) -> Callable[[Delta], Delta]:
    def change(row: Row) -> Row:
        a, s, n, x, d = row
        return (a, s, None if n is None or a is None else n * 2 - a % 11, None if x is None else x * 2 + 1, d)

    return lambda delta: [(change(row), weight) for row, weight in delta]


def _batches(node: Mapping[str, Any]) -> Callable[[Delta], Delta]:
    return lambda delta: [(row, 2 * weight) for row, weight in delta]


def _union(node: Mapping[str, Any]) -> Callable[[Delta, Delta], Delta]:
    return lambda left, right: left + right


# Operators over keys: the rows of a key as they are now, and a table made of them.


def _key_of(columns: Iterable[str]) -> Callable[[Row], Row]:
    places = [COLUMNS.index(column) for column in columns]
    return lambda row: tuple(row[place] for place in places)


class _Keyed:
    """Rows by key, for each input; `table` makes a key's result of them."""

    def __init__(self, node: Mapping[str, Any]) -> None:
        self.node = node
        self.key_of = _key_of(node["keys"])
        self.sides: list[defaultdict[Row, ZSet]] = [defaultdict(Counter) for _ in node["of"]]

    def table(self, key: Row, *sides: ZSet) -> Delta:
        raise NotImplementedError

    def __call__(self, *deltas: Delta) -> Delta:
        by_key = [_grouped(delta, self.key_of) for delta in deltas]
        result: Delta = []
        for key in dict.fromkeys(key for groups in by_key for key in groups):
            rows = [side[key] for side in self.sides]
            result += [(row, -weight) for row, weight in self.table(key, *rows)]
            for own, groups in zip(rows, by_key, strict=True):
                for row, weight in groups.get(key, ()):
                    own[row] += weight
                    if not own[row]:
                        del own[row]
            result += self.table(key, *rows)
        return list(zset(result).items())


def _grouped(delta: Delta, key_of: Callable[[Row], Row]) -> dict[Row, Delta]:
    groups: dict[Row, Delta] = {}
    for row, weight in delta:
        groups.setdefault(key_of(row), []).append((row, weight))
    return groups


class _Distinct(_Keyed):
    def __init__(self, node: Mapping[str, Any]) -> None:
        super().__init__({**node, "keys": node["keys"] or ["a", "s", "n", "d"]})

    def table(self, key: Row, *sides: ZSet) -> Delta:
        return [(row, 1) for row, weight in sides[0].items() if weight > 0]


class _Aggregate(_Keyed):
    def __init__(self, node: Mapping[str, Any]) -> None:
        super().__init__(node)
        if node["made"]:
            self.key_of = lambda row: (f"key {(row[_N] or 0) % 5}",)

    def table(self, key: Row, *sides: ZSet) -> Delta:
        (rows,) = sides
        if not sum(rows.values()):
            return []
        result = dict(zip(self.node["keys"], key, strict=True))
        for column, (kind, of) in self.node["slots"].items():
            result[column] = _aggregated(kind, of, rows)
        return [(tuple(result[column] for column in COLUMNS), 1)]


def _aggregated(kind: str, of: str | None, rows: ZSet) -> Any:
    if of is None:
        return sum(rows.values())
    place = COLUMNS.index(of)
    values: Counter[Any] = Counter()
    for row, weight in rows.items():
        if row[place] is not None:
            values[row[place]] += weight
    if kind in ("min", "max"):
        there = [value for value, weight in values.items() if weight > 0]
        if not there:
            return None
        return min(there) if kind == "min" else max(there)
    count = sum(values.values())
    if not count:
        return None
    total = sum((Fraction(value) * weight for value, weight in values.items()), Fraction(0))
    if kind == "mean":
        return float(total) / count
    if of == "x":
        return float(total)
    return Decimal(total.numerator) / total.denominator if of == "d" else int(total)


class _Join(_Keyed):
    def table(self, key: Row, *sides: ZSet) -> Delta:
        left, right = sides
        how = self.node["how"]
        null = None in key
        if how == "semi":
            return list(left.items()) if right and not null else []
        if how == "anti":
            return list(left.items()) if null or not right else []
        nothing: Row = (None,) * len(COLUMNS)
        result: Delta = []
        if not null:
            result = [
                (self._joined(key, mine, other), w * v)
                for mine, w in left.items()
                for other, v in right.items()
            ]
        if how in ("left", "full") and (null or not right):
            result += [(self._joined(key, mine, nothing), w) for mine, w in left.items()]
        if how == "full" and (null or not left):
            result += [(self._joined(key, nothing, other), v) for other, v in right.items()]
        return result

    def _joined(self, key: Row, left: Row, right: Row) -> Row:
        keys = dict(zip(self.node["keys"], key, strict=True))
        take = self.node["take"]
        return tuple(
            keys[column] if column in keys else (left if take[column] == "left" else right)[place]
            for place, column in enumerate(COLUMNS)
        )


# Functions with state: row after row.


class _Stateful:
    """State by key; `fold` takes a key's rows of a step and gives the changes of its column `n`."""

    def __init__(self, node: Mapping[str, Any]) -> None:
        self.node = node
        self.weights = node["weights"]
        self.key_of = _key_of(node["keys"])
        self.states: dict[Row, Any] = {}

    def fold(self, key: Row, rows: Delta) -> list[tuple[Any, int]]:
        raise NotImplementedError

    def __call__(self, delta: Delta) -> Delta:
        result: Delta = []
        for key, rows in _grouped(delta, self.key_of).items():
            columns = {**_FILLERS, **dict(zip(self.node["keys"], key, strict=True))}
            for made, weight in self.fold(key, rows):
                result.append((tuple({**columns, "n": made}[column] for column in COLUMNS), weight))
        return result


class _Reduce(_Stateful):
    def fold(self, key: Row, rows: Delta) -> list[tuple[Any, int]]:
        before = after = self.states.get(key)
        for row, weight in rows:
            value = row[_N]
            if self.weights:
                after = ((after or 0) + (value or 0) * weight) or None
                continue
            for _ in range(weight):
                if after is None:
                    after = value
                elif value is not None:
                    after = (after * 31 + value) % 1_000_003
        self.states[key] = after
        return [(value, sign) for value, sign in ((before, -1), (after, 1)) if value is not None]


class _StatefulMap(_Stateful):
    def fold(self, key: Row, rows: Delta) -> list[tuple[Any, int]]:
        made: list[tuple[Any, int]] = []
        for row, weight in rows:
            if self.weights:
                before = self.states.get(key, 0)
                self.states[key] = after = before + weight
                made += [(value, sign) for value, sign in ((before, -1), (after, 1)) if value]
                continue
            for _ in range(weight):
                seen, last = self.states.get(key, (0, 0))
                value = row[_N] or 0
                if seen:
                    made.append((value - last, 1))
                self.states[key] = (seen + 1, value)
                if seen + 1 == 4:
                    del self.states[key]
        return made


class _StatefulBatches(_Stateful):
    def fold(self, key: Row, rows: Delta) -> list[tuple[Any, int]]:
        before = self.states.get(key, 0)
        after = before + sum((row[_N] or 0) * weight for row, weight in rows)
        self.states[key] = after
        if not self.weights:
            return [(after, 1)]
        return [(value, sign) for value, sign in ((before, -1), (after, 1)) if value]


_KINDS: dict[str, Callable[[Mapping[str, Any]], Callable[..., Delta]]] = {
    "input": _input,
    "filter": _filter,
    "branch": _filter,
    "map": _map,
    "flat_map": _flat_map,
    "with": _with,
    "batches": _batches,
    "union": _union,
    "distinct": _Distinct,
    "aggregate": _Aggregate,
    "join": _Join,
    "reduce": _Reduce,
    "stateful_map": _StatefulMap,
    "stateful_batches": _StatefulBatches,
}
