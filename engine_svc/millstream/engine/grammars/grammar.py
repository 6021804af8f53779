"""Structured output: which token ids a grammar allows next, from llguidance.

A `GrammarSpec` is compiled against the model's vocabulary once (`compile_grammar`); each request
then walks a copy of its own (`GrammarState`): fill a mask, sample, accept, and so on to the end.
What the library needs and why it was chosen: docs/decisions/0009-structured-output.md.

The library's limits do not bound everything that a hostile grammar can do: checker.py
compiles what nobody has compiled yet in a process that may die of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import assert_never

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from millstream.engine.grammars.errors import GrammarError, VocabularyError
from millstream.engine.request import GrammarKind, GrammarSpec

MaskRow = npt.NDArray[np.int32]  # [ceil(V/32)]: bit j of word i is the token id 32*i + j

# The library's own limits where they are not its defaults. A state takes 1 to 2 kB, and there are
# ever more of them while a grammar is walked; errors do not quote the grammar.
_LIMITS = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)
_NOTHING_MATCHES = "NoExtension"  # how the library says that there is no way on
_MAX_MESSAGE_CHARS, _MAX_LINE = 400, 120


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
        raise VocabularyError(f"tokenizer.json: {_one_line(str(error))}") from error


class CompiledGrammar:
    """A grammar at its beginning."""

    def __init__(self, matcher: LLMatcher, vocabulary: LLTokenizer, kept_bytes: int) -> None:
        self.kept_bytes = kept_bytes
        self._matcher = matcher
        self._eos_token_ids = frozenset(vocabulary.eos_tokens)
        self.mask_words = -(-vocabulary.vocab_size // 32)

    def start(self) -> GrammarState:
        """A walk from the beginning, independent of others. Any thread may call this."""
        return GrammarState(self._matcher.deep_copy(), self._eos_token_ids, self.mask_words)


def compile_grammar(
    vocabulary: LLTokenizer, spec: GrammarSpec, *, kept_bytes: int = 0
) -> CompiledGrammar:
    """Compiles and tries the first token. Releases the GIL for most of it; usually takes about a
    millisecond, may take seconds. `kept_bytes`: its size, from who has measured that. Raises
    GrammarError."""
    matcher = LLMatcher(vocabulary, _library_grammar(spec), log_level=0, limits=_LIMITS)
    _raise_error(matcher)
    compiled = CompiledGrammar(matcher, vocabulary, kept_bytes)
    _try_first_token(compiled)
    return compiled


def _try_first_token(compiled: CompiledGrammar) -> None:
    """Much that the library compiles (what nothing matches, what takes too many states) shows its
    error here."""
    state, row = compiled.start(), np.zeros(compiled.mask_words, dtype=np.int32)
    state.fill(row)
    word = int(np.flatnonzero(row)[0])
    state.accept(32 * word + int(np.flatnonzero(row[word] >> np.arange(32) & 1)[0]))
    if not state.is_done:
        state.fill(row)


class GrammarState:
    """Where one request stands in its grammar (token_masks.Grammar). One thread only may use it."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int], mask_words: int) -> None:
        self._matcher = matcher
        self._mask_words = mask_words
        self._eos_token_ids = eos_token_ids
        self.is_done = False  # the text has ended: nothing follows
        self._filled: MaskRow | None = None  # ahead, by fill_ahead()

    def fill(self, row: MaskRow) -> None:
        """Overwrites the row with what may come next: EOS ids wherever the text may end, and they
        alone once it must. Never leaves it empty. Raises GrammarError where a limit of the library
        is hit."""
        if self._filled is not None:
            row[:] = self._filled
        else:
            assert row.flags.c_contiguous, "the library writes to memory"
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        # After an error the library would allow EOS, as if the text were complete.
        _raise_error(self._matcher)
        if not row.any():
            raise GrammarError("no token of the vocabulary can come next")

    def accept(self, token_id: int) -> None:
        """Steps over a token. Raises GrammarError if fill() did not allow it."""
        self._filled = None
        if not self._matcher.consume_token(token_id):
            _raise_error(self._matcher)
            raise GrammarError(f"the grammar does not allow the token {token_id}")
        self.is_done = token_id in self._eos_token_ids


class ParallelFill:
    """Fills many rows at once, on threads of the library."""

    def __init__(self, num_threads: int) -> None:
        self._executor = LLExecutor(num_threads)

    def fill_ahead(self, states: Sequence[GrammarState]) -> None:
        """Has the next fill() of each state, at least one of one vocabulary, find its row."""
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
        raise GrammarError(_one_line(message))


def _library_grammar(spec: GrammarSpec) -> str:
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            return _json_grammar(spec.text)
        case GrammarKind.JSON_OBJECT:
            return _json_grammar('{"type": "object"}')
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(spec.text)
        case GrammarKind.CHOICE:
            return LLMatcher.grammar_from_regex("|".join(map(_as_regex, json.loads(spec.text))))
        case GrammarKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(_lark(spec.text))
        case _:
            assert_never(spec.kind)


def _as_regex(text: str) -> str:
    """A regex that matches this text alone."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _json_grammar(schema: str) -> str:
    try:
        # A schema's own "x-guidance" may allow whitespace, but not that keywords are ignored.
        return LLMatcher.grammar_from_json_schema(
            schema, defaults={"whitespace_flexible": False}, overrides={"lenient": False}
        )
    except ValueError as error:
        raise GrammarError(_one_line(str(error))) from error


def _lark(text: str) -> str:
    """The grammar in Lark's notation; GBNF (llama.cpp's and vLLM's) is turned into it."""
    try:
        lark: str = any_to_lark(text)
    except Exception as error:  # its parser raises whatever comes, RecursionError too
        raise GrammarError(_one_line(str(error) or type(error).__name__)) from error
    return lark


def _one_line(message: str) -> str:
    """The library's message without what it quotes of a long grammar, and without its carets."""
    lines = [line.strip() for line in message.replace("<non-verbose/>", "").splitlines()]
    kept = (line for line in lines if line.strip("^ "))
    text = " ".join(line if len(line) <= _MAX_LINE else line[:_MAX_LINE] + "..." for line in kept)
    return text[:_MAX_MESSAGE_CHARS]
