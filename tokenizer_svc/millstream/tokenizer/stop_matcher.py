"""Stop strings in a text that comes in pieces. Pure: standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from millstream.tokenizer.stop_automaton import stop_automaton


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
        "_automaton", "_ends", "_first_chars", "_held", "_include_stop", "_min_tokens", "_start",
        "_state", "_stop", "match",
    )  # fmt: skip

    def __init__(self, stops: Iterable[str], *, include_stop: bool, min_tokens: int) -> None:
        stops = tuple(stops)
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._automaton = stop_automaton(stops)
        self._state = 0  # the automaton's, after _held
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""  # a proper prefix of some stop string, maybe with matches inside
        self._ends: list[tuple[int, int]] = []  # (end of its text in _held, number) of held tokens
        self._start, self._stop = 0, ""  # the first match inside _held, if there is one
        self.match: StopMatch | None = None

    def push(self, text: str, token_count: int) -> str:
        """Takes the text of token number `token_count`; returns the text that is safe to show."""
        if not text or (not self._held and self._first_chars.isdisjoint(text)):
            return text
        self._look_into(text, counts=token_count >= self._min_tokens)
        text = self._held + text
        self._ends.append((len(text), token_count))
        return self._settle(text, len(text) - self._automaton.open_length[self._state])

    def flush(self) -> str:
        """The held text, after which there is no more."""
        return self._settle(self._held, len(self._held))

    @property
    def waiting_count(self) -> int | None:
        """Where a match that waits for an earlier start ends: its token_count; None without one."""
        return self._token_count_at(self._start + len(self._stop)) if self._stop else None

    def _token_count_at(self, end: int) -> int:
        """The number of the token that brought the held text's character before `end`."""
        return next(number for at, number in self._ends if at >= end)

    def _look_into(self, text: str, *, counts: bool) -> None:
        """Goes on with text behind the held one. Of the matches that end at one place the longest
        starts first; of those with one start the first to end is the shortest."""
        automaton, state = self._automaton, self._state
        for end, char in enumerate(text, len(self._held) + 1):
            state = automaton.step(state, char)
            stop = automaton.found[state]
            if stop and counts and (not self._stop or end - len(stop) < self._start):
                self._start, self._stop = end - len(stop), stop
        self._state = state

    def _settle(self, text: str, open_start: int) -> str:
        """Shows `text` up to the first match, or else up to `open_start`, where the longest end
        starts that is a proper prefix of some stop string; holds the rest."""
        start, stop = self._start, self._stop
        if stop and start <= open_start:
            end = start + len(stop)
            self.match = StopMatch(stop=stop, token_count=self._token_count_at(end))
            self._held = ""
            return text[: end if self._include_stop else start]
        self._held = text[open_start:]
        if open_start:
            self._ends = [(at - open_start, n) for at, n in self._ends if at > open_start]
            self._start -= open_start
        return text[:open_start]
