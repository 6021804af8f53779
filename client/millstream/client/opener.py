"""Keeps a stream open: opened when first needed, and opened anew after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from copy import copy
from typing import Any, Generic, Protocol, TypeVar

from millstream.client.connection import closing_told
from millstream.rpc.errors import Cancelled, MillstreamError


class _Stream(Protocol):
    @property
    def broken(self) -> bool: ...

    async def close(self) -> None: ...


S = TypeVar("S", bound=_Stream)


class Opener(Generic[S]):
    """Keeps one stream open. Who asks while it is being opened shares the result, or the error."""

    def __init__(self, open_stream: Callable[[], Coroutine[Any, Any, S]]) -> None:
        self._open = open_stream
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Task[S] | None = None
        self._closed = False

    @property
    def ready(self) -> S | None:
        """The stream, if it is open now."""
        task = self._opening
        if task is None or not task.done() or task.cancelled() or task.exception():
            return None
        return None if task.result().broken else task.result()

    @property
    def is_opening(self) -> bool:
        return self._opening is not None and not self._opening.done()

    async def get(self) -> S:
        if self._closed:  # since the caller came
            raise Cancelled("the client was closed")
        self._loop = self._loop or asyncio.get_running_loop()
        if self._loop is not asyncio.get_running_loop():
            raise RuntimeError("an AsyncClient belongs to the event loop that used it first")
        task = self._opening
        if task is None or (task.done() and (task.exception() or task.result().broken)):
            task = self._opening = asyncio.create_task(self._open_anew(task))
        try:
            with closing_told():
                return await asyncio.shield(task)
        except MillstreamError as error:
            raise copy(error) from None

    async def _open_anew(self, before: asyncio.Task[S] | None) -> S:
        if before is not None and not before.exception():
            await before.result().close()  # it is broken, but its tasks are still there
        return await self._open()

    async def close(self) -> None:
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()  # does nothing when it is open
            (stream,) = await asyncio.gather(self._opening, return_exceptions=True)
            if not isinstance(stream, BaseException):
                await stream.close()
