"""Latency under an open load, from the records of steps: who arrived when, and when it became visible.

Rows arrive on a schedule, whether or not the flow keeps up: row i at `start + i / rate`. A row is visible from the moment
its step's commit record exists. So the latencies of all rows of a step follow from the range of rows that it read,
and nothing is measured per row: the rows of a range arrived evenly between its first and its last, and their
latencies are spread evenly between those two's. A distribution is thus a mixture of even spreads, weighted by rows,
and its quantiles are exact.

OPEN-1  Latency counts from the scheduled arrival, never from when the flow came round to reading the row. What a flow
        that stands still makes others wait is in the figures.
OPEN-2  What a migration is charged with: every step that was visible after it began and has a row that arrived before it
        ended. Its window lasts until the last of them is visible.
OPEN-3  A steady window is as long, and no step in it has a row that the migration was charged with.

Pure: reads no clock and no file. Must not know: job directories, strategies.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

_NARROW = 1e-6
"""Seconds below which a spread is taken to be this wide: a single row has no width, and a slope needs one."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """When each row arrives: row j of partition p is row `j · partitions + p` of the whole."""

    start: float
    """Unix time."""
    rate: float
    """Rows a second."""
    partitions: int

    def arrival(self, partition: int, index: int) -> float:
        return self.start + (index * self.partitions + partition) / self.rate


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of one partition that one step made visible, which arrived evenly between `first` and `last`."""

    visible: float
    first: float
    last: float
    rows: float
    """A fraction where a span was cut in time."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One step: when its commit record appeared, how long it lasted, and its rows of the scheduled input."""

    step: int
    visible: float
    seconds: float
    layout: int
    spans: tuple[Span, ...]

    @property
    def rows(self) -> float:
        return sum(span.rows for span in self.spans)

    @property
    def first(self) -> float:
        """The earliest arrival; that of nobody where it has no rows."""
        return min((span.first for span in self.spans), default=float("inf"))

    @property
    def highest(self) -> float:
        """The highest latency of its rows; 0 where it has none."""
        return max((self.visible - span.first for span in self.spans), default=0.0)


def seen(record: Mapping[str, Any], visible: float, schedule: Schedule, name: str) -> Seen:
    """A step as `anabranch steps --json` describes it; `name` is the scheduled input."""
    ranges = record["inputs"].get(name, {"ranges": ()})["ranges"]
    spans = []
    for one in ranges:
        partition, start, end = int(one["partition"]), one["start"], one["end"]
        first, last = schedule.arrival(partition, start), schedule.arrival(partition, end - 1)
        spans.append(Span(visible, first, last, end - start))
    return Seen(record["step"], visible, record["seconds"], record["layout"], tuple(spans))


class Latencies:
    """The latencies of many rows, as a mixture of even spreads.

    >>> one_second = Latencies([Span(visible=11.0, first=10.0, last=11.0, rows=100)])
    >>> one_second.quantile(0.9), one_second.above(0.75)
    (0.9, 0.25)
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        kept = [span for span in spans if span.rows]
        lows = np.array([span.visible - span.last for span in kept])
        highs = np.maximum(np.array([span.visible - span.first for span in kept]), lows + _NARROW)
        rows = np.array([span.rows for span in kept], dtype=np.float64)
        self.rows = float(rows.sum())
        slopes = rows / (highs - lows)
        places = np.concatenate([lows, highs])
        order = np.argsort(places, kind="stable")
        # The number of rows up to x is made of straight lines, which bend where a spread begins or ends.
        bends = np.concatenate([slopes, -slopes])[order]
        self._at = places[order]
        grown = np.cumsum(bends)[:-1] * np.diff(self._at)
        self._share = np.concatenate([[0.0], np.cumsum(grown)]) / self.rows if kept else np.zeros(0)

    def quantile(self, share: float) -> float:
        """The latency that this share of rows does not exceed; nan where there are no rows."""
        if not self.rows:
            return float("nan")
        return round(float(np.interp(share, self._share, self._at)), 6)

    def above(self, seconds: float) -> float:
        """The share of rows with a latency above this."""
        if not self.rows:
            return float("nan")
        return round(1 - float(np.interp(seconds, self._at, self._share, left=0.0, right=1.0)), 9)

    def ccdf(self, points: int = 200) -> list[tuple[float, float]]:
        """(latency, share of rows above it), evenly over the logarithm of the share and the latency alike."""
        if not self.rows:
            return []
        least = max(1 / self.rows, 1e-6)
        shares = np.concatenate([np.linspace(1, 0.1, points // 2), np.geomspace(0.1, least, points // 2)])
        return [(self.quantile(1 - share), round(float(share), 9)) for share in shares]


@dataclass(frozen=True, slots=True)
class Bin:
    """A slice of time: the rows that arrived in it."""

    at: float
    """Seconds since the schedule's start."""
    rows: float
    p50: float
    p90: float
    p99: float
    highest: float


