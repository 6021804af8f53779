"""The engines of one client: a request goes to the one that has least to do, and room for it.

    several targets --> a Connection and an Opener each --> those that are open --> choose()

An engine that is away is left out, and tried again when somebody submits; only while none is there
does anyone wait. What an engine has to do, and may have cached, is told from what this client gave
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import statistics
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from millstream.client.connection import Connection
from millstream.client.engine_stream import EngineStream
from millstream.client.jobs import PROMPT_LOAD, Job
from millstream.client.opener import Opener
from millstream.client.prefixes import beginnings
from millstream.client.types import Health
from millstream.rpc.errors import EngineUnavailable, FingerprintMismatch, MillstreamError
from millstream.rpc.values import check_list, check_text, refusal

# Once one engine is open, at first: for the others, before all requests go to that one.
_OTHERS_S = 1.0
# The load that an engine may have beyond others' because prompts' beginnings are cached there: so
# much, and a share of the mean. Else one that has what everybody asks about gets it all.
_UNEVEN_LOAD, _UNEVEN_SHARE = 1024, 0.25


def engine_targets(engine: str | Sequence[str] | None) -> list[str]:
    """The targets of a client's `engine`. Raises InvalidArgument."""
    if engine is None:
        return []
    if isinstance(engine, str):
        return [check_target("engine", engine)]
    targets = check_list("engine", engine, "a gRPC target or a list of them")
    if not targets or len(set(targets)) < len(targets):
        raise refusal("engine", "a list of different gRPC targets", engine)
    return [check_target("engine", target) for target in targets]


def check_target(name: str, target: str) -> str:
    if not check_text(name, target):
        raise refusal(name, "a gRPC target such as localhost:50051", target)
    return target


class Engines:
    """Belongs to the event loop on which it is first used."""

    def __init__(
        self,
        connections: Sequence[Connection],
        open_stream: Callable[[Connection], Coroutine[Any, Any, EngineStream]],
    ) -> None:
        self.connections = connections
        self._openers = [
            Opener(functools.partial(open_stream, connection)) for connection in connections
        ]
        self._some = Opener(self._open_some)
        self._reopening: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self.connections)

    async def opened(self) -> None:
        """Waits until one can take requests. Raises EngineUnavailable if none can in time, and
        FingerprintMismatch if they are not for one tokenizer."""
        if not self._openers:
            raise EngineUnavailable("this client has no engine service (engine=None)")
        if len(self._openers) == 1:
            await self._openers[0].get()
            return
        await self._some.get()
        for opener in self._openers:
            if opener.ready is None and not opener.is_opening:
                task = asyncio.create_task(_try(opener))
                self._reopening.add(task)
                task.add_done_callback(self._reopening.discard)

    def any_ready(self) -> EngineStream:
        """An open stream. Raises EngineUnavailable."""
        for stream in self._ready():
            return stream
        raise EngineUnavailable("no engine is there any more")

    def choose(self, job: Job, avoid: Collection[EngineStream] = ()) -> EngineStream:
        """The open stream for an encoded job: the one with the least load, less what it saves there
        that a prompt with this beginning came before. One that is full only if all are, and one of
        `avoid` only if there is no other. Raises EngineUnavailable."""
        ready = self._ready()
        if len(ready) < 2:
            return self.any_ready()
        submission = job.submission
        numbers = beginnings(submission.cache_salt, submission.token_ids)
        cached = {each: each.prefixes.num_tokens(numbers) for each in ready}
        most = _UNEVEN_LOAD + _UNEVEN_SHARE * statistics.fmean(each.load for each in ready)
        chosen = min(
            [stream for stream in ready if stream not in avoid] or ready,
            key=lambda each: (each.is_full, each.load - min(cached[each] * PROMPT_LOAD, most)),
        )
        job.cached_tokens = cached[chosen]
        chosen.prefixes.add(numbers)
        return chosen

    async def check(self) -> Health | None:
        """Of the healthiest; None without engines."""
        healths = await asyncio.gather(*(each.check() for each in self.connections))
        order = (Health.SERVING, Health.NOT_SERVING, Health.ABSENT, Health.UNREACHABLE)
        return min(healths, key=order.index, default=None)

    async def close(self) -> None:
        await self._some.close()
        await asyncio.gather(*(opener.close() for opener in self._openers))
        await asyncio.gather(*self._reopening)
        for connection in self.connections:
            await connection.close()

    # ----

    def _ready(self) -> list[EngineStream]:
        return [stream for opener in self._openers if (stream := opener.ready) is not None]

    async def _open_some(self) -> _SomeEngine:
        """Waits for the first one, and a moment for the others."""
        opening = [asyncio.create_task(opener.get()) for opener in self._openers]
        try:
            pending: set[asyncio.Task[EngineStream]] = set(opening)
            while pending and not self._ready():
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if pending:
                await asyncio.wait(pending, timeout=_OTHERS_S)
        finally:
            for task in opening:
                task.cancel()  # what it waits for goes on
            results = await asyncio.gather(*opening, return_exceptions=True)
        errors = [each for each in results if isinstance(each, MillstreamError)]
        if not self._ready():
            raise errors[0] if errors else EngineUnavailable("no engine serves")
        _check_same([stream.engine.tokenizer_fingerprint for stream in self._ready()])
        return _SomeEngine(self._ready)


def _check_same(fingerprints: Sequence[str]) -> None:
    if len(set(fingerprints)) > 1:
        raise FingerprintMismatch(
            "the engines serve models with different tokenizers: "
            + ", ".join(fingerprint[:12] or "none" for fingerprint in fingerprints)
        )


async def _try(opener: Opener[EngineStream]) -> None:
    with contextlib.suppress(MillstreamError):
        await opener.get()


class _SomeEngine:
    """What is open while one of several engines is."""

    def __init__(self, ready: Callable[[], list[EngineStream]]) -> None:
        self._ready = ready

    @property
    def broken(self) -> bool:
        return not self._ready()

    async def close(self) -> None:
        """The engines are closed one by one."""
