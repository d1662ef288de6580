"""What a run can be told, and what it cannot."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.errors import ConfigError
from anabranch.runtime.settings import Settings


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"workers": 0}, r"workers=0: must be a whole number of at least 1"),
        ({"workers": 1.5}, r"workers=1.5"),
        ({"workers": 2000}, r"at most 1024"),
        ({"hosts": 0}, r"hosts=0"),
        ({"shards": 0}, r"shards=0"),
        ({"shards": 70_000}, r"at most 65536"),
        ({"steps": -1}, r"steps=-1"),
        ({"max_step_rows": 0}, r"max_step_rows=0"),
        ({"max_step_bytes": 0}, r"max_step_bytes=0"),
        ({"max_attempts": 0}, r"max_attempts=0"),
        ({"target_seconds": 0.0}, r"target_seconds=0.0"),
        ({"target_seconds": float("nan")}, r"target_seconds=nan"),
        ({"hosts": 2, "master": "spark://x:7077"}, r"--hosts is for embedded runs"),
    ],
    ids=str,
)
def test_wrong_settings(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings(**wrong)


def test_embedded() -> None:
    assert Settings().embedded
    assert Settings(master="local[2]").embedded
    assert not Settings(master="spark://x:7077").embedded
