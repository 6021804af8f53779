"""Steps of an LLM over ranks: a rank that is lost is told, whatever waits for it."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from tests.toy_runner import ToyRunner, toy_info, toy_request

from millstream.engine.core import EngineCore
from millstream.engine.in_process import watched_runner
from millstream.engine.in_process.watched_runner import WatchedRunner, watched
from millstream.engine.plan import PreparesAhead
from millstream.engine.ranks.children import OnLost, RankLost
from millstream.engine.request import GrammarSpec

REASON = "rank 1 of 2 was killed by SIGKILL"


class HangingRunner(ToyRunner):
    """Whose steps wait for ever once a rank is `gone`, in a launch, in a collect, or, idle before,
    when it is closed."""

    def __init__(self, where: str) -> None:
        super().__init__(toy_info(max_in_flight=2))
        self._where = where
        self.gone = threading.Event()
        self.on_lost: OnLost
        self.ends_of_ranks: list[str] = []  # the threads that asked for it
        self.threads = set[str]()
        self.restored_by = ""

    def lose(self) -> None:
        self.gone.set()
        self.on_lost(REASON)

    def launch(self, plan: Any) -> None:
        self._step("launch")
        super().launch(plan)

    def collect(self) -> Any:
        self._step("collect")
        return super().collect()

    def close(self) -> None:
        self._step("close")
        super().close()

    def prepare_ahead(self) -> bool:
        self._step("prepare_ahead")
        return True

    def restore_threads(self) -> None:
        self.restored_by = threading.current_thread().name

    def end_ranks(self) -> None:
        self.ends_of_ranks.append(threading.current_thread().name)

    def prepare_grammar(self, spec: GrammarSpec) -> Future[Any]:
        raise AssertionError("nobody asked")

    def _step(self, what: str) -> None:
        self.threads.add(threading.current_thread().name)
        time.sleep(0.001)
        if self.gone.is_set() and what == self._where:
            threading.Event().wait()
        if self.gone.is_set() and self._where == "error":
            raise RankLost("as it was seen here")


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_runner, "_GRACE_S", 0.1)


def make(where: str) -> tuple[HangingRunner, WatchedRunner]:
    inner = HangingRunner(where)

    def create(on_lost: OnLost) -> HangingRunner:
        inner.on_lost = on_lost
        return inner

    return inner, watched(create)


def run(runner: WatchedRunner, then: Callable[[], object] = lambda: None) -> int:
    """Steps to the end; calls `then` after the third one. Returns how many tokens came."""
    core = EngineCore(runner, prefix_caching=True)
    core.submit(toy_request(1, [1, 2, 3], max_tokens=20))
    tokens = steps = 0
    while core.has_work:
        tokens += len(core.step().token_ids)
        steps += 1
        if steps == 3:
            then()
    return tokens


def test_nothing_changes_while_all_ranks_are_there() -> None:
    inner, runner = make("nowhere")
    assert run(runner) == 20
    assert runner.prepare_ahead() and isinstance(runner, PreparesAhead)
    assert runner.info is inner.info
    assert inner.threads == {"rank 0"}
    runner.close()
    assert inner.closed and not inner.ends_of_ranks
    assert inner.restored_by == threading.current_thread().name  # that which loaded


def test_preparations_that_hang_raise() -> None:
    inner, runner = make("prepare_ahead")
    inner.gone.set()
    threading.Timer(0.1, inner.lose).start()
    with pytest.raises(RankLost, match=REASON):
        runner.prepare_ahead()
    runner.close()


@pytest.mark.parametrize("where", ["launch", "collect"])
@pytest.mark.parametrize("when", ["before the step", "in the step"])
def test_a_step_that_hangs_raises_and_the_runner_can_be_closed(where: str, when: str) -> None:
    inner, runner = make(where)

    def lose_soon() -> None:
        if when == "before the step":
            inner.lose()
        else:
            inner.gone.set()
            threading.Timer(0.1, inner.lose).start()

    started = time.monotonic()
    with pytest.raises(RankLost, match=REASON):
        run(runner, lose_soon)
    with pytest.raises(RankLost, match=REASON):  # at once from now on
        run(runner)
    runner.close()
    assert inner.ends_of_ranks and not inner.closed
    assert time.monotonic() - started < 2


def test_an_error_of_the_step_itself_comes_first() -> None:
    inner, runner = make("error")
    with pytest.raises(RankLost, match="as it was seen here"):
        run(runner, inner.lose)


def test_an_error_of_a_launch_is_told_by_the_next_collect() -> None:
    inner, runner = make("nowhere")

    def fail(plan: Any) -> None:
        raise MemoryError("no room")

    inner.launch = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="no room"):
        run(runner)
    runner.close()
    assert inner.closed


def test_a_close_that_hangs_ends_the_ranks() -> None:
    inner, runner = make("close")
    assert run(runner) == 20
    inner.lose()
    runner.close()
    assert inner.ends_of_ranks


def test_one_that_is_dropped_leaves_nothing() -> None:
    """No thread, no ranks; what rank 0 has on its device goes with it."""
    others = threading.enumerate()
    inner, runner = make("nowhere")
    (thread,) = [each for each in threading.enumerate() if each not in others]
    assert run(runner) == 20
    ended_by, left = inner.ends_of_ranks, weakref.ref(inner)
    del inner, runner
    gc.collect()
    thread.join(5)
    assert ended_by == ["rank 0"] and not thread.is_alive()
    gc.collect()
    assert left() is None


def test_other_errors_come_through() -> None:
    _, runner = make("nowhere")
    with pytest.raises(IndexError):
        runner.collect()
    assert run(runner) == 20
    runner.close()
