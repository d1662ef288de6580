"""Files of lines (text, CSV, JSON lines) that may grow while they are read.

A position is a byte offset at the beginning of a line.  What a file has to offer ends after its last line
end; a last line without one is offered when the file has not been touched for `settle` seconds.  (If such
a line is continued after that, its continuation is a record of its own.)

A slice carries checksums of the first bytes of the file and of the bytes before its own end.  A file that was
truncated, rewritten or replaced by another is noticed by them; a faithful copy on another host is not,
which an inode number would refuse.

Must not know: steps, workers, flows.
"""

from __future__ import annotations

import os
import time
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Any, cast

import polars as pl

from anabranch.connect.decode import Bad, Decoder
from anabranch.connect.filesource import FileSource
from anabranch.connect.lines import Lines, drop
from anabranch.connect.listing import Listing
from anabranch.connect.source import Available, OnBad, Slice, even_bounds, with_weight
from anabranch.errors import InputChangedError
from anabranch.model.batch import WEIGHT
from anabranch.model.ids import PartitionId

_BLOCK = 8 << 20
"""Bytes decoded at once: bounds memory, and 8 MB amortise the fixed cost of the kernels."""
_SAMPLE = 64 << 10
_MARK = 512
"""Bytes under each checksum of a slice."""
_WATCHED = 512
"""Files looked at in every poll, a few µs each; beyond that, quiet files take turns."""
_QUIET = 60.0
"""Seconds without growth after which a file is quiet."""
_BOM = b"\xef\xbb\xbf"


@dataclass(slots=True)
class _Growth:
    """What is known of one file.  `end` ≤ `size`; they differ while the last line has no end."""

    size: int = 0
    end: int = 0


