"""Progress of long steps: a callback, and its usual implementation on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

# Called with (step, done, total), both in bytes, from the thread that does the work. A step begins
# at its first call and is over when done == total; a step without a size says (step, 0, 0) once.
OnProgress = Callable[[str, int, int], None]

_LINE_INTERVAL_S = 5.0


def silent(step: str, done: int, total: int) -> None:
    """Shows nothing."""


class StderrProgress:
    """An OnProgress: a tqdm bar per step on a terminal, otherwise a plain line now and then."""

    def __init__(self) -> None:
        self._step = ""
        self._bar: Any = None
        self._last_line_s = 0.0

    def __call__(self, step: str, done: int, total: int) -> None:
        if total == 0:
            self._say(step)
            return
        begins = step != self._step
        self._step = step if done < total else ""
        if sys.stderr.isatty():
            self._draw(step, done, total, begins)
        elif begins or done >= total or time.monotonic() - self._last_line_s > _LINE_INTERVAL_S:
            self._last_line_s = time.monotonic()
            self._say(f"{step}: {done / 1e6:.0f} of {total / 1e6:.0f} MB")

    def _say(self, line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    def _draw(self, step: str, done: int, total: int, begins: bool) -> None:
        if begins:
            from tqdm import tqdm

            self.close()
            self._bar = tqdm(desc=step, total=total, unit="B", unit_scale=True, file=sys.stderr)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self.close()

    def close(self) -> None:
        """Ends a bar that an error left unfinished."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
