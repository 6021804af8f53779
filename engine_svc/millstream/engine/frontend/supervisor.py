"""The front end's handle on the core process: talks to it, notices its end, ends it.

A core has failed when it reports a Fault, when its process ends, or when it is stuck: work is
pending and no step finished for `step_timeout_s`. Then it is killed and `failed` has the reason.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, assert_never

from millstream.engine.channel import FrontChannel
from millstream.engine.config import EngineConfig
from millstream.engine.records import (
    AskStats,
    BlockEvents,
    CachedBlocks,
    Fault,
    Finish,
    ForgetGrammar,
    FromCore,
    GrammarPrepared,
    Load,
    Loaded,
    LoadFailed,
    PrepareGrammar,
    Stats,
    StatsRecord,
    StepRecord,
    Submit,
    ToCore,
    UnwatchBlocks,
    WatchBlocks,
)
from millstream.engine.request import FinishReason, GrammarSpec, Request
from millstream.engine.startup.spawn import SpawnedCore
from millstream.engine.validation.structured_output import refusal_of
from millstream.rpc.errors import EngineUnavailable
from millstream.rpc.server import StartError

logger = logging.getLogger(__name__)

_WATCHDOG_TICKS = 8  # a step's time limit is counted in so many ticks
_EXIT_GRACE_S = 0.5  # from the end of file to SIGKILL; the core needs milliseconds


class Supervisor:
    """One core process. All of it runs on the event loop; callbacks are called there too."""

    def __init__(
        self,
        config: EngineConfig,
        core: SpawnedCore,
        *,
        on_step: Callable[[StepRecord], None],
        on_blocks: Callable[[CachedBlocks | BlockEvents], None] = lambda record: None,
    ) -> None:
        self._config = config
        self._on_step = on_step
        self._on_blocks = on_blocks
        loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[Loaded] = loop.create_future()
        self._failed: asyncio.Future[str] = loop.create_future()
        self._process = core.process
        self._connection = core.connection
        self._channel: FrontChannel | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._tokens = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}  # by the question's token
        self._num_ids: dict[int, int] = {}  # of each request in the core, by key
        self._num_ids_live = 0
        self._steps_seen = 0

    @property
    def num_live(self) -> int:
        """Requests submitted and not yet reported as finished."""
        return len(self._num_ids)

    @property
    def num_ids(self) -> int:
        """Token ids that they hold."""
        return self._num_ids_live

    @property
    def failed(self) -> asyncio.Future[str]:
        """Resolves to the reason once the core can serve no longer. Do not cancel it."""
        return self._failed

    async def load(self, model_dir: Path | None) -> Loaded:
        """Has the core load the model, and waits for that. Raises StartError."""
        self._channel = await FrontChannel.open(
            self._connection, on_record=self._on_record, on_closed=self._on_closed
        )
        self._channel.send(Load(None if model_dir is None else str(model_dir)))
        if not await self._came(self._loaded):
            raise StartError(self._failed.result())
        self._watchdog = asyncio.create_task(self._watch())
        return self._loaded.result()

    def submit(self, requests: list[Request]) -> None:
        """Hands requests to the core, given the first sample of each; each sample ends with one
        FinishedRecord, unless the core fails."""
        if requests:
            for first in requests:
                keys = range(first.key, first.key + first.sampling.n)
                self._num_ids.update(dict.fromkeys(keys, first.num_ids))
                self._num_ids_live += first.num_ids_of_all
            self._send(Submit(requests))

    def finish(self, keys: Sequence[int], reason: FinishReason) -> None:
        """Ends requests early; unknown and finished ones are ignored."""
        if keys:
            self._send(Finish(list(keys), int(reason)))

    async def stats(self) -> Stats:
        """The scheduler's gauges, after the step that runs now. Raises EngineUnavailable."""
        record = await self._ask(AskStats)
        assert isinstance(record, StatsRecord)
        return record.stats

    async def prepare_grammar(self, spec: GrammarSpec) -> None:
        """Waits until requests may follow the grammar, as they may until it is forgotten. Raises
        the error that refuses them, or EngineUnavailable."""
        record = await self._ask(lambda token: PrepareGrammar(token, spec))
        assert isinstance(record, GrammarPrepared)
        if record.problem:
            raise refusal_of(
                spec,
                record.problem,
                has_vocabulary=record.has_vocabulary,
                has_room=record.has_room,
            )

    def forget_grammar(self, spec: GrammarSpec) -> None:
        """The core need not keep it for requests to come; those that it has keep it themselves."""
        self._send(ForgetGrammar(spec))

    def watch_blocks(self, token: int) -> None:
        """Asks for a CachedBlocks with this token, and for BlockEvents from then on."""
        self._send(WatchBlocks(token))

    def unwatch_blocks(self) -> None:
        """Asks for no more BlockEvents."""
        self._send(UnwatchBlocks())

    async def close(self) -> None:
        """Ends the process and waits for its end; any number of times."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._fail("the engine is closed")
        if self._channel is not None:
            self._channel.close()
        else:
            self._connection.close()
        if not await self._exited(_EXIT_GRACE_S):
            self._process.kill()
            await self._exited(_EXIT_GRACE_S)

    async def _ask(
        self, question: Callable[[int], AskStats | PrepareGrammar]
    ) -> StatsRecord | GrammarPrepared:
        """The answer to a question with a token of its own. Raises EngineUnavailable."""
        if self._failed.done():
            raise EngineUnavailable(self._failed.result())
        token = next(self._tokens)
        answer: asyncio.Future[StatsRecord | GrammarPrepared]
        answer = self._answers[token] = asyncio.get_running_loop().create_future()
        try:
            self._send(question(token))
            if not await self._came(answer):
                raise EngineUnavailable(self._failed.result())
            return answer.result()
        finally:
            del self._answers[token]

    async def _came(self, answer: asyncio.Future[Any]) -> bool:
        """Waits for the answer; False when the core fails before it comes."""
        await asyncio.wait({answer, self._failed}, return_when=asyncio.FIRST_COMPLETED)
        return answer.done()

    def _send(self, record: ToCore) -> None:
        assert self._channel is not None
        self._channel.send(record)

    def _on_record(self, record: FromCore) -> None:
        match record:
            case StepRecord():
                self._steps_seen += 1
                self._num_ids_live -= sum(self._num_ids.pop(end.key) for end in record.finished)
                self._on_step(record)
            case StatsRecord() | GrammarPrepared():
                answer = self._answers.get(record.token)
                if answer is not None and not answer.done():
                    answer.set_result(record)
            case CachedBlocks() | BlockEvents():
                self._on_blocks(record)
            case Loaded():
                self._loaded.set_result(record)
            case LoadFailed(message) | Fault(message):
                self._fail(message)
            case _:
                assert_never(record)

    def _on_closed(self, error: Exception | None) -> None:
        # Writing to a core that is gone breaks the channel too: how it ended says more.
        if error is not None and not isinstance(error, ConnectionError):
            self._fail(f"the channel to the core process broke: {error!r}")
        elif not self._failed.done():
            self._reporting = asyncio.create_task(self._report_end())

    async def _report_end(self) -> None:
        """The channel is closed: says how the process ended, which takes it a moment."""
        await self._exited(_EXIT_GRACE_S)
        self._fail(f"the core process {_how_it_ended(self._process.returncode)}")

    def _fail(self, reason: str) -> None:
        if not self._failed.done():
            self._failed.set_result(reason)

    async def _watch(self) -> None:
        """Fails the core that is stuck. Counts ticks, not time: a front end that was itself held
        up (or suspended) has not seen what the core sent meanwhile."""
        tick_s = self._config.step_timeout_s / _WATCHDOG_TICKS
        ticks_without_step, steps_seen = 0, 0
        while not self._failed.done():
            await asyncio.sleep(tick_s)
            stuck = self.num_live > 0 and self._steps_seen == steps_seen
            ticks_without_step = ticks_without_step + 1 if stuck else 0
            steps_seen = self._steps_seen
            if ticks_without_step > _WATCHDOG_TICKS:
                self._fail(f"no step finished for {self._config.step_timeout_s:g} s: it is stuck")
                self._process.kill()

    async def _exited(self, timeout_s: float) -> bool:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._process.poll() is None:
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(0.005)
        return True


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "closed its channel"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