def timeline(steps: Sequence[Seen], schedule: Schedule, width: float = 0.25) -> list[Bin]:
    """Percentiles of latency for each slice of arrival time.

    By arrival, every slice has as many rows, also those in which nothing became visible: an outage shows as the slope of
    those who wait for its end.
    """
    parts: dict[int, list[Span]] = {}
    for step in steps:
        for span in step.spans:
            for number, part in _cut(span, schedule.start, width):
                parts.setdefault(number, []).append(part)
    bins = []
    for number in sorted(parts):
        found = Latencies(parts[number])
        highest = max(part.visible - part.first for part in parts[number])
        bins.append(
            Bin(
                round(number * width, 6), round(found.rows, 1), found.quantile(0.5), found.quantile(0.9),
                found.quantile(0.99), round(highest, 6),
            )
        )  # fmt: skip
    return bins


def _cut(span: Span, start: float, width: float) -> Iterable[tuple[int, Span]]:
    """The parts of a span that arrived in each slice; rows in proportion."""
    first, last = int((span.first - start) // width), int((span.last - start) // width)
    if first == last:
        yield first, span
        return
    length = span.last - span.first
    for number in range(first, last + 1):
        low = max(span.first, start + number * width)
        high = min(span.last, start + (number + 1) * width)
        rows = span.rows * (high - low) / length
        if rows > 0:
            yield number, Span(span.visible, low, high, rows)


@dataclass(frozen=True, slots=True)
class Judged:
    """A migration against the steady windows around it."""

    began: float
    ended: float
    """When the last step that it is charged with was visible (OPEN-2)."""
    highest: float
    """The highest latency in it."""
    before: float
    after: float
    """The highest in an equally long window before, and one after; nan where the run does not reach that far."""
    kept: float
    """Rows that became visible in it / rows that arrived in it."""
    lowest: float
    """The same of its worst whole second; of all of it, where it is shorter."""
    silent: float
    """The longest time without output that overlaps it."""
    longest_step: float

    @property
    def steady(self) -> float:
        return float(np.nanmax([self.before, self.after]))

    @property
    def ratio(self) -> float:
        return self.highest / self.steady


def judge(
    steps: Sequence[Seen], schedule: Schedule, began: float, ended: float, settle: float = 2.0
) -> Judged:
    """Compare a migration from `began` to `ended` with the steady load around it.

    Args:
        steps: of the whole run, in order.
        schedule: when rows arrived.
        began, ended: of the migration, as Unix times.
        settle: seconds between the last step that it is charged with and the window after it.

    Raises:
        ValueError: no step was visible in it, or there is no steady window on either side.
    """
    charged = [step for step in steps if step.visible >= began and step.first <= ended]
    if not charged:
        raise ValueError(f"no step became visible after the migration that began at {began}")
    over = max(ended, charged[-1].visible)
    length = over - began
    first, last = steps[0].visible, steps[-1].visible
    after = over + settle
    windows = [
        _highest(steps, began - length, began) if began - length >= first else float("nan"),
        _highest(steps, after, after + length) if after + length <= last else float("nan"),
    ]
    if all(np.isnan(windows)):
        raise ValueError(
            f"the migration took {length:.1f} s, and the run has no steady window of that length before or after it"
        )
    return Judged(
        began=began,
        ended=over,
        highest=max(step.highest for step in charged),
        before=windows[0],
        after=windows[1],
        kept=_kept(steps, schedule, began, over),
        lowest=min(_kept(steps, schedule, low, high) for low, high in _seconds(began, over)),
        silent=silence([step.visible for step in steps], began, over),
        longest_step=max(step.seconds for step in charged),
    )


def silence(visible: Sequence[float], began: float, ended: float) -> float:
    """The longest time between two outputs that overlaps this span of time; 0 where there are not two."""
    return max(
        (later - earlier for earlier, later in pairwise(visible) if later > began and earlier < ended),
        default=0.0,
    )


def _highest(steps: Sequence[Seen], low: float, high: float) -> float:
    """The highest latency of steps that were visible in [low, high); nan where there are none."""
    times = [step.visible for step in steps]
    inside = steps[bisect_left(times, low) : bisect_left(times, high)]
    return max((step.highest for step in inside), default=float("nan"))


def _kept(steps: Sequence[Seen], schedule: Schedule, low: float, high: float) -> float:
    shown = sum(step.rows for step in steps if low < step.visible <= high)
    return shown / (schedule.rate * (high - low))


def _seconds(low: float, high: float) -> list[tuple[float, float]]:
    whole = int(high - low)
    return [(low + second, low + second + 1) for second in range(whole)] or [(low, high)]
