"""Turns that clients share: how many at once, whose is next, and what cancellations leave."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter

from millstream.engine.frontend.fair_turns import FairTurns


class Workers:
    """Who has a turn, in the order in which they got one; each ends when it is told to."""

    def __init__(self, at_once: int) -> None:
        self.turns = FairTurns(at_once)
        self.got: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    def start(self, client: int, *names: str) -> None:
        for name in names:
            self._ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._work(client, name))

    async def _work(self, client: int, name: str) -> None:
        async with self.turns.turn(client):
            self.got.append(name)
            await self._ends[name].wait()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self.tasks[name]
        await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_client_has_all_turns_in_order_while_it_is_alone() -> None:
    workers = Workers(2)
    workers.start(7, *"abcd")
    await settled()
    assert workers.got == ["a", "b"]
    for name in "bacd":
        await workers.end(name)
    assert workers.got == ["a", "b", "c", "d"]


async def test_a_newcomer_is_next_however_many_others_one_client_has() -> None:
    workers = Workers(2)
    workers.start(7, *(f"a{number}" for number in range(50)))
    await settled()
    workers.start(8, "b0", "b1", "b2")
    workers.start(9, "c0")
    for name in ("a0", "a1", "b0", "a2", "c0"):
        await workers.end(name)
    assert workers.got == ["a0", "a1", "b0", "a2", "c0", "b1", "a3"]
    for task in workers.tasks.values():
        task.cancel()


async def test_cancelled_at_any_time_nobody_keeps_a_turn() -> None:
    rng = random.Random(3)
    turns, now, most = FairTurns(3), Counter[int](), 0

    async def work(client: int) -> None:
        nonlocal most
        async with turns.turn(client):
            now[client] += 1
            most = max(most, now.total())
            try:
                for _ in range(rng.randrange(6)):
                    await asyncio.sleep(0)
                if rng.random() < 0.2:
                    raise ValueError("the work fails")
            finally:
                now[client] -= 1

    tasks: list[asyncio.Task[None]] = []
    for _ in range(3000):
        tasks.append(asyncio.create_task(work(rng.randrange(5))))
        if rng.random() < 0.4:
            rng.choice(tasks[-12:]).cancel()
        if rng.random() < 0.5:
            await asyncio.sleep(0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(each, asyncio.CancelledError) for each in results) > 300
    assert most == 3 and not now.total()
    assert turns._free == 3 and not turns._lines and not turns._taken
    async with contextlib.AsyncExitStack() as stack:
        for client in range(3):
            await stack.enter_async_context(turns.turn(client))
