"""How far a benchmark is."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

_BAR_EVERY_S = 0.25
_LINE_EVERY_S = 10.0


class Progress:
    """Requests that have ended and tokens that came, on stderr: a bar where that is a terminal,
    otherwise a line now and then."""

    def __init__(self, *, shown: bool = True, line_every_s: float = _LINE_EVERY_S) -> None:
        self._shown = shown
        self._is_terminal = sys.stderr.isatty()
        self._every_s = _BAR_EVERY_S if self._is_terminal else line_every_s
        self._bar: Any = None
        self._load: tuple[str, int] | None = None  # its name, and how many requests it has
        self._num_ended = self._num_tokens = 0
        self._due_s = 0.0

    def note(self, *, num_tokens: int = 0, num_ended: int = 0) -> None:
        """What has come since the last call."""
        self._num_tokens += num_tokens
        self._num_ended += num_ended
        if self._load is not None and (now_s := time.monotonic()) >= self._due_s:
            self._due_s = now_s + self._every_s
            self._tell(*self._load)

    @contextlib.contextmanager
    def of(self, name: str, total: int) -> Iterator[None]:
        if not self._shown:
            yield
            return
        self._num_ended = self._num_tokens = 0
        self._due_s = time.monotonic() + self._every_s
        self._load = name, total
        with self._open_bar(name, total):
            yield
        self._load = None

    @contextlib.contextmanager
    def _open_bar(self, name: str, total: int) -> Iterator[None]:
        if not self._is_terminal:
            yield
            return
        from tqdm import tqdm

        with tqdm(total=total, desc=name, unit="request", leave=False) as self._bar:
            yield
        self._bar = None

    def _tell(self, name: str, total: int) -> None:
        tokens = f"{self._num_tokens:,} tokens"
        if self._bar is None:
            sys.stderr.write(f"{name}: {self._num_ended} of {total} requests, {tokens}\n")
        else:
            self._bar.n = self._num_ended
            self._bar.set_postfix_str(tokens)
