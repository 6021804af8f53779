"""Whoever waits while the client is closed ends with Cancelled, wherever it waits; a task that is
cancelled itself sees CancelledError, as any other."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from tests.fake_services import FakeServices, until

from millstream.client import AsyncClient, Client, Health, SamplingParams
from millstream.rpc.errors import Cancelled, EngineUnavailable

ENDLESS = SamplingParams(ignore_eos=True)

Call = Callable[[AsyncClient], Awaitable[Any]]


async def _stream(client: AsyncClient) -> None:
    async for _ in client.stream("x", ENDLESS):
        pass


CALLS: dict[str, Call] = {
    "generate": lambda client: client.generate("x", ENDLESS),
    "a list": lambda client: client.generate(["x", "y"], ENDLESS),
    "chat": lambda client: client.chat([{"role": "user", "content": "x"}], ENDLESS),
    "stream": _stream,
    "encode": lambda client: client.encode("x"),
    "decode": lambda client: client.decode([1]),
    "info": lambda client: client.info(),
}


@pytest.fixture
def silent() -> Iterator[str]:
    """A target that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def ends(client: AsyncClient, tasks: list[asyncio.Task[Any]]) -> list[Any]:
    await client.close()
    async with asyncio.timeout(5):
        return await asyncio.gather(*tasks, return_exceptions=True)


def exactly_cancelled(outcomes: list[Any]) -> bool:
    return all(type(outcome) is Cancelled for outcome in outcomes)


@pytest.mark.parametrize("name", CALLS)
async def test_while_the_streams_are_opened(name: str, silent: str) -> None:
    client = AsyncClient(silent, silent, timeout_s=60)
    tasks = [asyncio.create_task(CALLS[name](client)) for _ in range(3)]  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    outcomes = await ends(client, tasks)
    assert exactly_cancelled(outcomes), outcomes
    with pytest.raises(EngineUnavailable, match="closed"):
        await CALLS[name](client)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "info"])
async def test_while_the_tokenizer_works(name: str, services: FakeServices) -> None:
    """Ten calls of each: more than are made at once, so some have not begun."""
    client = AsyncClient(services.target, services.target)
    await client.encode("opens the stream")
    services.tokenizer.hold = True
    tasks = [asyncio.create_task(CALLS[name](client)) for _ in range(10)]  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    outcomes = await ends(client, tasks)
    services.tokenizer.hold = False
    assert exactly_cancelled(outcomes), outcomes


async def test_while_generating_waiting_for_a_place_and_for_room(services: FakeServices) -> None:
    services.engine.info.limits.max_num_seqs = 4
    services.engine.info.limits.max_queued_requests = 0
    services.engine.room, services.engine.step_s = 2, 0.005
    client = AsyncClient(services.target, services.target)
    generate = client.generate(["x"] * 8, ENDLESS, return_exceptions=True)
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(generate)]
    tasks += [asyncio.create_task(_stream(client)) for _ in range(2)]
    await until(lambda: services.engine.live == 2 and services.engine.refused > 2)
    (in_list, *streams) = await ends(client, tasks)
    assert exactly_cancelled(in_list), in_list
    assert all(isinstance(outcome, Exception) for outcome in streams)
    await until(lambda: not services.engine.live)


async def test_health_never_raises(silent: str) -> None:
    client = AsyncClient(silent, silent)
    task = asyncio.create_task(client.health())
    await asyncio.sleep(0.05)
    (health,) = await ends(client, [task])
    assert (health.engine, health.tokenizer) == (Health.UNREACHABLE, Health.UNREACHABLE)


@pytest.mark.parametrize("name", CALLS)
async def test_a_task_that_is_cancelled_itself(name: str, silent: str) -> None:
    async with AsyncClient(silent, silent, timeout_s=60) as client:
        task = asyncio.create_task(CALLS[name](client))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("call", ["generate", "encode", "decode"])
def test_without_asyncio(threaded_services: FakeServices, call: str) -> None:
    client = Client(threaded_services.target, threaded_services.target)
    client.encode("opens the stream")
    threaded_services.tokenizer.hold = True
    outcomes: list[BaseException] = []

    def wait() -> None:
        try:
            getattr(client, call)([1] if call == "decode" else "x")
        except BaseException as error:
            outcomes.append(error)

    threads = [threading.Thread(target=wait, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    threading.Event().wait(0.1)
    client.close()
    for thread in threads:
        thread.join(5)
    threaded_services.tokenizer.hold = False
    assert len(outcomes) == 6
    assert exactly_cancelled(outcomes), outcomes
