"""The samples of one prompt as their reader sees them: deltas of whichever has news, one output."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Sequence

from millstream.client.deadlines import last_word, until
from millstream.client.generation import Generation
from millstream.client.types import Delta, Output
from millstream.rpc.errors import QueueFull


class Samples:
    """Generations that share `changed`, and one reader who waits for it."""

    def __init__(
        self, generations: Sequence[Generation], changed: asyncio.Event, deadline: float | None
    ) -> None:
        """`deadline`: in seconds of the loop's clock; the engine keeps it, too."""
        self._generations = generations
        self._changed = changed
        self._deadline = deadline
        self._unread = deque(generations)  # their last delta was not taken yet

    async def answered(self) -> None:
        """Waits until the engine took or refused the request; they are taken together."""
        while not self._generations[0].answered:
            await self._next_change()

    async def wait_done(self) -> None:
        while not all(generation.done for generation in self._generations):
            await self._next_change()

    @property
    def found_queue_full(self) -> QueueFull | None:
        """The refusal, if the engine's queue had no room for them."""
        error = self._generations[0].error
        return error if isinstance(error, QueueFull) else None

    @property
    def never_taken(self) -> bool:
        """As Generation's; they are taken together."""
        return self._generations[0].never_taken

    @property
    def all_read(self) -> bool:
        """Whether next_delta gave the last delta of each sample."""
        return not self._unread

    async def next_delta(self) -> Delta:
        """What came of one sample since it was last its turn. Raises the error of any, and
        DeadlineExceeded when the services are silent beyond the deadline, as all that waits."""
        while True:
            for generation in list(self._unread):
                if (delta := generation.news()) is not None:
                    self._unread.remove(generation)
                    if delta.finish_reason is None:
                        self._unread.append(generation)  # the others' turn
                    return delta
            await self._next_change()

    def output(self) -> Output:
        """The first sample's output, with the others in it; raises their first error. Call it when
        they are done."""
        first, *others = [generation.output() for generation in self._generations]
        return dataclasses.replace(first, other_samples=others) if others else first

    def cancel(self) -> None:
        """The reader wants no more; idempotent."""
        for generation in self._generations:
            generation.cancel()

    async def _next_change(self) -> None:
        await until(last_word(self._deadline), self._changed.wait(), "the services answered")
        self._changed.clear()