class LineFiles(FileSource):
    """A directory of growing files whose records are lines."""

    def __init__(
        self, listing: Listing, schema: Mapping[str, pl.DataType], weight: str | None, settle: float
    ) -> None:
        super().__init__(listing, schema, weight, settle)
        self._read_schema = {**self.schema, weight: pl.Int64()} if weight else dict(self.schema)
        self._growth: dict[str, _Growth] = {}
        self._growing: dict[str, float] = {}
        """Files that grew or have an unfinished line, and when that was last seen."""
        self._turn = 0
        self._width = 0.0
        """Mean bytes of a line as last sampled; 0 before the first sample."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_growth": {}, "_growing": {}}

    _preamble = False
    """Whether a file's first line is no record."""

    # The driver's half.

    def discover(self, positions: Mapping[PartitionId, int]) -> list[Available]:
        # Calling a NewType for each of thousands of names would cost as much as the rest of an idle poll.
        at = cast(Mapping[str, int], positions)
        fresh: list[str] = []
        if self._listing.refresh():
            known = self._growth
            fresh = [name for name in self._listing.names if name not in known]
            self._growth = {name: known.pop(name, _Growth()) for name in self._listing.names}
            for name, growth in known.items():
                self._growing.pop(name, None)
                self._vanished(name, growth, at)
        now = time.time()
        for name in self._due(fresh, now):
            self._look(name, now, at)
        found = []
        for name, growth in self._growth.items():
            start = at.get(name, 0)
            if start < growth.end:
                size = growth.end - start
                rows = max(1, round(size / self._line_width(name)))
                found.append(Available(PartitionId(name), start, growth.end, rows, size))
            elif start > growth.size:
                raise InputChangedError(
                    f"input file {self.path_of(name)}: {start} bytes were read of it, and now it has "
                    f"{growth.size}; files may only grow: restore it, or add new data as a new file"
                )
        return found

    def pending(self) -> bool:
        return any(growth.end < growth.size for growth in self._growth.values())

    def _due(self, fresh: list[str], now: float) -> list[str]:
        """The files to look at: all if they are few, else new and growing ones, and some that are quiet."""
        names = self._listing.names
        if len(names) <= _WATCHED:
            return names
        self._growing = {name: since for name, since in self._growing.items() if now - since < _QUIET}
        start = self._turn % len(names)
        self._turn = start + _WATCHED
        turn = names[start : self._turn] + names[: max(0, self._turn - len(names))]
        return list(dict.fromkeys([*fresh, *self._growing, *turn]))

    def _look(self, name: str, now: float, positions: Mapping[str, int]) -> None:
        growth = self._growth[name]
        try:
            stat = os.stat(f"{self._listing.base}/{name}")
        except FileNotFoundError:
            self._vanished(name, growth, positions)
            growth.size = growth.end = positions.get(name, 0)
            return
        if stat.st_size == growth.size and growth.end == growth.size:
            return
        if stat.st_size != growth.size:
            begin = min(growth.end, stat.st_size)
            growth.end = self._last_line_end(name, begin, stat.st_size)
            if growth.size:
                self._growing[name] = now
        growth.size = stat.st_size
        if growth.end < growth.size:
            self._growing[name] = now
            if now - stat.st_mtime >= self._settle:
                growth.end = growth.size

    def _vanished(self, name: str, growth: _Growth, positions: Mapping[str, int]) -> None:
        if positions.get(name, 0) < growth.end:
            raise InputChangedError(
                f"input file {self.path_of(name)} vanished before it was read to its end; put it back"
            )

    def _last_line_end(self, name: str, low: int, high: int) -> int:
        """The offset after the last LF in [low, high), or `low`."""
        with open(self.path_of(name), "rb") as file:
            while high > low:
                begin = max(low, high - _SAMPLE)
                file.seek(begin)
                at = file.read(high - begin).rfind(b"\n")
                if at >= 0:
                    return begin + at + 1
                high = begin
        return low

    def _line_width(self, name: str) -> float:
        if not self._width:
            with open(self.path_of(name), "rb") as file:
                self._measure(file.read(_SAMPLE))
        return self._width

    def _measure(self, sample: bytes) -> float:
        self._width = len(sample) / max(1, sample.count(b"\n"))
        return self._width

    def cut(self, available: Available, rows: int, size: int) -> Slice:
        start, end = available.start, available.end
        with self._open(available.partition) as file:
            file.seek(start)
            sample = file.read(min(_SAMPLE, end - start))
            lines = sample.count(b"\n")
            width = self._measure(sample)
            if lines < rows:
                target = start + min(size, int(rows * width))
            else:
                ends = Lines.split(sample).starts[1:]
                target = start + min(size, int(ends[rows - 1]) if rows <= len(ends) else len(sample))
            cut = end if target >= end else _line_end_near(file, start, max(target, start + 1), end)
            if start == 0 and self._preamble and cut < end:
                first = _next_line_end(file, 0, end)
                cut = cut if cut > first else _next_line_end(file, first, end)
            extra = {"head": _mark(file, 0, min(_MARK, cut)), "tail": _mark(file, max(0, cut - _MARK), cut)}
        count = max(1, round((cut - start) / width))
        return Slice(available.partition, start, cut, count, cut - start, extra)

    def split(self, piece: Slice, parts: int) -> list[Slice]:
        if parts < 2 or piece.end - piece.start < 2:
            return [piece]
        bounds = [piece.start]
        with self._open(piece.partition) as file:
            for _, target in even_bounds(piece.start, piece.end, parts)[:-1]:
                if target > bounds[-1]:
                    at = _next_line_end(file, target - 1, piece.end)
                    if bounds[-1] < at < piece.end:
                        bounds.append(at)
        bounds.append(piece.end)
        scale = piece.rows / (piece.end - piece.start)
        return [
            Slice(piece.partition, low, high, max(1, round((high - low) * scale)), high - low, piece.extra)
            for low, high in pairwise(bounds)
        ]

    # The worker's half.

    @abstractmethod
    def _decoder(self, file: IO[bytes], partition: PartitionId) -> tuple[Decoder, int]:
        """How to decode the file's lines, and where its first record begins."""

    def read(self, piece: Slice, on_bad: OnBad) -> Iterator[pl.DataFrame]:
        with self._open(piece.partition) as file:
            self._check(file, piece)
            decoder, first = self._decoder(file, piece.partition)
            lines_at = _LineNumbers(file)
            for offset, data in self._blocks(file, piece, max(piece.start, first)):
                frame, complaints = self._decode(decoder, data)
                for at, record, reason in complaints:
                    number = lines_at(offset + at)
                    on_bad(f"input file {self.path_of(piece.partition)} line {number}", record, reason)
                yield frame

    def _decode(self, decoder: Decoder, data: bytes) -> tuple[pl.DataFrame, list[tuple[int, str, str]]]:
        """A frame of good rows, and (offset, record, reason) of each bad line, in order."""
        lines = Lines.split(data)
        complaints = []
        if invalid := lines.invalid_utf8():
            complaints = _complaints(lines, [Bad(i, "not valid UTF-8") for i in invalid])
            lines = drop(lines, invalid).compact()
        frame, bad = decoder.decode(lines)
        complaints += _complaints(lines, bad)
        if self._weight is None:
            return with_weight(frame), sorted(complaints)
        return frame.rename({self._weight: WEIGHT}).select(*self.schema, WEIGHT), sorted(complaints)

    def _blocks(self, file: IO[bytes], piece: Slice, start: int) -> Iterator[tuple[int, bytes]]:
        """The slice's bytes as (offset, whole lines)."""
        file.seek(start)
        rest = b""
        at = start
        while at + len(rest) < piece.end:
            data = file.read(min(_BLOCK, piece.end - at - len(rest)))
            if not data:
                raise self._changed(piece, "it became shorter while it was read")
            data = rest + data
            done = at + len(data) == piece.end
            stop = len(data) if done else data.rfind(b"\n") + 1
            if stop:
                yield at, data[:stop]
            rest, at = data[stop:], at + stop

    def _check(self, file: IO[bytes], piece: Slice) -> None:
        size = os.fstat(file.fileno()).st_size
        if size < piece.end:
            raise self._changed(
                piece, f"it has {size} bytes, and {piece.end} were there when it was recorded"
            )
        for mark in (piece.extra["head"], piece.extra["tail"]):
            if _mark(file, mark[0], mark[1]) != mark:
                raise self._changed(piece, "its content is not what was recorded")

    def _open(self, partition: PartitionId) -> IO[bytes]:
        try:
            return open(self.path_of(partition), "rb")
        except FileNotFoundError:
            raise InputChangedError(
                f"input file {self.path_of(partition)} vanished after it was recorded; put it back"
            ) from None

    def _changed(self, piece: Slice, what: str) -> InputChangedError:
        return InputChangedError(
            f"input file {self.path_of(piece.partition)} changed: {what}; files may only grow: restore it, "
            "or add new data as a new file"
        )


