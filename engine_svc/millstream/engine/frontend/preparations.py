"""Requests whose grammar is being compiled: on hold, neither accepted nor refused yet.

Others go on meanwhile, on the same stream too. The core is asked for a few grammars at a time, and
clients take turns at it: one that comes with many does not keep others waiting. The core keeps a
grammar that is prepared until it is told to forget it: none that a request is on hold for is
forgotten, and none of the last ones, with which requests are accepted at once. A held request that
is cancelled is ended as soon as it is accepted: a client sees the same as of any other. One whose
time is up is refused at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from millstream.engine.frontend.fair_turns import FairTurns
from millstream.engine.frontend.streams import Hold, Stream
from millstream.engine.records import handle_of
from millstream.engine.request import GrammarSpec, Request
from millstream.rpc.errors import MillstreamError

_MAX_READY = 64
# The core compiles two at a time. More, and a client waits for so many of another's, up to 2 s
# each; fewer, and the core has none to compile in the time of a step, which is when it listens.
_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSubmission:
    """The samples of one submission, which all follow one grammar."""

    stream: Stream
    samples: list[Request]
    grammar: GrammarSpec
    timers: list[asyncio.TimerHandle | None]  # of their deadlines

    @property
    def num_ids(self) -> int:
        """Of all samples together."""
        return self.samples[0].num_ids_of_all


class Preparations:
    """Everything runs on the event loop."""

    def __init__(
        self,
        prepare: Callable[[GrammarSpec], Awaitable[None]],
        forget: Callable[[GrammarSpec], None],
        *,
        on_ready: Callable[[HeldSubmission], None],
        on_refused: Callable[[HeldSubmission, Exception], None],
    ) -> None:
        """`prepare` waits until a grammar is compiled, or raises what refuses it."""
        self._prepare = prepare
        self._forget = forget
        self._on_ready = on_ready
        self._on_refused = on_refused
        self._turns = FairTurns(_AT_ONCE)
        self._num_held = 0
        self._num_ids_held = 0
        self._awaited: Counter[GrammarSpec] = Counter()  # by submissions on hold
        self._ready: OrderedDict[GrammarSpec, None] = OrderedDict()  # prepared, the latest last

    def is_ready(self, grammar: GrammarSpec) -> bool:
        """Whether requests need not wait, if they are submitted now: it was prepared lately."""
        if grammar in self._ready:
            self._ready.move_to_end(grammar)
            return True
        return False

    @property
    def num_held(self) -> int:
        """Requests on hold."""
        return self._num_held

    @property
    def num_ids_held(self) -> int:
        """Token ids that they hold."""
        return self._num_ids_held

    def hold(self, held: HeldSubmission) -> None:
        """Calls on_ready or on_refused in a while, unless the stream is closed before."""
        self._num_held += len(held.samples)
        self._num_ids_held += held.num_ids
        self._awaited[held.grammar] += 1
        task = asyncio.create_task(self._wait(held))
        task.add_done_callback(lambda _: self._release(held))
        for sample, timer in zip(held.samples, held.timers, strict=True):
            hold = Hold(task=task, timer=timer, give_up=partial(self._give_up, held, task))
            held.stream.hold(handle_of(sample.key), hold)

    def _give_up(
        self, held: HeldSubmission, task: asyncio.Task[None], error: MillstreamError
    ) -> None:
        task.cancel()
        self._on_refused(held, error)

    def _release(self, held: HeldSubmission) -> None:
        self._num_held -= len(held.samples)
        self._num_ids_held -= held.num_ids
        self._awaited[held.grammar] -= 1
        self._forget_unless_wanted(held.grammar)

    def _forget_unless_wanted(self, grammar: GrammarSpec) -> None:
        if self._awaited[grammar] == 0:
            del self._awaited[grammar]
            if grammar not in self._ready:
                self._forget(grammar)

    async def _wait(self, held: HeldSubmission) -> None:
        try:
            async with self._turns.turn(held.stream.client.number):
                if held.grammar not in self._ready:
                    await self._prepare(held.grammar)
        except Exception as error:
            self._on_refused(held, error)
        else:
            self._ready[held.grammar] = None
            self._ready.move_to_end(held.grammar)
            if len(self._ready) > _MAX_READY:
                self._forget_unless_wanted(self._ready.popitem(last=False)[0])
            self._on_ready(held)
