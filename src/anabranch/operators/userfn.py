"""Rows for a user's Python function, and columns from what it returns.

A stream whose only column is called `value` hands the bare value to the function; any other hands a
named tuple of its columns.  (A column whose name is no Python identifier is reached by its
place: its field is called `_0`, `_1`, …)

What comes back becomes columns of the declared types, strictly: no number is read from a string, no
fraction is cut off, nothing wraps around.  Whole columns are converted at once, which costs 60 to
80 ns for each value; only when that fails are the rows looked at one by one, to name the one at fault.

Must not know: keys, state.
"""

from __future__ import annotations

import datetime as dt
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from functools import lru_cache
from itertools import repeat
from operator import itemgetter
from typing import Any, NoReturn

import numpy as np
import polars as pl

from anabranch.errors import RecordError
from anabranch.operators.kernel import Context, DeadLetter, Schema

BARE = "value"
"""The column that a stream of bare values has."""

_INTEGER: tuple[type, ...] = (int, np.integer)
_TAKES: list[tuple[tuple[type[pl.DataType], ...], tuple[type, ...], tuple[type, ...]]] = [
    # Polars types, Python types that fit, and subclasses of those that do not.
    (
        (pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64),
        _INTEGER,
        (bool, np.timedelta64),
    ),
    ((pl.Float32, pl.Float64), (float, np.floating, *_INTEGER), (bool, np.timedelta64)),
    ((pl.Boolean,), (bool, np.bool_), ()),
    ((pl.String,), (str,), ()),
    ((pl.Binary,), (bytes,), ()),
    ((pl.Date,), (dt.date,), (dt.datetime,)),
    ((pl.Datetime,), (dt.datetime,), ()),
    ((pl.Time,), (dt.time,), ()),
    ((pl.Duration,), (dt.timedelta,), ()),
    ((pl.Decimal,), (Decimal, int), (bool,)),
    ((pl.List, pl.Array), (list, tuple), ()),
    ((pl.Struct,), (dict,), ()),
]


class Misfit(Exception):
    """A result that does not fit the declared columns; its text says why."""


class Poisoned(Exception):
    """A record on which processes died before; its text says so."""


@lru_cache(maxsize=256)
def row_class(columns: tuple[str, ...]) -> type[tuple[Any, ...]]:
    """The named tuple of a stream's rows; one class per set of columns in each process."""
    return namedtuple("Row", columns, rename=True)


class Rows:
    """The rows of a frame, as its user's function sees them.

    Iterating makes each row when it is asked for: 130 ns for three columns by `tuple.__new__`, half of
    what `Row._make` takes, and nothing for the garbage collector to walk over.
    """

    def __init__(self, frame: pl.DataFrame, schema: Schema) -> None:
        columns = tuple(schema)
        self._bare = columns == (BARE,)
        self._class = row_class(columns)
        self._lists = [frame.get_column(name).to_list() for name in columns]

    def __len__(self) -> int:
        return len(self._lists[0])

    def __iter__(self) -> Iterator[Any]:
        if self._bare:
            return iter(self._lists[0])
        return map(tuple.__new__, repeat(self._class), zip(*self._lists, strict=True))

    def __getitem__(self, place: int) -> Any:
        if self._bare:
            return self._lists[0][place]
        return self._class(*(values[place] for values in self._lists))


def operator_name(context: Context) -> str:
    """How errors call the operator."""
    return f"operator {context.operator}"


def raised(error: BaseException) -> str:
    """The reason of a record on which a function failed."""
    return f"function raised {type(error).__name__}: {error}"


def reason_of(error: Exception) -> str:
    """The reason of a record that failed: what we found wrong with it, or what the function raised."""
    return str(error) if isinstance(error, Misfit | Poisoned) else raised(error)


def check_in(context: Context, record: object) -> None:
    """Note a record that a function is about to get.

    Raises:
        Poisoned: processes died on it.
    """
    if context.guard is not None:
        reason = context.guard.admit(context.operator, shown(record))
        if reason is not None:
            raise Poisoned(reason)


