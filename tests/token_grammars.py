"""A toy for token_masks.Grammars: `GrammarSpec(text="FIRST LAST")` allows FIRST, FIRST + 1, ...
LAST, in this order."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.engine.grammars.token_masks import Grammar, Words
from millstream.engine.request import GrammarSpec


class Counting:
    def __init__(self, first: int, last: int) -> None:
        self._next, self._last = first, last

    def fill(self, row: Words) -> None:
        row[:] = 0
        word, bit = divmod(self._next, 32)
        row[word] = (1 << bit) - (1 << 32 if bit == 31 else 0)

    def accept(self, token_id: int) -> None:
        assert token_id == self._next
        self._next += 1

    @property
    def is_done(self) -> bool:
        return self._next > self._last


class CountingGrammars:
    def start(self, spec: GrammarSpec) -> Counting:
        first, last = map(int, spec.text.split())
        return Counting(first, last)

    def fill_ahead(self, grammars: Sequence[Grammar]) -> None:
        pass
