"""The grammars of an engine: compiled beside its loop, kept for the next request.

    prepare(spec)   any thread: a worker checks the grammar (grammar_checker.py) and compiles it
    start(spec)     the engine's thread: a walk of a prepared grammar (token_masks.Grammars)

Those not used for longest are forgotten. A request is accepted when its grammar is prepared, so
start() finds it; one that was crowded out while its request waited is compiled again, which has
gone well before.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

from llguidance import LLTokenizer

from millstream.engine.grammar import (
    CompiledGrammar,
    GrammarState,
    MaskRow,
    ParallelFill,
    compile_grammar,
    load_vocabulary,
)
from millstream.engine.grammar_checker import GrammarChecker
from millstream.engine.grammar_errors import GrammarError
from millstream.engine.request import GrammarSpec
from millstream.engine.token_masks import Grammar

Result = TypeVar("Result")

_NUM_WORKERS = 2  # what takes long holds up one of them
_MAX_KEPT = 128
_NUM_FILLERS = min(8, os.cpu_count() or 1)
_FEWEST_TOGETHER = 8  # a row takes about 40 us, and a call of the threads about as much
_STACK_BYTES = 16 << 20  # of a worker: more than the checker's


class CompiledGrammars:
    """Of one vocabulary. Its threads start when they are needed."""

    def __init__(
        self, tokenizer_file: Path, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """Begins to load the vocabulary, in a thread."""
        self._new_checker = partial(
            GrammarChecker, tokenizer_file, vocab_size=vocab_size, eos_token_ids=eos_token_ids
        )
        self._vocabulary: Future[LLTokenizer] = Future()
        self._lock = threading.Lock()
        self._outcomes: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = OrderedDict()
        self._jobs: queue.SimpleQueue[tuple[GrammarSpec, Future[CompiledGrammar]] | None]
        self._jobs = queue.SimpleQueue()
        self._workers: list[threading.Thread] = []
        self._fill: ParallelFill | None = None

        load = partial(load_vocabulary, tokenizer_file, vocab_size, eos_token_ids)
        _start_thread(partial(_settle, self._vocabulary, load), "vocabulary")

    def prepare(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """Compiles a grammar unless that is done; the future may have a GrammarError."""
        with self._lock:
            outcome = self._outcomes.get(spec)
            if outcome is None:
                outcome = self._outcomes[spec] = Future()
                self._jobs.put((spec, outcome))
                if not self._workers:
                    self._workers = [
                        _start_thread(self._work, "grammars") for _ in range(_NUM_WORKERS)
                    ]
                self._forget_oldest()
            self._outcomes.move_to_end(spec)
            return outcome

    def start(self, spec: GrammarSpec) -> GrammarState | Unstartable:
        """A new walk of a grammar that was prepared."""
        with self._lock:
            outcome = self._outcomes.get(spec)
            if outcome is not None:
                self._outcomes.move_to_end(spec)
        try:
            if outcome is None or not outcome.done():
                compiled = compile_grammar(self._vocabulary.result(), spec)
                self._keep(spec, compiled)
                return compiled.start()
            return outcome.result().start()
        except GrammarError as error:
            return Unstartable(error)

    def fill_ahead(self, grammars: Sequence[Grammar]) -> None:
        """Many rows are filled at once; a few are not worth the threads."""
        states = [each for each in grammars if isinstance(each, GrammarState)]
        if len(states) >= _FEWEST_TOGETHER and _NUM_FILLERS > 1:
            if self._fill is None:
                self._fill = ParallelFill(_NUM_FILLERS)
            self._fill.fill_ahead(states)

    def close(self) -> None:
        """Ends threads and processes, in a moment. Nothing may be prepared afterwards."""
        for _ in self._workers:
            self._jobs.put(None)

    def _keep(self, spec: GrammarSpec, compiled: CompiledGrammar) -> None:
        """Unless a worker is at it."""
        with self._lock:
            if spec not in self._outcomes:
                outcome = self._outcomes[spec] = Future()
                outcome.set_result(compiled)
                self._forget_oldest()

    def _forget_oldest(self) -> None:
        done = [spec for spec, outcome in self._outcomes.items() if outcome.done()]
        for spec in done[: max(0, len(self._outcomes) - _MAX_KEPT)]:
            del self._outcomes[spec]

    def _work(self) -> None:
        """A worker thread: a grammar at a time, until it is told to stop."""
        checker = self._new_checker()
        while (job := self._jobs.get()) is not None:
            spec, outcome = job
            _settle(outcome, partial(self._compile, checker, spec))
            if outcome.exception() is not None:  # maybe not the grammar's fault: try it again
                with self._lock:
                    self._outcomes.pop(spec, None)
        checker.close()

    def _compile(self, checker: GrammarChecker, spec: GrammarSpec) -> CompiledGrammar:
        checker.check(spec)
        return compile_grammar(self._vocabulary.result(), spec)


class Unstartable:
    """The walk of a grammar that cannot even start (token_masks.Grammar)."""

    is_done = False

    def __init__(self, error: GrammarError) -> None:
        self._error = error

    def fill(self, row: MaskRow) -> None:
        raise self._error

    def accept(self, token_id: int) -> None:
        raise self._error


def _settle(future: Future[Result], function: Callable[[], Result]) -> None:
    """Runs the function for the future."""
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


def _start_thread(target: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    usual = threading.stack_size(_STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(usual)
    return thread