def check_out(context: Context) -> None:
    """The function has returned from its last call."""
    if context.guard is not None:
        context.guard.leave()


def guarded(function: Callable[..., Any], context: Context, place: int = 0) -> Callable[..., Any]:
    """The function itself, or, where calls are watched, one that checks in the argument at `place` first."""
    if context.guard is None:
        return function

    def call(*arguments: Any) -> Any:
        check_in(context, arguments[place])
        return function(*arguments)

    return call


def stop(context: Context, reason: str, record: object = "", cause: BaseException | None = None) -> NoReturn:
    """Stop the flow with an error that names the operator."""
    raise RecordError(operator_name(context), reason, shown(record)) from cause


def set_aside(
    context: Context, reason: str, record: object, weight: int, cause: BaseException | None = None
) -> None:
    """Do with a bad record what the flow asks for: stop, or make a dead letter of it."""
    if context.on_error == "stop":
        stop(context, reason, record, cause)
    context.dead_letters.append(
        DeadLetter(str(context.operator), f"step {context.step}", shown(record), reason, weight)
    )


def shown(record: object) -> str:
    """A record as text; a string is shown as it is."""
    return record if isinstance(record, str) else repr(record)


def call_rows(
    function: Callable[[Any], Any], rows: Rows, on_failure: Callable[[int, Exception], None]
) -> tuple[list[Any], list[int]]:
    """The function's result for each row on which it did not fail, and the places of the others.

    The function is called once for every row.  `list.extend` keeps what it got before the
    iterator raised, and a `map` goes on after its function raised: so the loop runs at C speed
    between failures.
    """
    results: list[Any] = []
    failed: list[int] = []
    calls = map(function, rows)
    while True:
        error: Exception | None = None
        try:
            results.extend(calls)
        except Exception as caught:  # noqa: BLE001
            error = caught
        place = len(results) + len(failed)
        if error is None:
            if place == len(rows):
                return results, failed
            # A function's StopIteration ends `extend` as the end of the rows would.
            error = StopIteration()
        failed.append(place)
        on_failure(place, error)


def build_frame(results: Sequence[Any], schema: Schema) -> pl.DataFrame:
    """What a function returned, as columns.

    Raises:
        Misfit: a result has other columns or types than the schema.
    """
    columns = _split(results, schema)
    return pl.DataFrame([_column(name, columns[i], dtype) for i, (name, dtype) in enumerate(schema.items())])


def misfits(results: Sequence[Any], schema: Schema) -> list[tuple[int, str]]:
    """The place and the reason of each result that does not fit; slow, for the error case alone."""
    found: list[tuple[int, str]] = []
    for place, result in enumerate(results):
        try:
            build_frame([result], schema)
        except Misfit as misfit:
            found.append((place, str(misfit)))
    return found


def describe(schema: Schema) -> str:
    """The columns of a schema, for messages."""
    if len(schema) == 1:
        return str(next(iter(schema.values())))
    return "(" + ", ".join(f"{name}: {dtype}" for name, dtype in schema.items()) + ")"


def _split(results: Sequence[Any], schema: Schema) -> Sequence[Sequence[Any]]:
    kinds = set(map(type, results))
    names = tuple(schema)
    if len(names) == 1:
        dtype = schema[names[0]]
        # For a nested column a tuple or a dict is the value itself.
        if dtype.is_nested() or not any(issubclass(kind, tuple | dict) for kind in kinds):
            return [results]
        return [[_only(result, names[0], schema) for result in results]]
    if not results:
        return [()] * len(names)
    if len(kinds) == 1:
        kind = next(iter(kinds))
        if issubclass(kind, tuple):
            return _split_tuples(kind, results, schema)
        if issubclass(kind, dict):
            return _split_dicts(results, schema)
        raise Misfit(_returned(results[0], schema))
    rows = [next(zip(*_split([result], schema), strict=True)) for result in results]
    return list(zip(*rows, strict=True))


