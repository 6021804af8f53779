"""FairTurns: so many at once; of those who wait, next is the client that has the fewest."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator


class FairTurns:
    """A semaphore that clients share. Belongs to one event loop."""

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        self._taken: Counter[int] = Counter()  # by client, above 0
        # By client, never empty; of clients with equally many turns the first one is next. One who
        # was cancelled stays until it is its turn.
        self._lines: dict[int, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def turn(self, client: int) -> AsyncIterator[None]:
        """Waits for a turn, which ends with the block; a client's own come in order of arrival."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(client, deque()).append(turn)
        self._serve()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._give_back(client)

    def _give_back(self, client: int) -> None:
        self._free += 1
        self._taken[client] -= 1
        if not self._taken[client]:
            del self._taken[client]
        self._serve()

    def _serve(self) -> None:
        while self._free and self._lines:
            client = min(self._lines, key=lambda each: self._taken[each])
            line = self._lines.pop(client)
            turn = line.popleft()
            if line:
                self._lines[client] = line  # behind the others
            if not turn.cancelled():
                self._free -= 1
                self._taken[client] += 1
                turn.set_result(None)
