"""EngineCore: the step loop, from submitted requests to their tokens, around one runner.

It keeps as many plans launched as the runner takes: with two, the runner computes step N while
step N+1 is scheduled and launched, and never waits for Python. The core process and the in-process
LLM both use this class.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from millstream.engine.plan import PreparesAhead, Runner
from millstream.engine.records import FinishedRecord, Stats, StepRecord
from millstream.engine.request import FinishReason, GrammarSpec, Request
from millstream.engine.scheduler import Scheduler
from millstream.engine.scheduling.prefix import BlockEvent, BlockName


class EngineCore:
    """A scheduler and its runner. One thread only may use it."""

    def __init__(
        self,
        runner: Runner,
        *,
        prefix_caching: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = runner.info
        self.scheduler = Scheduler(runner.info, prefix_caching and runner.info.prefix_sharing)
        self._runner = runner
        self._clock = clock
        self._finished: list[FinishedRecord] = []  # between steps; told with the next one
        # What the runner keeps compiled: for requests to come, and by the key of one that is here.
        self._prepared: dict[GrammarSpec, Future[Any]] = {}
        self._followed: dict[int, Future[Any]] = {}

    def prepare_grammar(self, spec: GrammarSpec) -> Future[Any]:
        """As Runner.prepare_grammar: to be done before a request with this grammar is submitted. It
        is kept until it is forgotten, and then while a request follows it."""
        outcome = self._prepared[spec] = self._runner.prepare_grammar(spec)
        return outcome

    def forget_grammar(self, spec: GrammarSpec) -> None:
        """No request with this grammar is submitted before it is prepared again."""
        self._prepared.pop(spec, None)

    def submit(self, request: Request) -> None:
        """Takes a request. Exactly one FinishedRecord will come of it."""
        grammar = request.sampling.grammar
        if grammar is not None and self.info.structured_output:
            self._followed[request.key] = self._runner.prepare_grammar(grammar)  # compiled already
        finished = self.scheduler.add(request, self._clock())
        if finished is not None:
            self._finished.append(finished)

    def finish(self, keys: Iterable[int], reason: FinishReason) -> None:
        """Ends requests, of which the next step() tells; unknown and ended ones are ignored."""
        now = self._clock()
        for key in keys:
            finished = self.scheduler.finish(key, reason, now)
            if finished is not None:
                self._finished.append(finished)

    def step(self) -> StepRecord:
        """Waits for the oldest step, with the next ones launched behind it. The record is empty
        when the step sampled nothing, or when there was nothing to do."""
        scheduler, runner = self.scheduler, self._runner
        while scheduler.num_launched < self.info.max_in_flight:
            plan = scheduler.schedule(self._clock())
            if plan is None:
                break
            runner.launch(plan)
        earlier, self._finished = self._finished, []
        if not scheduler.num_launched:
            assert not scheduler.has_work, "sequences are left and none can be computed"
            return self._let_go(StepRecord(scheduler.stats().steps, [], [], earlier))
        record = scheduler.apply(runner.collect(), self._clock())
        record.finished[:0] = earlier
        return self._let_go(record)

    def _let_go(self, record: StepRecord) -> StepRecord:
        """The grammars of what has ended, which nobody follows any more."""
        if self._followed:
            for finished in record.finished:
                self._followed.pop(finished.key, None)
        return record

    def prepare_ahead(self) -> bool:
        """As PreparesAhead.prepare_ahead: something useful to do while there is no work."""
        runner = self._runner
        return isinstance(runner, PreparesAhead) and runner.prepare_ahead()

    @property
    def has_work(self) -> bool:
        """Whether step() has something to do or to tell."""
        return self.scheduler.has_work or bool(self._finished)

    def stats(self) -> Stats:
        return self.scheduler.stats()

    def watch_blocks(self) -> list[BlockName]:
        """As Scheduler.watch_blocks."""
        return self.scheduler.watch_blocks()

    def unwatch_blocks(self) -> None:
        self.scheduler.unwatch_blocks()

    def take_block_events(self) -> list[BlockEvent]:
        """As Scheduler.take_block_events; to be called after each step."""
        return self.scheduler.take_block_events()

    def close(self) -> None:
        """Frees what the runner holds. Nothing may be called afterwards."""
        self._runner.close()
