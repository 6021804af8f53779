"""What `AsyncClient.stream` returns: an asynchronous iterator of deltas that cancels when left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from millstream.client.generation import Generation
from millstream.client.types import Delta


class Stream:
    """The request starts with the first item. A loop that is left (break, exception, cancelled
    task, garbage collection, aclose) cancels it; items that were not read in time come merged."""

    def __init__(self, start: Callable[[], Awaitable[Generation]]) -> None:
        self._start = start
        self._generation: Generation | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self._ended:
            raise StopAsyncIteration
        try:
            if self._generation is None:
                self._loop = asyncio.get_running_loop()
                self._generation = await self._start()
            delta = await self._generation.next_delta()
        except BaseException:
            self.cancel()
            raise
        if delta.finish_reason is not None:
            self._ended = True
        return delta

    async def aclose(self) -> None:
        """Cancels the request if it has not ended; idempotent."""
        self.cancel()

    def cancel(self) -> None:
        """The same, to be called on the event loop."""
        if not self._ended:
            self._ended = True
            if self._generation is not None:
                self._generation.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # `break` does not call aclose; and the collector may run on any thread.
        if not self._ended and self._generation is not None and self._loop is not None:
            cancel = self._generation.cancel
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(cancel)
