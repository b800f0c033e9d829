"""How often streams may send: each event costs time in every process on its way to the client, whatever it carries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_SHORTEST = 0.001  # seconds: a timer costs more than it would save in less


class Rhythm:
    """The time between two events of a stream, in which its tokens gather.

    interval: seconds, for a stream among few; events_per_s: most of all streams together: among many each waits longer.
    """

    def __init__(self, interval: float, events_per_s: float) -> None:
        self._interval = interval
        self._events_per_s = events_per_s
        self._streams = 0

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream in, as long as the block runs."""
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    def pause(self) -> float:
        """Return the seconds that lie between two events of each stream now; 0 sends every step's tokens."""
        pause = max(self._interval, self._streams / self._events_per_s)
        return pause if pause >= _SHORTEST else 0.0
