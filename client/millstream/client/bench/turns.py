"""Whose turn it is: of several engines that take requests in turn, those that serve."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from millstream.client.connection import Connection
from millstream.client.services import ENGINE
from millstream.client.types import Health
from millstream.rpc.options import channel_options
from millstream.v1 import engine_pb2_grpc

# Or channels to one target would share a connection.
_OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)
# For the health of all, at first.
_FIRST_HEALTH_S = 1.0


class Turns:
    """Stubs of engines, on some channels to each. Belongs to one event loop."""

    def __init__(self, stubs: Sequence[tuple[str, Any]]) -> None:
        """`stubs`: with their targets."""
        self._stubs = stubs
        self._last = -1
        self._health: dict[str, Health] = {}

    def next(self) -> tuple[str, Any]:
        """The stub whose turn it is, with its target. An engine that does not serve is passed
        over, unless none does."""
        after = self._last + 1
        order = [(after + turn) % len(self._stubs) for turn in range(len(self._stubs))]
        self._last = next((index for index in order if self._serves(index)), order[0])
        return self._stubs[self._last]

    async def watch(self, engine: Connection, told: asyncio.Event) -> None:
        """Follows an engine's health, for ever; `told`: once it is known."""
        async with contextlib.aclosing(engine.watch()) as healths:
            async for self._health[engine.target] in healths:
                told.set()

    def _serves(self, index: int) -> bool:
        target, _ = self._stubs[index]
        return self._health.get(target, Health.SERVING) is Health.SERVING


@contextlib.asynccontextmanager
async def open_turns(targets: Sequence[str], num_channels: int = 1) -> AsyncIterator[Turns]:
    """So many channels to each of the targets, and one that its health comes through."""
    async with contextlib.AsyncExitStack() as opened:
        stubs = []
        for target in [*targets] * num_channels:
            options = [*channel_options(target), _OWN_CONNECTION]
            channel = grpc.aio.insecure_channel(target, options=options)
            stubs.append((target, engine_pb2_grpc.EngineStub(channel)))
            await opened.enter_async_context(channel)
        turns = Turns(stubs)
        if len(targets) > 1:
            await opened.enter_async_context(_watched(turns, targets))
        yield turns


@contextlib.asynccontextmanager
async def _watched(turns: Turns, targets: Sequence[str]) -> AsyncIterator[None]:
    connections = [
        Connection(target=target, kind="engine", service=ENGINE, timeout_s=_FIRST_HEALTH_S)
        for target in targets
    ]
    told = [asyncio.Event() for _ in targets]
    watching = [
        asyncio.create_task(turns.watch(connection, event))
        for connection, event in zip(connections, told, strict=True)
    ]
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_HEALTH_S):
                for event in told:
                    await event.wait()
        yield
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        for connection in connections:
            await connection.close()
