"""Structured output: which token ids a grammar allows next, from llguidance.

A `GrammarSpec` is compiled against the model's vocabulary once (`compile_grammar`); each request
then walks a copy of its own (`GrammarState`): fill a mask, sample, accept, and so on to the end.
What the library needs and why it was chosen: docs/decisions/0009-structured-output.md.

The library's limits do not bound everything that a hostile grammar can do: checker.py
compiles what nobody has compiled yet in a process that may die of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from millstream.engine.grammars.errors import GrammarError, VocabularyError
from millstream.engine.grammars.library_grammar import library_grammar, one_line
from millstream.engine.request import GrammarSpec

MaskRow = npt.NDArray[np.int32]  # [ceil(V/32)]: bit j of word i is the token id 32*i + j

# The library's own limits where they are not its defaults. A state takes 1 to 2 kB, and there are
# ever more of them while a grammar is walked; errors do not quote the grammar.
_LIMITS = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)
_NOTHING_MATCHES = "NoExtension"  # how the library says that there is no way on
_WORN_OUT = "lexer error"  # and that a lexer is at a limit, for good: the walk's, or all walks'
_TOO_MUCH_AT_ONCE = "too many expressions"  # of one step
# What a walk may take of the engine's loop, which all requests wait for: a mask of a usual grammar
# takes 40 us, one of an ambiguous grammar more with each token, in the end tenths of a second.
_ALLOWED_S, _ALLOWED_PER_TOKEN_S = 0.5, 0.004  # of processor time
_SLOW_TOGETHER_S = 0.02  # hundreds of usual rows that are filled together take less
_FEWEST_SHARING = 3  # walks that are worth a spare lexer: a trial, and those of two requests


def load_vocabulary(
    tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]
) -> LLTokenizer:
    """The vocabulary of a tokenizer.json as the library wants it. Ids from the tokenizer's size up
    to `vocab_size` stand for no text: no grammar ever allows them.

    Takes 0.2 s for 50,000 tokens, holding the GIL. Raises VocabularyError.
    """
    try:
        return LLTokenizer(str(tokenizer_file), n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except ValueError as error:
        raise VocabularyError(f"tokenizer.json: {one_line(str(error))}") from error


class CompiledGrammar:
    """A grammar at its beginning.

    The walks of one matcher share its lexer: the library copies all but that. It keeps each state
    that some walk was in, and at a limit none of them can go on. So there is a spare one, to which
    they change over then; the first only if it has not reached the limit alone.
    """

    def __init__(
        self,
        make_matcher: Callable[[], LLMatcher],
        vocabulary: LLTokenizer,
        kept_bytes: int,
        on_wear: Callable[[CompiledGrammar], None],
    ) -> None:
        """Raises GrammarError."""
        self._make_matcher = make_matcher
        self._on_wear = on_wear
        self._matcher_bytes = kept_bytes
        self._num_walks = 0
        self._is_worn = False  # the lexer for new walks, which somebody has found out
        self._eos_token_ids = frozenset(vocabulary.eos_tokens)
        self.mask_words = -(-vocabulary.vocab_size // 32)
        self._matchers = [make_matcher()]  # the one for new walks, and then the spare one
        _raise_error(self._matchers[0])

    @property
    def kept_bytes(self) -> int:
        return len(self._matchers) * self._matcher_bytes

    def start(self) -> GrammarState:
        """A walk from the beginning. Any thread may call this."""
        self._num_walks += 1
        if self._num_walks == _FEWEST_SHARING:
            self._on_wear(self)
        return GrammarState(self, self._matchers[0], self._eos_token_ids, self.mask_words)

    def make_spare(self) -> None:
        """Compiles another matcher if there is no spare one. Any thread may call this."""
        if len(self._matchers) < 2:
            self._matchers[1:] = [self._make_matcher()]

    def instead_of(self, worn: LLMatcher, *, for_the_first: bool) -> LLMatcher | None:
        """Another matcher at its beginning than one whose lexer is at a limit; None while there is
        none, and to who asks first unless it is for that one too. The engine's thread alone calls
        this."""
        if self._matchers[0] is not worn:
            return self._matchers[0]
        is_first, self._is_worn = not self._is_worn, True
        if len(self._matchers) > 1:
            del self._matchers[0]
            self._is_worn = False
        self._on_wear(self)
        if self._is_worn or (is_first and not for_the_first):
            return None
        return self._matchers[0]


def compile_grammar(
    vocabulary: LLTokenizer,
    spec: GrammarSpec,
    *,
    kept_bytes: int = 0,
    on_wear: Callable[[CompiledGrammar], None] = lambda compiled: None,
) -> CompiledGrammar:
    """Compiles and tries the first token. Releases the GIL for most of it; usually takes about a
    millisecond, may take seconds. `kept_bytes`: its size, from who has measured that. `on_wear` is
    called when a spare is wanted, and must not wait for it. Raises GrammarError."""
    make = partial(LLMatcher, vocabulary, library_grammar(spec), log_level=0, limits=_LIMITS)
    compiled = CompiledGrammar(make, vocabulary, kept_bytes, on_wear)
    _try_first_token(compiled)
    return compiled


def _try_first_token(compiled: CompiledGrammar) -> None:
    """Much that the library compiles (what nothing matches, what takes too many states) shows its
    error here."""
    state, row = compiled.start(), np.zeros(compiled.mask_words, dtype=np.int32)
    state.left_s = math.inf  # whatever lexers keep is new here
    state.fill(row)
    word = int(np.flatnonzero(row)[0])
    state.accept(32 * word + int(np.flatnonzero(row[word] >> np.arange(32) & 1)[0]))
    if not state.is_done:
        state.fill(row)


class GrammarState:
    """Where one request stands in its grammar (token_masks.Grammar). One thread only may use it."""

    def __init__(
        self,
        compiled: CompiledGrammar,
        beginning: LLMatcher,
        eos_token_ids: frozenset[int],
        mask_words: int,
    ) -> None:
        self._compiled = compiled
        self._beginning = beginning
        self._matcher = beginning.deep_copy()
        self._mask_words = mask_words
        self._eos_token_ids = eos_token_ids
        self.is_done = False  # the text has ended: nothing follows
        self.left_s = _ALLOWED_S
        self._accepted: list[int] = []
        self._filled: MaskRow | None = None  # ahead, by fill_ahead()

    def fill(self, row: MaskRow) -> None:
        """Overwrites the row with what may come next: EOS ids wherever the text may end, and they
        alone once it must. Never leaves it empty. Raises GrammarError where a limit of the library
        is hit, and once the walk has taken too long."""
        started_s = time.thread_time()
        if self._filled is not None:
            row[:] = self._filled
        else:
            self._compute(row)
        if self._matcher.is_error() and self._change_over():
            self._compute(row)
        # After an error the library would allow EOS, as if the text were complete.
        _raise_error(self._matcher)
        self._drop_early_ends(row)
        if not row.any():
            raise GrammarError("no token of the vocabulary can come next")
        self._spend(started_s)
        if self.left_s < 0:
            allowed = f"{_ALLOWED_S:g} s and {_ALLOWED_PER_TOKEN_S * 1000:g} ms a token"
            raise GrammarError(f"following it takes more than {allowed}")

    def _spend(self, started_s: float) -> None:
        self.left_s -= time.thread_time() - started_s

    def _compute(self, row: MaskRow) -> None:
        assert row.flags.c_contiguous, "the library writes to memory"
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def _drop_early_ends(self, row: MaskRow) -> None:
        """An EOS id that the grammar itself names ends the text, and so may come only where nothing
        more must."""
        words = row.view(np.uint32)
        ends = [each for each in self._eos_token_ids if words[each // 32] >> (each % 32) & 1]
        if not ends or self._matcher.is_accepting():
            return
        for each in ends:
            after = self._matcher.deep_copy()
            after.consume_token(each)
            if not after.is_accepting():
                words[each // 32] &= ~np.uint32(1 << each % 32)
        if not row.any():
            raise GrammarError(f"it needs the end-of-sequence id {ends[0]} in the midst")

    def accept(self, token_id: int) -> None:
        """Steps over a token. Raises GrammarError if fill() did not allow it."""
        started_s = time.thread_time()
        self._filled = None
        taken = self._matcher.consume_token(token_id)
        if not taken and self._change_over():
            taken = self._matcher.consume_token(token_id)
        if not taken:
            _raise_error(self._matcher)
            raise GrammarError(f"the grammar does not allow the token {token_id}")
        self._accepted.append(token_id)
        self.is_done = token_id in self._eos_token_ids
        self._spend(started_s)
        self.left_s += _ALLOWED_PER_TOKEN_S

    def _change_over(self) -> bool:
        """Goes on with another lexer where this one is at a limit that others may have led it to;
        whether there is one. Takes some microseconds for each token so far."""
        problem = self._matcher.get_error()
        if not problem.startswith(_WORN_OUT):
            return False
        alone = _TOO_MUCH_AT_ONCE in problem  # whoever finds out: the others find it so
        beginning = self._compiled.instead_of(self._beginning, for_the_first=not alone)
        if beginning is None:
            return False
        self._beginning, self._matcher = beginning, beginning.deep_copy()
        return bool(self._matcher.consume_tokens(self._accepted))


class ParallelFill:
    """Fills many rows at once, on threads of the library."""

    def __init__(self, num_threads: int) -> None:
        self._executor = LLExecutor(num_threads)
        self._slow_s = _SLOW_TOGETHER_S
        self._took_s = 0.0  # together, the last time
        self._alone: list[tuple[GrammarState, float]] = []  # since then, and what each had left

    def fill_ahead(self, states: Sequence[GrammarState]) -> None:
        """Has the next fill() of each state, at least one of one vocabulary, find its row. Not the
        next time after one that was slow: then each shows how much of that it takes. If none takes
        much, so many rows just take so long, and may from then on."""
        if self._alone:
            if all(state.left_s > left_s - _ALLOWED_PER_TOKEN_S for state, left_s in self._alone):
                self._slow_s = 2 * self._took_s
            self._alone = []
        elif self._took_s > self._slow_s:
            self._alone = [(state, state.left_s) for state in states]
            return
        started_s = time.perf_counter()
        self._fill(states)
        self._took_s = time.perf_counter() - started_s
        self._slow_s = max(_SLOW_TOGETHER_S, min(self._slow_s, 4 * self._took_s))

    def _fill(self, states: Sequence[GrammarState]) -> None:
        rows: MaskRow = np.empty((len(states), states[0]._mask_words), dtype=np.int32)
        matchers = [(state._matcher, index) for index, state in enumerate(states)]
        self._executor.unsafe_compute_mask_ptr(
            matchers, rows.ctypes.data, rows.strides[0], len(states)
        )
        for state, row in zip(states, rows, strict=True):
            state._filled = row


def _raise_error(matcher: LLMatcher) -> None:
    if matcher.is_error():
        message = matcher.get_error()
        if message.startswith(_NOTHING_MATCHES):
            message = "no text of finite length follows it"
        raise GrammarError(one_line(message))
