"""The grammars of an engine: compiled beside its loop, kept for the next request.

    prepare(spec)   any thread: a worker checks the grammar (checker.py) and compiles it
    start(spec)     the engine's thread: a walk of a prepared grammar (token_masks.Grammars)

A grammar is there for as long as somebody holds the future that prepare() gave: EngineCore does, of
every request that follows one, so start() finds it and never compiles. Besides, the last few are
kept for the next request. All of them together are bounded: what does not fit is refused. One that
nobody holds any more when a worker comes to it is left out.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar
from weakref import ReferenceType, WeakValueDictionary

from llguidance import LLTokenizer

from millstream.engine.grammars.checker import KEPT_LIMIT_BYTES, GrammarChecker
from millstream.engine.grammars.errors import GrammarError, GrammarsFullError
from millstream.engine.grammars.grammar import (
    CompiledGrammar,
    GrammarState,
    MaskRow,
    ParallelFill,
    compile_grammar,
    load_vocabulary,
)
from millstream.engine.grammars.token_masks import Grammar
from millstream.engine.request import GrammarSpec

Result = TypeVar("Result")

_NUM_WORKERS = 2  # what takes long holds up one of them
_MAX_RECENT = 128
_MAX_BYTES = _MAX_RECENT * KEPT_LIMIT_BYTES
_NUM_FILLERS = min(8, os.cpu_count() or 1)
_FEWEST_TOGETHER = 8  # a row takes about 40 us, and a call of the threads about as much
_STACK_BYTES = 16 << 20  # of a worker: more than the checker's

Outcome = Future[CompiledGrammar]
Work = Callable[[GrammarChecker], None]
_Job = tuple[int, int, Work | None]  # urgency, number: smaller ones first; None ends a worker
_STOP, _COMPILE, _SPARE = range(3)


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
        # Under the lock. All that somebody holds, and the last compiled, which this object holds.
        self._outcomes: WeakValueDictionary[GrammarSpec, Outcome] = WeakValueDictionary()
        self._recent: OrderedDict[GrammarSpec, Outcome] = OrderedDict()
        self._jobs: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._job_numbers = itertools.count()
        self._workers: list[threading.Thread] = []
        self._fill: ParallelFill | None = None

        load = partial(load_vocabulary, tokenizer_file, vocab_size, eos_token_ids)
        _start_thread(partial(_settle, self._vocabulary, load), "vocabulary")

    def prepare(self, spec: GrammarSpec) -> Outcome:
        """Compiles a grammar unless that is done; the future may have a GrammarError. start() finds
        it for as long as the future is held."""
        with self._lock:
            outcome = self._outcomes.get(spec)
            if outcome is None:
                outcome = self._outcomes[spec] = Future()
                self._put(_COMPILE, partial(self._work_on, spec, ReferenceType(outcome)))
                if not self._workers:
                    self._workers = [
                        _start_thread(self._work, "grammars") for _ in range(_NUM_WORKERS)
                    ]
            elif outcome.done() and outcome.exception() is None:
                self._note_use(spec, outcome)
            return outcome

    def start(self, spec: GrammarSpec) -> GrammarState | Unstartable:
        """A new walk of a grammar that was prepared. Takes no time: the engine's loop waits."""
        with self._lock:
            outcome = self._outcomes.get(spec)
        if outcome is None or not outcome.done():
            return Unstartable(GrammarError("it was not compiled before its request"))
        try:
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
            self._put(_STOP, None)

    def _put(self, urgency: int, work: Work | None) -> None:
        self._jobs.put((urgency, next(self._job_numbers), work))

    def _work(self) -> None:
        """A worker thread: a grammar at a time, until it is told to stop."""
        checker = self._new_checker()
        while (work := self._jobs.get()[2]) is not None:
            work(checker)
        checker.close()

    def _work_on(
        self, spec: GrammarSpec, reference: ReferenceType[Outcome], checker: GrammarChecker
    ) -> None:
        if (outcome := reference()) is None:
            return  # whoever wanted it is gone
        _settle(outcome, partial(self._compile, checker, spec))
        with self._lock:
            if outcome.exception() is None:
                self._note_use(spec, outcome)
            else:  # maybe not the grammar's fault: try it again
                self._outcomes.pop(spec, None)

    def _ask_for_spare(self, compiled: CompiledGrammar) -> None:
        """After all that requests wait for."""
        self._put(_SPARE, partial(self._make_spare, ReferenceType(compiled)))

    def _make_spare(
        self, reference: ReferenceType[CompiledGrammar], checker: GrammarChecker
    ) -> None:
        if (compiled := reference()) is not None:
            with contextlib.suppress(GrammarsFullError):
                self._make_room(compiled.kept_bytes)
                _settle(Future(), compiled.make_spare)  # if it fails, there is none

    def _note_use(self, spec: GrammarSpec, outcome: Outcome) -> None:
        """Of one that is compiled. Under the lock."""
        self._recent[spec] = outcome
        self._recent.move_to_end(spec)
        if len(self._recent) > _MAX_RECENT:
            self._recent.popitem(last=False)

    def _compile(self, checker: GrammarChecker, spec: GrammarSpec) -> CompiledGrammar:
        kept_bytes = checker.check(spec)
        self._make_room(kept_bytes)
        return compile_grammar(
            self._vocabulary.result(), spec, kept_bytes=kept_bytes, on_wear=self._ask_for_spare
        )

    def _make_room(self, wanted_bytes: int) -> None:
        """Forgets recent ones where it must. Raises GrammarsFullError if that is not enough."""
        with self._lock:
            while self._kept_bytes() + wanted_bytes > _MAX_BYTES:
                if not self._recent:
                    raise GrammarsFullError(
                        f"the grammars of the requests in the engine take {_MAX_BYTES >> 20} MiB "
                        "together already"
                    )
                self._recent.popitem(last=False)

    def _kept_bytes(self) -> int:
        done = [each for each in self._outcomes.values() if each.done()]
        return sum(each.result().kept_bytes for each in done if each.exception() is None)


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
