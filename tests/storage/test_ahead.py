"""Reading ahead gives what reading one by one gives."""

from __future__ import annotations

import threading
from itertools import count, islice
from pathlib import Path

import pytest

from anabranch.storage import open_storage
from anabranch.storage.ahead import read_ahead


@pytest.mark.parametrize("where", ["local", "s3"])
def test_in_order_and_as_far_as_asked(request: pytest.FixtureRequest, tmp_path: Path, where: str) -> None:
    storage = open_storage(tmp_path if where == "local" else request.getfixturevalue("object_url"))
    asked: set[int] = set()

    def square(number: int) -> int:
        asked.add(number)
        return number * number

    assert list(read_ahead(storage, square, [])) == []
    assert list(read_ahead(storage, square, range(40))) == [number * number for number in range(40)]
    asked.clear()
    endless = read_ahead(storage, square, count())
    assert list(islice(endless, 5)) == [0, 1, 4, 9, 16]
    endless.close()  # type: ignore[attr-defined]
    assert max(asked) <= 5 + 16
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("anabranch-ahead")]


def test_an_error_comes_in_its_place(object_url: str) -> None:
    def fail(number: int) -> int:
        if number == 3:
            raise KeyError(number)
        return number

    reading = read_ahead(open_storage(object_url), fail, count())
    assert list(islice(reading, 3)) == [0, 1, 2]
    with pytest.raises(KeyError):
        next(reading)
