"""Reading one thing after another without waiting for each: an object store answers in milliseconds, not microseconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from anabranch.storage.base import Storage

T = TypeVar("T")
R = TypeVar("R")

_AT_ONCE = 16


def read_ahead(storage: Storage, read: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """`map(read, items)`; in an object store, at most 16 items ahead of what was asked for.

    `items` may be endless.  `read` may be called for items that are never asked for, and must not mind.
    """
    if storage.local is not None:
        yield from map(read, items)
        return
    rest = iter(items)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="anabranch-ahead") as pool:
        window: deque[Future[R]] = deque(pool.submit(read, item) for item in islice(rest, _AT_ONCE))
        try:
            while window:
                result = window.popleft().result()
                window.extend(pool.submit(read, item) for item in islice(rest, 1))
                yield result
        finally:
            for future in window:
                future.cancel()
