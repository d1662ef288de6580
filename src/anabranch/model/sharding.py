"""How many shards there are for a number of workers.

Shards are ranges of the hash (`hashing.shard_of`), so that for counts that divide each other a shard
splits into whole shards and whole shards merge into one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from anabranch.errors import ConfigError, CorruptError
from anabranch.model.hashing import MAX_SHARDS


@dataclass(frozen=True, slots=True)
class FixedSharding:
    """The same number of shards at any scale: nothing ever splits, but S has to be foreseen.

    With fewer shards than workers some workers have no state.
    """

    shards: int

    def __post_init__(self) -> None:
        if not 1 <= self.shards <= MAX_SHARDS:
            raise ConfigError(f"the number of shards must be 1 to {MAX_SHARDS}, not {self.shards}")

    def shards_for(self, workers: int) -> int:
        """The number of shards; the number of workers plays no part."""
        return self.shards

    def shards_after(self, shards: int, workers: int) -> int:
        """The number of shards that there are: it stays."""
        return shards

    def to_json(self) -> dict[str, object]:
        """As a plain dictionary."""
        return {"kind": "fixed", "shards": self.shards}


@dataclass(frozen=True, slots=True)
class DynamicSharding:
    """S is the smallest power of two that is at least W/k; shards split and merge as W changes.

    Workers hold ⌊S/W⌋ or ⌈S/W⌉ shards and S/W ≥ 1/k, so that k bounds the unevenness.  The default of 1/16
    gives 16 to 32 shards a worker; a step that touches all of them pays for a transaction in each.
    """

    k: float = 1 / 16

    def __post_init__(self) -> None:
        if not 0 < self.k < 1:
            raise ConfigError(f"k of dynamic sharding must be between 0 and 1, not {self.k}")

    def shards_for(self, workers: int) -> int:
        """The number of shards for that many workers.

        Raises:
            ConfigError: it would be more than 65,536.
        """
        # Exactly: a quotient of floats may fall on the wrong side of a power of two.
        k, shards = Fraction(self.k), 1
        while shards * k < workers:
            shards *= 2
        if shards > MAX_SHARDS:
            raise ConfigError(
                f"{workers} workers with k={self.k} need {shards} shards, the most is {MAX_SHARDS}: "
                "choose a larger k"
            )
        return shards

    def shards_after(self, shards: int, workers: int) -> int:
        """The number of shards when there were `shards` and that many workers come.

        Splitting and merging rewrite state, so it stays as long as workers have a half to four times as many as they would
        be given anew: k then bounds the unevenness within a factor of two.
        """
        fitting = self.shards_for(workers)
        if 2 * shards >= fitting and shards <= 4 * fitting:
            return shards
        return fitting if fitting % shards == 0 or shards % fitting == 0 else shards

    def to_json(self) -> dict[str, object]:
        """As a plain dictionary."""
        return {"kind": "dynamic", "k": self.k}


Sharding = FixedSharding | DynamicSharding
DEFAULT_SHARDING: Sharding = DynamicSharding()


def sharding_from_json(data: Mapping[str, object]) -> Sharding:
    """The inverse of `to_json`.

    Raises:
        CorruptError: the data is not a sharding.
    """
    match data:
        case {"kind": "fixed", "shards": int(shards)}:
            return FixedSharding(shards)
        case {"kind": "dynamic", "k": float(k)}:
            return DynamicSharding(k)
    raise CorruptError(f"not a sharding: {dict(data)!r}")
