"""What a pass costs, by its number of rows, learned from passes that were timed."""

from __future__ import annotations

from bisect import bisect_left

_STEADY = 0.001
"""What a new time counts at least in a pass's cost: next to nothing, for what moves after so many is the machine, with all its passes."""
_SETTLED, _BOUND = 8, 1.05
"""After so many measurements a new one counts as so many times the mean at most, or as much less: while the machine turns fast or slow,
times say little of costs, and noise is as often above the mean as below."""
_EXACT = 64
"""Passes of up to so many rows are kept apart by their number; larger ones in buckets, each a quarter wider than the one before."""


def moved(mean: float, new: float, step: float, bound: float = 3.0) -> float:
    """Return the mean (geometric, for the machine's speed is a factor) with a new measurement that counts `step` in it.

    A pass that was held up (another process, a page fault) says little about the next one: it counts as `bound` times the mean at most.
    """
    return float(mean * min(max(new / mean, 1 / bound), bound) ** step) if mean > 0 else new


class Cost:
    """Seconds that something takes, by its number of rows: a mean for each number, lines between.

    A mean is of all its measurements alike, until one would count less than `least` in it. steady: it is not expected to move by itself.
    """

    def __init__(self, least: float = _STEADY, *, steady: bool = True) -> None:
        self._least = least
        self._steady = steady
        self._rows: list[int] = []
        self._means: list[float] = []
        self._counts: list[int] = []  # measurements of each
        self._seconds: list[float] = []  # the means, or what more rows cost where that is less

    def add(self, rows: int, seconds: float) -> None:
        bucket = rows
        if rows > _EXACT:
            bucket = _bucket(rows)
            seconds *= bucket / rows
        rows_, means, counts, known = self._rows, self._means, self._counts, self._seconds
        at = bisect_left(rows_, bucket)
        if at < len(rows_) and rows_[at] == bucket:
            counts[at] += 1
            bound = _BOUND if self._steady and counts[at] > _SETTLED else 3.0
            means[at] = moved(means[at], seconds, max(1 / counts[at], self._least), bound)
        else:
            rows_.insert(at, bucket)
            means.insert(at, seconds)
            counts.insert(at, 1)
            known.insert(at, seconds)
        first = at
        while at >= 0:
            least = means[at]
            if at + 1 < len(rows_) and known[at + 1] < least:
                least = known[at + 1]
            if least == known[at] and at != first:
                break
            known[at] = least
            at -= 1

    def mean(self, rows: int) -> float | None:
        """What passes of so many rows took themselves; None where none was measured."""
        at = bisect_left(self._rows, bucket := _bucket(rows))
        return self._means[at] * rows / bucket if at < len(self._rows) and self._rows[at] == bucket else None

    def slope(self, rows: int, most: int) -> float | None:
        """Seconds of a further row, on the way from `rows` to as many rows up to `most` as were measured; None where none were."""
        further = self._rows[bisect_left(self._rows, most + 1) - 1] if self._rows and self._rows[0] <= most else 0
        return max(0.0, self.of(further) - self.of(rows)) / (further - rows) if further > rows else None

    def of(self, rows: float) -> float:
        """Expected seconds: between what was measured, by lines; beyond it, on the line from the first to the last; 0 where nothing was."""
        if rows <= 0 or not self._rows:
            return 0.0
        at = bisect_left(self._rows, rows)
        if at == len(self._rows):
            first, least = (self._rows[0], self._seconds[0]) if at > 1 else (0, 0.0)
            row = (self._seconds[-1] - least) / (self._rows[-1] - first)
            return self._seconds[-1] + row * (rows - self._rows[-1])
        if at == 0 or self._rows[at] == rows:
            return self._seconds[at]
        low, high = self._rows[at - 1], self._rows[at]
        return self._seconds[at - 1] + (self._seconds[at] - self._seconds[at - 1]) * (rows - low) / (high - low)


def _bucket(rows: int) -> int:
    bucket = _EXACT
    if rows <= bucket:
        return rows
    while bucket < rows:
        bucket += bucket // 4
    return bucket
