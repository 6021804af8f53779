"""Where the seconds of a start go: parts of it that follow one another, each with a name."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from millstream.engine.plan import Phase


class Phases:
    """The phases of one thread's work so far; each begins where the one before ended."""

    def __init__(self, began_s: float | None = None) -> None:
        """began_s: when the first begins, on time.monotonic()'s clock; default: now."""
        self.began_s = time.monotonic() if began_s is None else began_s
        self._ended_s = self.began_s
        self._phases: list[Phase] = []

    def end(self, name: str) -> None:
        """What was done since the last call, or since the beginning, has this name."""
        self.include([(name, time.monotonic() - self._ended_s)])

    def include(self, phases: Sequence[Phase]) -> None:
        """Phases that somebody else measured, from where the last one ended."""
        self._phases += phases
        self._ended_s += sum(seconds for _, seconds in phases)

    def so_far(self) -> tuple[Phase, ...]:
        return tuple(self._phases)

    def __str__(self) -> str:
        """One line: the seconds in all, then those of each phase that took any."""
        parts = [f"{name} {seconds:.2f}" for name, seconds in self._phases if seconds >= 0.005]
        return f"{self._ended_s - self.began_s:.2f} s ({', '.join(parts)})"


def process_start_s() -> float:
    """When this process began, on time.monotonic()'s clock, to 10 ms; where the system does not
    tell, now."""
    now_s = time.monotonic()
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # since the machine's start
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
        return now_s - max(age_s, 0.0)
    return now_s
