"""What `AsyncClient.stream` returns: an asynchronous iterator of deltas that cancels when left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from millstream.client.samples import Samples
from millstream.client.types import Delta


class Stream:
    """The request starts with the first item. A loop that is left (break, exception, cancelled
    task, garbage collection, aclose) cancels it; items that were not read in time come merged."""

    def __init__(self, start: Callable[[], Awaitable[Samples]]) -> None:
        self._start = start
        self._samples: Samples | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self._ended:
            raise StopAsyncIteration
        try:
            if self._samples is None:
                self._loop = asyncio.get_running_loop()
                self._samples = await self._start()
            delta = await self._samples.next_delta()
        except BaseException:
            self.cancel()
            raise
        self._ended = self._samples.all_read
        return delta

    async def aclose(self) -> None:
        """Cancels the request if it has not ended; idempotent."""
        self.cancel()

    def cancel(self) -> None:
        """The same, to be called on the event loop."""
        if not self._ended:
            self._ended = True
            if self._samples is not None:
                self._samples.cancel()

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
        if not self._ended and self._samples is not None and self._loop is not None:
            cancel = self._samples.cancel
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(cancel)
