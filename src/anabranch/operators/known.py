"""Keys that come again: the numbers of 64-bit words, remembered from batch to batch.

Hashing a batch's keys from nothing builds the same table for every batch.  Where most keys have come before, finding
them again is a multiplication and two lookups a row, which NumPy does for thousands of rows at once.  Measured on one
core with a million rows over 100,000 keys: 5 ms where the words lie evenly, 7 ms where they are random; Arrow's
dictionary encoding takes 16.

What is known is a cache: costs depend on it, results do not.  It takes at most 10 MB.

KN-1  `_words` are distinct, and `_table` holds the number of each once.
KN-2  Between a word's first slot and its own, no slot is empty, and there are fewer than `_reach`.

Must not know: columns, types, nulls.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.model.batch import U64

I64 = npt.NDArray[np.int64]

_MULTIPLIER = np.uint64(0x9FB21C651E98DF25)
_RUN = 1 << 16
"""Rows at a time: temporaries stay in the cache, and calls of NumPy are few."""
_ROOM = 8
"""Slots for each word when a table is made; half as many before it is made anew.  With less room more words are not
in their first slot, and each of those costs several times as much."""
_LIMIT = 1 << 18
"""Words above which all are forgotten: by then the table is larger than a cache."""
_FEWEST = 1 << 16
"""Rows below which a batch is not worth a look."""
_REPEATED = 8
"""How many rows a word must have in a batch, on average, for the batch's words to be remembered."""
_FARTHEST = 64
"""Slots to try for a word.  Random words need a dozen; more means that somebody has chosen them to collide."""


class Known:
    """Distinct words, numbered in the order in which they came."""

    def __init__(self) -> None:
        self._forget()

    def __len__(self) -> int:
        return len(self._words)

    def number(self, words: U64) -> tuple[I64, U64] | None:
        """The number of each row's word, and the word of each number; some may have no row.

        None, and nothing is known any more, where few of the rows have a word that was.  Other new words are added.
        """
        if len(words) < _FEWEST or not len(self._words):
            return None
        numbers = self._find(words)
        if int(numbers.min()) >= 0:
            return numbers, self._words
        rows = np.flatnonzero(numbers < 0)
        every = self._words
        if 2 * len(rows) > len(words) or len(every) > _LIMIT:
            self._forget()
            return None
        own, fresh = _encode(words[rows])
        numbers[rows] = own + len(every)
        every = np.concatenate((every, fresh))
        self._remember(every)
        return numbers, every

    def learn(self, words: U64, rows: int) -> None:
        """Know the distinct words of a batch, and those alone, if they are few enough for its rows to come again."""
        if rows < _FEWEST:
            return
        self._forget()
        if len(words) * _REPEATED <= rows and len(words) <= _LIMIT:
            self._remember(words)

    def _forget(self) -> None:
        self._words: U64 = np.empty(0, dtype=np.uint64)
        self._make_table(0)

    def _make_table(self, words: int) -> None:
        bits = max(10, (words * _ROOM - 1).bit_length())
        self._shift = np.uint64(64 - bits)
        self._table = np.full(1 << bits, -1, dtype=np.int32)
        self._reach = 0

    def _remember(self, words: U64) -> None:
        """Know these words, of which the first are those that are known."""
        old = len(self._words)
        self._words = words
        if len(words) * _ROOM > 2 * len(self._table):
            self._make_table(len(words))
            old = 0
        numbers = np.arange(old, len(words), dtype=np.int32)
        slots = self._first_slots(words[old:])
        distance = 0
        while len(numbers):
            distance += 1
            if distance > _FARTHEST:
                self._forget()
                return
            free = self._table[slots] < 0
            # Of several words that want a slot, the last has it.
            self._table[slots[free]] = numbers[free]
            lost = self._table[slots] != numbers
            slots, numbers = self._next_slots(slots[lost]), numbers[lost]
        self._reach = max(self._reach, distance)

    def _first_slots(self, words: U64) -> I64:
        slots = words * _MULTIPLIER
        slots >>= self._shift
        return slots.view(np.int64)

    def _next_slots(self, slots: I64) -> I64:
        return (slots + 1) & (len(self._table) - 1)

    def _find(self, words: U64) -> I64:
        """The number of each word, −1 where it is not known."""
        numbers = np.empty(len(words), dtype=np.int64)
        for start in range(0, len(words), _RUN):
            run = words[start : start + _RUN]
            found = numbers[start : start + _RUN]
            slots = self._first_slots(run)
            found[:] = np.take(self._table, slots, mode="wrap")
            # An empty slot's −1 looks at the last word, which by KN-2 is not the one that is looked for.
            others = np.flatnonzero(np.take(self._words, found, mode="wrap") != run)
            if len(others):
                found[others] = self._find_farther(run[others], slots[others], found[others])
        return numbers

    def _find_farther(self, words: U64, slots: I64, found: I64) -> I64:
        """The same for words that are not in their first slots, where `found` is."""
        numbers = np.full(len(words), -1, dtype=np.int64)
        rows = np.flatnonzero(found >= 0)
        words, slots = words[rows], slots[rows]
        for _ in range(self._reach - 1):
            if not len(rows):
                break
            slots = self._next_slots(slots)
            found = self._table[slots].astype(np.int64)
            hits = self._words[found] == words
            numbers[rows[hits]] = found[hits]
            going = np.flatnonzero(~hits & (found >= 0))
            rows, words, slots = rows[going], words[going], slots[going]
        return numbers


def _encode(words: U64) -> tuple[I64, U64]:
    """Number words in the order in which they come; and the distinct ones."""
    encoded = pa.array(words).dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_numpy()
