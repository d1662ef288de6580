"""The answer of a prefix scan over keyed state: shared by those who ask and those who store."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Scan(NamedTuple):
    """What `KeyedState.scan` found: entry *j* answers prefix `index[j]`."""

    index: npt.NDArray[np.int64]  # type: ignore[assignment]  # hides `tuple.index`, which nobody needs here
    suffixes: list[bytes]
    values: list[bytes]