class _LineNumbers:
    """Line numbers of growing offsets, by counting line ends from the file's beginning; only complaints
    pay."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._at = 0
        self._count = 1

    def __call__(self, offset: int) -> int:
        back = self._file.tell()
        self._file.seek(self._at)
        while self._at < offset:
            data = self._file.read(min(_BLOCK, offset - self._at))
            self._count += data.count(b"\n")
            self._at += len(data) or offset
        self._file.seek(back)
        return self._count


def skip_bom(file: IO[bytes]) -> int:
    """Where a file's text begins: 3 when it has a byte order mark, else 0."""
    file.seek(0)
    return len(_BOM) if file.read(len(_BOM)) == _BOM else 0


def _complaints(lines: Lines, bad: list[Bad]) -> list[tuple[int, str, str]]:
    return [(int(lines.offsets[i]), lines.line(i).decode(errors="replace"), reason) for i, reason in bad]


def _mark(file: IO[bytes], start: int, end: int) -> list[int]:
    file.seek(start)
    return [start, end, zlib.crc32(file.read(end - start))]


def _next_line_end(file: IO[bytes], start: int, end: int) -> int:
    """The offset after the first LF at or after `start`, or `end`."""
    file.seek(start)
    while start < end:
        data = file.read(min(_SAMPLE, end - start))
        at = data.find(b"\n")
        if at >= 0:
            return start + at + 1
        if not data:
            break
        start += len(data)
    return end


def _line_end_near(file: IO[bytes], start: int, target: int, end: int) -> int:
    """The last line end in (start, target], or else the first one after."""
    begin = max(start, target - _SAMPLE)
    file.seek(begin)
    at = file.read(target - begin).rfind(b"\n")
    return begin + at + 1 if at >= 0 else _next_line_end(file, target, end)
