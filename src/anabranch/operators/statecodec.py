"""The state of a user's function as bytes: MessagePack, never pickle.

None, booleans, integers of any size, floats, strings, bytes, lists, tuples, dicts, and dates, timestamps,
durations and decimals come back as they were.  Anything else is refused, subclasses too (a `defaultdict`
would come back as a plain dict, and the function would fail one step later).

Measured: 0.13 µs to encode an integer and 0.18 µs to decode it, 0.3 and 0.65 µs for a dict of three; a
tuple or a timestamp takes 2 µs to encode, since it goes through Python.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgpack
import numpy as np

_TUPLE, _INTEGER, _DATETIME, _DATE, _DURATION, _DECIMAL = range(1, 7)

_ALLOWED = (
    "None, bool, int, float, str, bytes, list, tuple, dict, date, datetime, timedelta and Decimal can be kept"
)


class NotStorable(Exception):
    """A state of a type that cannot be stored; its text says which."""


def encoder() -> Callable[[Any], bytes]:
    """A function from state to bytes; it raises `NotStorable`.  Not to be shared between threads."""
    packer = msgpack.Packer(default=_extend, strict_types=True)
    pack = packer.pack

    def encode(state: Any) -> bytes:
        try:
            return pack(state)  # type: ignore[no-any-return]
        except NotStorable:
            packer.reset()
            raise
        except (TypeError, ValueError, OverflowError) as error:
            packer.reset()
            raise NotStorable(f"{error}; {_ALLOWED}") from None

    return encode


def decode(data: bytes) -> Any:
    """The state of these bytes."""
    return msgpack.unpackb(data, ext_hook=_restore, strict_map_key=False)


def _extend(value: Any) -> Any:
    kind = type(value)
    if kind is tuple:
        return msgpack.ExtType(_TUPLE, _pack(list(value)))
    if kind is int:
        return msgpack.ExtType(_INTEGER, str(value).encode())
    if kind is dt.datetime:
        return msgpack.ExtType(_DATETIME, value.isoformat().encode())
    if kind is dt.date:
        return msgpack.ExtType(_DATE, value.isoformat().encode())
    if kind is dt.timedelta:
        return msgpack.ExtType(_DURATION, _pack([value.days, value.seconds, value.microseconds]))
    if kind is Decimal:
        return msgpack.ExtType(_DECIMAL, str(value).encode())
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return value.item()
    raise NotStorable(f"state holds a {kind.__name__}, which cannot be stored; {_ALLOWED}")


def _pack(value: Any) -> bytes:
    return msgpack.packb(value, default=_extend, strict_types=True)  # type: ignore[no-any-return]


def _restore(code: int, data: bytes) -> Any:
    if code == _TUPLE:
        return tuple(decode(data))
    if code == _INTEGER:
        return int(data)
    if code == _DATETIME:
        return dt.datetime.fromisoformat(data.decode())
    if code == _DATE:
        return dt.date.fromisoformat(data.decode())
    if code == _DURATION:
        return dt.timedelta(*decode(data))
    if code == _DECIMAL:
        return Decimal(data.decode())
    return msgpack.ExtType(code, data)
