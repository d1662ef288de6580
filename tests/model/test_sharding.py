from __future__ import annotations

import pytest

from anabranch.errors import ConfigError, CorruptError
from anabranch.model.sharding import (
    DEFAULT_SHARDING,
    DynamicSharding,
    FixedSharding,
    Sharding,
    sharding_from_json,
)


def test_fixed_sharding_ignores_workers() -> None:
    assert [FixedSharding(100).shards_for(w) for w in (1, 7, 500)] == [100, 100, 100]


@pytest.mark.parametrize(
    ("k", "workers", "shards"),
    [
        (1 / 16, 1, 16),
        (1 / 16, 2, 32),
        (1 / 16, 3, 64),
        (1 / 16, 4, 64),
        (1 / 16, 5, 128),
        (0.1, 1, 16),
        (0.1, 13, 256),
    ],
)
def test_dynamic_sharding_is_the_next_power_of_two(k: float, workers: int, shards: int) -> None:
    assert DynamicSharding(k).shards_for(workers) == shards


def test_default_has_16_to_32_shards_a_worker() -> None:
    for workers in range(1, 1000):
        assert 16 <= DEFAULT_SHARDING.shards_for(workers) / workers < 32


def test_wrong_numbers_are_refused() -> None:
    for shards in (0, 65_537):
        with pytest.raises(ConfigError, match="65536"):
            FixedSharding(shards)
    for k in (0.0, 1.0, -0.5):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            DynamicSharding(k)
    with pytest.raises(ConfigError, match="5000 workers"):
        DynamicSharding(1 / 16).shards_for(5000)


@pytest.mark.parametrize("sharding", [FixedSharding(48), DynamicSharding(0.25)])
def test_json(sharding: Sharding) -> None:
    assert sharding_from_json(sharding.to_json()) == sharding
    with pytest.raises(CorruptError):
        sharding_from_json({"kind": "none"})
