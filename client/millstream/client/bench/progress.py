"""How far a benchmark is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class Progress:
    """A bar of requests that have ended, on stderr, where that is a terminal."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._bar: Any = None

    def done(self, count: int = 1) -> None:
        if self._bar is not None and count:
            self._bar.update(count)

    @contextlib.contextmanager
    def of(self, name: str, total: int) -> Iterator[None]:
        if not self._shown:
            yield
            return
        from tqdm import tqdm

        with tqdm(total=total, desc=name, unit="request", leave=False) as self._bar:
            yield
        self._bar = None