def _split_tuples(kind: type, results: Sequence[Any], schema: Schema) -> Sequence[Sequence[Any]]:
    names = tuple(schema)
    if set(map(len, results)) != {len(names)}:
        odd = next(result for result in results if len(result) != len(names))
        raise Misfit(_returned(odd, schema))
    columns = list(zip(*results, strict=True))
    given = getattr(kind, "_fields", None)
    if given is None:
        return columns
    wanted = row_class(names)._fields  # type: ignore[attr-defined]
    if given == wanted:
        return columns
    if set(given) != set(wanted):
        raise Misfit(_returned(results[0], schema))
    return [columns[given.index(field)] for field in wanted]


def _split_dicts(results: Sequence[Any], schema: Schema) -> Sequence[Sequence[Any]]:
    names = tuple(schema)
    try:
        columns = [list(map(itemgetter(name), results)) for name in names]
    except KeyError:
        odd = next(result for result in results if result.keys() != schema.keys())
        raise Misfit(_returned(odd, schema)) from None
    if set(map(len, results)) != {len(names)}:
        odd = next(result for result in results if len(result) != len(names))
        raise Misfit(_returned(odd, schema))
    return columns


def _only(result: Any, name: str, schema: Schema) -> Any:
    if isinstance(result, dict):
        if result.keys() != {name}:
            raise Misfit(_returned(result, schema))
        return result[name]
    if isinstance(result, tuple):
        if len(result) != 1:
            raise Misfit(_returned(result, schema))
        return result[0]
    return result


def _column(name: str, values: Sequence[Any], dtype: pl.DataType) -> pl.Series:
    takes, but = _fits(dtype)
    for kind in set(map(type, values)):
        if kind is not type(None) and (not issubclass(kind, takes) or issubclass(kind, but)):
            odd = next(value for value in values if type(value) is kind)
            raise Misfit(_expected(name, odd, dtype))
    try:
        series = pl.Series(name, values, dtype=dtype, strict=True)
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError) as error:
        if len(values) == 1:
            raise Misfit(_expected(name, values[0], dtype)) from None
        raise Misfit(f"function returned values that do not fit column {name} {dtype}: {error}") from None
    lossy = isinstance(dtype, pl.Decimal) or getattr(dtype, "time_unit", "us") == "ms"
    if series.dtype != dtype or (lossy and not _same(series, values)):
        raise Misfit(_expected(name, values[0] if len(values) == 1 else values, dtype))
    return series


def _same(series: pl.Series, values: Sequence[Any]) -> bool:
    # Polars rounds a decimal to the column's scale, and a timestamp to its unit, even when told to be strict.
    try:
        return series.to_list() == list(values)
    except TypeError:
        return True


@lru_cache(maxsize=256)
def _fits(dtype: pl.DataType) -> tuple[tuple[type, ...], tuple[type, ...]]:
    for dtypes, takes, but in _TAKES:
        if isinstance(dtype, dtypes):
            return takes, but
    return (object,), ()


def _returned(result: object, schema: Schema) -> str:
    return f"function returned {_brief(result)}, expected {describe(schema)}"


def _expected(name: str, value: object, dtype: pl.DataType) -> str:
    return f"function returned {_brief(value)} for column {name}, expected {dtype}"


def _brief(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:80] + '…'}"


def as_rows(result: Any) -> Iterable[Any]:
    """What a function that gives any number of rows returned, as something to iterate over.

    Raises:
        Misfit: a single row, or a string, whose letters would otherwise become rows.
    """
    if type(result) is list:
        return result
    if result is None:
        return ()
    if isinstance(result, str | bytes | dict) or hasattr(result, "_fields"):
        raise Misfit(f"function returned {_brief(result)}, expected a list of rows")
    try:
        iter(result)
    except TypeError:
        raise Misfit(f"function returned {_brief(result)}, expected a list of rows") from None
    return result  # type: ignore[no-any-return]
