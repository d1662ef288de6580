"""Bytes that must survive, by name: on a local disk or in an object store.

Knows errors and crash points.  Must not know what the bytes mean.
"""

from anabranch.storage.base import Storage
from anabranch.storage.opening import environment, is_url, open_storage

__all__ = ["Storage", "environment", "is_url", "open_storage"]
