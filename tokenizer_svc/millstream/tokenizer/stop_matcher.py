"""Stop strings in a text that comes in pieces. Pure: standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """The stop string that ended a text, and the number of the token that completed it."""

    stop: str
    token_count: int


class StopMatcher:
    """Finds the stop string that starts first in a text; of two with one start, the shorter.

    That is a property of the text alone, so neither the order of the strings nor the chunking
    matters: a complete match waits while an earlier start may still complete. A match counts if the
    token that completes it is number `min_tokens` or a later one.
    """

    __slots__ = (
        "_ends", "_first_chars", "_floor", "_held", "_include_stop", "_longest", "_min_tokens",
        "_stops", "match",
    )  # fmt: skip

    def __init__(self, stops: Iterable[str], *, include_stop: bool, min_tokens: int) -> None:
        self._stops = sorted(set(stops), key=lambda stop: (len(stop), stop))
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self._longest = len(self._stops[-1])
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""  # a proper prefix of some stop string, maybe with matches inside
        self._ends: list[tuple[int, int]] = []  # (end of its text in _held, number) of held tokens
        self._floor = 0  # matches that end here or before came too early to count
        self.match: StopMatch | None = None

    def push(self, text: str, token_count: int) -> str:
        """Takes the text of token number `token_count`; returns the text that is safe to show."""
        if not text or (not self._held and self._first_chars.isdisjoint(text)):
            return text
        text = self._held + text
        self._ends.append((len(text), token_count))
        if token_count < self._min_tokens:
            self._floor = len(text)
        return self._settle(text, self._open_start(text))

    def flush(self) -> str:
        """The held text, after which there is no more."""
        return self._settle(self._held, len(self._held))

    @property
    def waiting_count(self) -> int | None:
        """Where a match that waits for an earlier start ends: its token_count; None without one."""
        start, stop = self._first_match(self._held)
        return self._token_count_at(start + len(stop)) if stop else None

    def _token_count_at(self, end: int) -> int:
        """The number of the token that brought the held text's character before `end`."""
        return next(number for at, number in self._ends if at >= end)

    def _settle(self, text: str, open_start: int) -> str:
        """Shows `text` up to the first match, or else up to `open_start`; holds the rest."""
        start, stop = self._first_match(text)
        if stop and start <= open_start:
            end = start + len(stop)
            self.match = StopMatch(stop=stop, token_count=self._token_count_at(end))
            self._held = ""
            return text[: end if self._include_stop else start]
        self._held = text[open_start:]
        if open_start:
            self._ends = [(at - open_start, n) for at, n in self._ends if at > open_start]
            self._floor = max(0, self._floor - open_start)
        return text[:open_start]

    def _first_match(self, text: str) -> tuple[int, str]:
        """Start and string of the first match that counts; the string is empty if there is none."""
        best = (len(text), "")
        for stop in self._stops:  # the shortest first
            at = text.find(stop, max(0, self._floor - len(stop) + 1))
            if 0 <= at < best[0]:
                best = (at, stop)
        return best

    def _open_start(self, text: str) -> int:
        """Where the longest end of `text` starts that is a proper prefix of some stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_chars:
                end = text[start:]
                if any(len(stop) > len(end) and stop.startswith(end) for stop in self._stops):
                    return start
        return len(text)
