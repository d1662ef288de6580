"""Whether a checkpoint should scan all keys instead of looking up those that changed.

Must not know: checkpoints' files, steps.
"""

from __future__ import annotations

_UNSEEN = 8
"""Checkpoints in a row that take it for granted that most keys have changed."""


class Density:
    """Foresees whether most keys have changed since the last checkpoint, from how many bytes steps have overwritten: it
    knows how many they were when most had."""

    def __init__(self) -> None:
        self.undo_bytes = 0
        """Since the last one began."""
        self._at_begin = 0
        self._enough: int | None = None
        self._left = 0

    def begin(self) -> bool:
        """A checkpoint begins; whether it is to expect that most keys have changed."""
        self._at_begin, self.undo_bytes = self.undo_bytes, 0
        if self._enough is None or self._at_begin < self._enough:
            return False
        self._left -= 1
        if self._left < 0:
            # Time to see whether it is still so.
            self._enough = None
            return False
        return True

    def learn(self, dense: bool | None) -> None:
        """What the checkpoint that was begun last has found; None: nothing, as it did not look."""
        if dense:
            self._enough = self._at_begin - self._at_begin // 8
            self._left = _UNSEEN
        elif dense is False and self._enough is not None and self._at_begin >= self._enough:
            self._enough = None
