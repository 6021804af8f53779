"""Who watches the prefix cache. The core notes and tells events only while somebody does.

Each watcher hears first what is cached at the moment, then of every change since, in order. One
that reads too slowly is cut off rather than kept waiting for: it starts again with what is cached.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from typing import assert_never

from millstream.engine.frontend.supervisor import Supervisor
from millstream.engine.records import BlockEvents, CachedBlocks
from millstream.engine.scheduling.prefix import BlockEvent, BlockStored
from millstream.rpc.errors import FellBehind, MillstreamError

# A watcher may lag by so many events and by as many again as there were blocks at its start.
MAX_EVENTS_WAITING = 1 << 16


class BlockWatcher:
    """One watcher's unread events. All of it runs on the event loop."""

    def __init__(self) -> None:
        self._started = False
        self._events: list[BlockEvent] = []
        self._room = MAX_EVENTS_WAITING
        self._failure: MillstreamError | None = None
        self._wake = asyncio.Event()

    def start(self, cached: list[BlockEvent]) -> None:
        """What is cached. Events that were added before are part of it."""
        self._started = True
        self._events = cached
        self._room += len(cached)
        self._wake.set()

    def add(self, events: list[BlockEvent]) -> None:
        """What changed since."""
        if not self._started or self._failure is not None:
            return
        self._events.extend(events)
        if len(self._events) > self._room:
            self._events = []
            self.fail(FellBehind(f"more than {self._room} events were not read in time"))
        self._wake.set()

    def fail(self, error: MillstreamError) -> None:
        """Ends the watch with `error`, at once."""
        self._failure = self._failure or error
        self._wake.set()

    async def next(self) -> list[BlockEvent]:
        """Waits for events. The first call returns a BlockStored for each cached block, maybe for
        none, a prefix before its continuations. Raises what ends the watch."""
        await self._wake.wait()
        if self._failure is not None:
            raise self._failure
        self._wake.clear()
        events, self._events = self._events, []
        return events


class BlockWatchers:
    """All watchers of one core."""

    def __init__(self) -> None:
        self._watchers: dict[int, BlockWatcher] = {}
        self._tokens = itertools.count()

    @contextlib.contextmanager
    def open(self, core: Supervisor) -> Iterator[BlockWatcher]:
        """One more watcher; the last one to leave turns the core's notes off."""
        token = next(self._tokens)
        watcher = self._watchers[token] = BlockWatcher()
        core.watch_blocks(token)
        try:
            yield watcher
        finally:
            del self._watchers[token]
            if not self._watchers:
                core.unwatch_blocks()

    def on_record(self, record: CachedBlocks | BlockEvents) -> None:
        """Hands on what the core tells."""
        match record:
            case CachedBlocks(token, names):
                if (watcher := self._watchers.get(token)) is not None:
                    watcher.start([BlockStored(name) for name in names])
            case BlockEvents(events):
                for watcher in self._watchers.values():
                    watcher.add(events)
            case _:
                assert_never(record)

    def fail(self, error: MillstreamError) -> None:
        """Ends every watch with `error`."""
        for watcher in self._watchers.values():
            watcher.fail(error)
