"""A runner over ranks in a user's own process: who waits for a step hears that a rank is lost.

    caller            --- launch, collect ---> thread "rank 0"   may wait for a lost rank for ever
       ^                                            |
       '--- what came of it, or that a rank is lost-+--- the ranks' watching thread

On a GPU, a step whose collective misses a rank never ends, nor does what waits for it, and no error
comes of that. The core process ends itself then (core_process.py); a user's process goes on.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from millstream.engine.plan import Plan, PreparesAhead, Runner, StepResult
from millstream.engine.ranks.children import OnLost, RankLost
from millstream.engine.request import GrammarSpec

# From the loss of a rank until a call is taken for one that never returns. Where the loss shows as
# an error, as on CPUs, that has a better reason, or the call cleans up behind itself.
_GRACE_S = 2.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Done:
    """What came of a call."""

    result: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class _Lost:
    reason: str


_Answers = queue.SimpleQueue[_Done | _Lost]
_Calls = queue.SimpleQueue[tuple[Callable[[], Any], bool] | None]  # and whether one waits for it


class RunnerOverRanks(Runner, PreparesAhead, Protocol):
    """ranks.runner.RanksRunner."""

    def end_ranks(self) -> None:
        """Ends the other ranks and nothing else; any thread may call it, any number of times."""

    def restore_threads(self) -> None:
        """Undoes what loading changed of the calling thread."""


def watched(create: Callable[[OnLost], RunnerOverRanks]) -> WatchedRunner:
    """The runner that `create` makes when it is given what to call once a rank is lost."""
    answers: _Answers = queue.SimpleQueue()
    return WatchedRunner(create(lambda reason: answers.put(_Lost(reason))), answers)


class WatchedRunner:
    """A plan.Runner and a PreparesAhead; soon after a rank is lost, collect() raises RankLost. One
    that is dropped ends as one that is closed."""

    def __init__(self, runner: RunnerOverRanks, answers: _Answers) -> None:
        self.info = runner.info
        self._runner = runner
        self._answers = answers  # a _Done for each call that is waited for
        self._calls: _Calls = queue.SimpleQueue()
        self._lost: str | None = None
        self._hangs = False  # the thread is in a call that never returns
        self._failed_launch: BaseException | None = None  # the thread's
        # The thread knows of this object only while it has a call.
        work = threading.Thread(
            target=_work, args=(self._calls, answers), name="rank 0", daemon=True
        )
        work.start()
        weakref.finalize(self, _end, self._calls, runner.end_ranks).atexit = False

    def launch(self, plan: Plan) -> None:
        """Waits for nothing: what goes wrong, collect() raises."""
        self._calls.put((partial(self._launch_here, plan), False))

    def collect(self) -> StepResult:
        return self._call(self._collect_here)

    def prepare_ahead(self) -> bool:
        return self._call(self._runner.prepare_ahead)

    def prepare_grammar(self, spec: GrammarSpec) -> Future[Any]:
        return self._runner.prepare_grammar(spec)

    def close(self) -> None:
        """Ends the other ranks. What waits for a lost one, and the memory of its device, is left to
        the end of the process."""
        with contextlib.suppress(RankLost):
            self._call(self._runner.close)
        if self._hangs:
            self._runner.end_ranks()
        self._calls.put(None)
        self._runner.restore_threads()

    def _call(self, function: Callable[[], T]) -> T:
        """Waits until it is done on the thread, behind all before it."""
        if self._hangs:
            raise RankLost(self._lost or "")
        self._calls.put((function, True))
        while True:
            try:
                answer = self._answers.get(timeout=None if self._lost is None else _GRACE_S)
            except queue.Empty:
                self._hangs = True
                raise RankLost(self._lost or "") from None
            if isinstance(answer, _Lost):
                self._lost = answer.reason
            elif answer.error is not None:
                raise answer.error
            else:
                result: T = answer.result
                return result

    # ---- on the thread

    def _launch_here(self, plan: Plan) -> None:
        if self._failed_launch is None:
            try:
                self._runner.launch(plan)
            except BaseException as error:
                self._failed_launch = error

    def _collect_here(self) -> StepResult:
        if self._failed_launch is not None:
            raise self._failed_launch
        return self._runner.collect()


def _work(calls: _Calls, answers: _Answers) -> None:
    """The thread."""
    while (call := calls.get()) is not None:
        done = _done(call[0])
        if call[1]:
            answers.put(done)
        del call, done  # or they would be held until the next call comes


def _done(function: Callable[[], Any]) -> _Done:
    try:
        return _Done(function())
    except BaseException as error:
        return _Done(error=error)


def _end(calls: _Calls, end_ranks: Callable[[], None]) -> None:
    """Only asks for it: this may run in any thread, in the midst of anything."""
    calls.put((end_ranks, False))
    calls.put(None)
