"""Commands of other threads, served by the step loop between two steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from queue import Empty, SimpleQueue
from typing import Any

from anabranch.errors import AnabranchError, EngineError

Json = dict[str, Any]
_PATIENCE = 25.0
"""Seconds; less than those who ask have."""


class Inbox:
    """What `ControlServer` asks, and the step loop answers.

    `status` is answered at once, by what was said last: it must work while the flow recovers.
    """

    def __init__(self, status: Callable[[], Json]) -> None:
        self._status = status
        self._waiting: SimpleQueue[tuple[str, Json, Future[Json]]] = SimpleQueue()
        self._closed = False

    def answer(self, method: str, path: str, body: Json) -> Json:
        """On a thread of the server's."""
        if path == "/status":
            return self._status()
        if self._closed:
            raise EngineError("the job is stopping")
        future: Future[Json] = Future()
        self._waiting.put((path, body, future))
        try:
            return future.result(_PATIENCE)
        except FutureTimeout:
            # Not done later either, when nobody expects it any more.
            future.cancel()
            raise EngineError("the job is busy recovering, or in a long step; try again") from None

    def serve(self, obey: Callable[[str, Json], Json]) -> None:
        """On the step loop's thread: answer all that wait."""
        while True:
            try:
                path, body, future = self._waiting.get_nowait()
            except Empty:
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(obey(path, body))
            except AnabranchError as error:
                future.set_exception(error)

    def close(self) -> None:
        """Nobody will serve any more."""
        self._closed = True
        self.serve(_refuse)


def _refuse(path: str, body: Json) -> Json:
    raise EngineError("the job is stopping")
