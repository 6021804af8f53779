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
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from millstream.engine.plan import Plan, Runner, StepResult
from millstream.engine.ranks import OnLost, RankLost
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


class RunnerOverRanks(Runner, Protocol):
    """ranks_runner.RanksRunner."""

    def end_ranks(self) -> None:
        """Ends the other ranks and nothing else; any thread may call it, any number of times."""


def watched(create: Callable[[OnLost], RunnerOverRanks]) -> WatchedRunner:
    """The runner that `create` makes when it is given what to call once a rank is lost."""
    answers: _Answers = queue.SimpleQueue()
    return WatchedRunner(create(lambda reason: answers.put(_Lost(reason))), answers)


class WatchedRunner:
    """A plan.Runner; soon after a rank is lost, collect() raises RankLost."""

    def __init__(self, runner: RunnerOverRanks, answers: _Answers) -> None:
        self.info = runner.info
        self._runner = runner
        self._answers = answers  # a _Done for each call that is waited for
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], bool] | None] = queue.SimpleQueue()
        self._lost: str | None = None
        self._hangs = False  # the thread is in a call that never returns
        self._failed_launch: BaseException | None = None  # the thread's
        threading.Thread(target=self._work, name="rank 0", daemon=True).start()

    def launch(self, plan: Plan) -> None:
        """Waits for nothing: what goes wrong, collect() raises."""
        self._calls.put((partial(self._launch_here, plan), False))

    def collect(self) -> StepResult:
        return self._call(self._collect_here)

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

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            function, is_awaited = call
            try:
                done = _Done(function())
            except BaseException as error:
                done = _Done(error=error)
            if is_awaited:
                self._answers.put(done)

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
