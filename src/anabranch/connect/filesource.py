"""What all sources over files share: partitions are files, named by their path below the input's directory.

Must not know: formats.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from anabranch.connect.listing import Listing
from anabranch.connect.source import Source
from anabranch.errors import ConfigError
from anabranch.model.ids import PartitionId


class FileSource(Source):
    """Files under a listing, in one format."""

    def __init__(
        self,
        listing: Listing,
        schema: Mapping[str, pl.DataType],
        weight: str | None,
        settle: float,
    ) -> None:
        if weight is not None and weight in schema:
            schema = {name: dtype for name, dtype in schema.items() if name != weight}
        if not schema:
            raise ConfigError(f"input {listing.base}: no column is left beside the weight column {weight!r}")
        self.schema = dict(schema)
        self.append_only = weight is None
        self._listing = listing
        self._weight = weight
        self._settle = settle

    def fingerprint(self) -> dict[str, Any]:
        return {
            "kind": "files",
            "path": str(self._listing.base),
            "pattern": self._listing.pattern,
            "format": self.format_name,
            "schema": {name: str(dtype) for name, dtype in self.schema.items()},
            "weight": self._weight,
        }

    @property
    @abstractmethod
    def format_name(self) -> str:
        """`text`, `csv`, `jsonl` or `parquet`."""

    def path_of(self, partition: PartitionId | str) -> Path:
        """The file that is a partition."""
        return self._listing.base / partition

    def __getstate__(self) -> dict[str, Any]:
        # Workers read named slices; what the driver knows of thousands of files stays there.
        state = self.__dict__.copy()
        state["_listing"] = Listing(self._listing.base, self._listing.pattern)
        return state
