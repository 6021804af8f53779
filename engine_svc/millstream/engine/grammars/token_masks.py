"""Which token ids a sequence may sample next, as packed bits; on the host.

Bit j of word i says whether id 32 * i + j may be sampled. What narrows the choice: a grammar,
allowed_token_ids, min_tokens (no stop id yet) and bad words, in this order; one that would leave no
id does not count for that token.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from millstream.engine.grammars.errors import GrammarError
from millstream.engine.plan import SlotStart
from millstream.engine.request import GrammarSpec

Words = npt.NDArray[np.int32]


class Grammar(Protocol):
    """How far one sequence has come in what its output must be."""

    def fill(self, row: Words) -> None:
        """Writes the bits of the ids that may come next: [ceil(vocab_size / 32)]. Raises
        GrammarError when it cannot go on, and so may accept."""

    def accept(self, token_id: int) -> None:
        """The sequence got a token, which `fill` allowed."""

    @property
    def is_done(self) -> bool:
        """Nothing may follow; `fill` and `accept` are not called any more."""


class Grammars(Protocol):
    """Makes grammars; one for an engine."""

    def start(self, spec: GrammarSpec) -> Grammar:
        """A grammar at its beginning; one that cannot start says so when it is used."""

    def fill_ahead(self, grammars: Sequence[Grammar]) -> None:
        """Tells that `fill` is about to be called on each: what it takes may be done together."""


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def pack(token_ids: Collection[int], vocab_size: int) -> Words:
    """The mask that allows just these ids."""
    bits = np.zeros(num_words(vocab_size) * 32, dtype=bool)
    bits[np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))] = True
    return np.packbits(bits, bitorder="little").view("<i4")


def everything(vocab_size: int) -> Words:
    """The mask that allows every id, and no bit beyond the vocabulary."""
    words = np.full(num_words(vocab_size), -1, dtype="<i4")
    if vocab_size % 32:
        words[-1] = (1 << vocab_size % 32) - 1
    return words


class SlotMask:
    """The mask of the sequence in one slot."""

    def __init__(self, start: SlotStart, vocab_size: int, grammar: Grammar | None) -> None:
        """A grammar must be new: it is told the output so far."""
        sampling = start.sampling
        prompt_len = start.min_position - sampling.min_tokens
        self._vocab_size = vocab_size
        self._min_position = start.min_position
        self._grammar = grammar
        self._all = everything(vocab_size)
        self._allowed = self._none_but(sampling.allowed_token_ids)
        self._no_ends = self._all_but(start.banned_token_ids)
        self._never = [word[0] for word in sampling.bad_words if len(word) == 1]
        # Longer ones: their last ids, by what comes before; that by its own last id and its length.
        self._endings: dict[int, dict[int, defaultdict[tuple[int, ...], list[int]]]] = {}
        longest = 0
        for *before, last in sampling.bad_words:
            if before:
                by_length = self._endings.setdefault(before[-1], {})
                endings = by_length.setdefault(len(before), defaultdict(list))
                endings[tuple(before)].append(last)
                longest = max(longest, len(before))
        self._recent: deque[int] = deque(maxlen=longest)  # of the output
        self.follows = sampling.follows_tokens
        self.problem = ""  # why the grammar cannot be followed any more: the sequence must end
        # The row made last, and what of.
        self._key: tuple[bool, tuple[int, ...]] | None = None
        self._row = self._all
        if self.follows:
            for token_id in start.token_ids[prompt_len:]:
                self.accept(token_id)

    def accept(self, token_id: int) -> None:
        """The sequence got a token. Needed only if it `follows` tokens."""
        self._recent.append(token_id)
        if self._grammar is not None and not self._grammar.is_done:
            try:
                self._grammar.accept(token_id)
            except GrammarError as error:
                self._give_up(error)

    def _give_up(self, error: GrammarError) -> None:
        self.problem = str(error) or "its grammar cannot be followed"
        self._grammar = None

    @property
    def grammar(self) -> Grammar | None:
        """What `row` will ask, if it will."""
        return self._grammar if self._grammar and not self._grammar.is_done else None

    def narrows(self, position: int) -> bool:
        """Whether some id may not be sampled as the token at `position` (in prompt + output), or at
        a later one."""
        early = position < self._min_position and self._no_ends is not None
        return early or self.follows or self._allowed is not None or bool(self._never)

    def row(self, position: int) -> Words:
        """The mask of the token at `position`; the same object as the last time if nothing has
        changed since. All tokens before are accepted, if it follows them."""
        early = position < self._min_position
        bad = (*self._never, *self._completions())
        grammar = self.grammar
        if grammar is None and self._key == (early, bad):
            return self._row
        row = self._all
        if grammar is not None:
            row = self._fill(grammar)
        row = _both(row, self._allowed)
        row = _both(row, self._no_ends if early else None)
        self._row = _both(row, self._all_but(bad))
        self._key = (early, bad) if grammar is None else None
        return self._row

    def _fill(self, grammar: Grammar) -> Words:
        row = np.empty_like(self._all)
        try:
            grammar.fill(row)
        except GrammarError as error:
            self._give_up(error)
            return self._all
        return _both(self._all, row)

    def _completions(self) -> tuple[int, ...]:
        """The ids that would complete a bad word."""
        recent = self._recent
        if not recent or recent[-1] not in self._endings:
            return ()
        output = tuple(recent)
        found: list[int] = []
        for length, endings in self._endings[output[-1]].items():
            found += endings.get(output[-length:], ())
        return tuple(found)

    def _none_but(self, token_ids: Collection[int]) -> Words | None:
        return pack(token_ids, self._vocab_size) if token_ids else None

    def _all_but(self, token_ids: Collection[int]) -> Words | None:
        return self._all & ~pack(token_ids, self._vocab_size) if token_ids else None


def _both(row: Words, other: Words | None) -> Words:
    """What both allow, or the row as it is if that is nothing."""
    if other is None:
        return row
    narrowed = row & other
    return narrowed if narrowed.any() else row
