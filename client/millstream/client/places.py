"""Places: how many requests one engine takes at once; whoever wants more of them waits in line."""

from __future__ import annotations

import asyncio
from collections import deque


class Places:
    """A semaphore whose users take several places together, first come, first served. Belongs to
    one event loop."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = count
        # Who waits, and for how many. One who was cancelled stays until it is its turn.
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, wanted: int) -> int:
        """Waits for so many places, or for all of them if it wants more; how many it got, which
        give_back must have again."""
        wanted = min(wanted, self._count)
        if not self._line and wanted <= self._free:
            self._free -= wanted
            return wanted
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((wanted, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it got them in the same moment
                self.give_back(wanted)
            else:
                self._serve()  # it may hold up those behind it
            raise
        return wanted

    def give_back(self, count: int) -> None:
        self._free += count
        self._serve()

    def _serve(self) -> None:
        while self._line and (self._line[0][1].cancelled() or self._line[0][0] <= self._free):
            wanted, turn = self._line.popleft()
            if not turn.cancelled():
                self._free -= wanted
                turn.set_result(None)
