"""Deadlines that the client keeps itself: a service may be suspended, or lost in the network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from millstream.rpc.errors import DeadlineExceeded

T = TypeVar("T")

_LAST_WORD_S = 1.0


async def until(deadline: float | None, waiting: Awaitable[T], what: str) -> T:
    """Waits; `deadline` in seconds of the loop's clock, None: for ever. Raises DeadlineExceeded,
    which says that it came before `what`."""
    if deadline is None:
        return await waiting
    try:
        async with asyncio.timeout_at(deadline) as limit:
            return await waiting
    except TimeoutError:
        if not limit.expired():  # the work's own
            raise
        raise DeadlineExceeded(f"timeout_s: it passed before {what}") from None


def last_word(deadline: float | None) -> float | None:
    """Until when to wait for an engine, which ends the request at the deadline and says more of it.
    Never less than a moment from now: what has come is read first."""
    if deadline is None:
        return None
    return max(deadline, asyncio.get_running_loop().time()) + _LAST_WORD_S
