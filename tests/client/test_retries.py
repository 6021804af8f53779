"""A full queue: who waits how long, how often; and who gets the engine's places."""

from __future__ import annotations

import asyncio
import random

import pytest
from tests.fake_services import FakeServices, until

from millstream.client import AsyncClient, SamplingParams
from millstream.client.places import Places
from millstream.client.retries import delay_s
from millstream.rpc.errors import DeadlineExceeded, InvalidArgument, QueueFull


async def test_retries_are_bounded_when_asked(client: AsyncClient, services: FakeServices) -> None:
    services.engine.room = 0
    for retries in (0, 1, 3):
        services.engine.refused = 0
        began = asyncio.get_running_loop().time()
        with pytest.raises(QueueFull) as caught:
            await client.generate("x", max_retries=retries)
        took_s = asyncio.get_running_loop().time() - began
        assert caught.value.retry_after_s == 0.02
        assert services.engine.refused == 1 + retries
        assert took_s >= 0.02 * retries, "the engine's hint is the least"


async def test_a_stream_retries_when_asked(client: AsyncClient, services: FakeServices) -> None:
    services.engine.room = 0
    with pytest.raises(QueueFull):
        async for _ in client.stream("x", max_retries=2):
            pass
    assert services.engine.refused == 3

    async def make_room() -> None:
        await until(lambda: services.engine.refused >= 5)
        services.engine.room = 1

    room = asyncio.create_task(make_room())
    deltas = [delta async for delta in client.stream("hello", max_retries=1000)]
    await room
    assert "".join(delta.text for delta in deltas) == "hello"
    services.engine.room = 0
    with pytest.raises(DeadlineExceeded):
        async for _ in client.stream("x", max_retries=1000, timeout_s=0.1):
            pass


async def test_leaving_while_it_waits_for_room(client: AsyncClient, services: FakeServices) -> None:
    services.engine.room = 0
    task = asyncio.create_task(anext(client.stream("x", max_retries=1000)))  # type: ignore[arg-type]
    await until(lambda: services.engine.refused >= 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    services.engine.room = 1
    assert (await client.generate("ab")).text == "ab"


@pytest.mark.parametrize("value", [-1, 1.5, True, "1"])
async def test_bad_options(client: AsyncClient, value: object) -> None:
    with pytest.raises(InvalidArgument, match=r"^max_retries: "):
        await client.generate("x", max_retries=value)  # type: ignore[call-overload]
    bad = 2**31 if value == -1 else value
    with pytest.raises(InvalidArgument, match=r"^priority: "):
        await client.generate("x", priority=bad)  # type: ignore[call-overload]


async def test_priority_travels(client: AsyncClient, services: FakeServices) -> None:
    await client.generate("x", priority=-7)
    await client.generate("x")
    sent = [one.priority for message in services.engine.messages for one in message.submit]
    assert sent == [-7, 0]


def test_waits_are_the_hint_and_a_random_part_more() -> None:
    rng = random.Random(0)
    waits = [delay_s(2.0, attempt, rng) for attempt in range(200)]
    assert all(2.0 <= wait <= 3.0 for wait in waits)
    assert max(waits) - min(waits) > 0.8
    without_hint = [delay_s(None, attempt, rng) for attempt in range(2000)]
    assert 0.1 <= without_hint[0] <= 0.15
    assert 0.8 <= without_hint[3] <= 1.2
    assert all(5.0 <= wait <= 7.5 for wait in without_hint[6:])


@pytest.mark.parametrize("seed", range(10))
async def test_places_are_never_more_and_come_in_turn(seed: int) -> None:
    rng = random.Random(seed)
    places, most = Places(7), 7
    held, served, asked = 0, [], []

    async def one(number: int) -> None:
        nonlocal held
        wanted = rng.choice([1, 1, 2, 5, 7, 20])
        asked.append(number)
        got = await places.take(wanted)
        served.append(number)
        held += got
        assert got == min(wanted, most)
        assert held <= most
        try:
            await asyncio.sleep(rng.choice([0, 0, 0.001]))
        finally:
            held -= got
            places.give_back(got)

    tasks = [asyncio.create_task(one(number)) for number in range(60)]
    for _ in range(15):
        await asyncio.sleep(0)
        rng.choice(tasks).cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ends)
    assert served == [number for number in asked if number in set(served)]
    assert len(served) >= 40
    assert await places.take(7) == 7, "none is lost"


async def test_a_request_of_many_samples_is_not_starved_by_small_ones(
    client: AsyncClient, services: FakeServices
) -> None:
    services.engine.info.limits.max_num_seqs = 4
    services.engine.info.limits.max_queued_requests = 0
    services.engine.room, services.engine.step_s = 4, 0.001
    params = [SamplingParams(max_tokens=5)] * 40
    params[2] = SamplingParams(max_tokens=5, n=4)
    await client.generate(["some text"] * 40, params)
    sizes = [one.sampling.n for message in services.engine.messages for one in message.submit]
    assert sizes.index(4) == 2
