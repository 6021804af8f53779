"""When those who found the queue full should come again: from the rate at which places come free.

Pure: times are passed in, in seconds of one monotonic clock.
"""

from __future__ import annotations

import math

_MEMORY_S = 10.0  # busy time after which what was seen counts 1/e
_UNKNOWN_S = 1.0  # before anything was seen
_SHORTEST_S, _LONGEST_S = 0.05, 60.0
_MOST_TURNS = 4  # of all places; promises beyond that are those of clients that never come back


class PlacesComeFree:
    """Measures while all slots are taken; what an idle engine does tells nothing of a busy one."""

    def __init__(self, num_places: int) -> None:
        """`num_places`: all that there are, running and waiting."""
        self._most_promised = _MOST_TURNS * num_places
        self._busy_s = 0.0
        self._ended = 0.0
        self._told_at: float | None = None
        self._promised = 0  # places for those who were sent away, less what came free since

    def note(self, num_ended: int, *, busy: bool, now: float) -> None:
        """So many requests have ended since the last call; `busy`: all slots were taken."""
        self._promised = max(0, self._promised - num_ended) if busy else 0
        if busy and self._told_at is not None:
            elapsed_s = now - self._told_at
            kept = math.exp(-elapsed_s / _MEMORY_S)
            self._busy_s = self._busy_s * kept + elapsed_s
            self._ended = self._ended * kept + num_ended
        self._told_at = now if busy else None

    def retry_after_s(self, num_places: int) -> float:
        """How long one who needs so many places should wait; those sent away before come first,
        but not more of them than _MOST_TURNS says. Each call counts as a promise."""
        self._promised = min(self._promised + num_places, self._most_promised)
        if not self._ended:
            return _UNKNOWN_S
        expected_s = self._promised * self._busy_s / self._ended
        return min(max(expected_s, _SHORTEST_S), _LONGEST_S)
