"""Places: several at once, first come, first served, and nobody held up by one who left."""

from __future__ import annotations

import asyncio
import random

import pytest

from millstream.client.places import Places


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_one_who_leaves_the_line_does_not_hold_up_those_behind() -> None:
    places = Places(4)
    assert await places.take(2) == 2
    greedy = asyncio.create_task(places.take(4))
    modest = asyncio.create_task(places.take(1))
    await turns()
    assert not modest.done(), "first come, first served"
    greedy.cancel()
    await turns()
    assert modest.done()


async def test_places_that_came_in_the_moment_of_a_cancellation_are_given_back() -> None:
    places = Places(1)
    await places.take(1)
    waiting = asyncio.create_task(places.take(1))
    await turns()
    places.give_back(1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(1):
        assert await places.take(9) == 1


@pytest.mark.parametrize("seed", range(5))
async def test_random_takers_never_have_more_than_there_are(seed: int) -> None:
    rng = random.Random(seed)
    places, taken = Places(5), 0

    async def user() -> None:
        nonlocal taken
        count = await places.take(rng.randint(1, 7))
        taken += count
        assert taken <= 5
        try:
            await asyncio.sleep(rng.choice([0, 0, 0.001]))
        finally:
            taken -= count
            places.give_back(count)

    users = [asyncio.create_task(user()) for _ in range(300)]
    for each in rng.sample(users, 150):
        await asyncio.sleep(0)
        each.cancel()
    async with asyncio.timeout(10):
        results = await asyncio.gather(*users, return_exceptions=True)
        assert not [each for each in results if isinstance(each, AssertionError)]
        assert await places.take(5) == 5
