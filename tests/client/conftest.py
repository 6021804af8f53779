"""The fake services, on the test's own loop and on a thread, and clients of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.fake_services import FakeServices, fake_services

from millstream.client import AsyncClient


@pytest.fixture
async def services() -> AsyncIterator[FakeServices]:
    async with fake_services() as running:
        yield running


@pytest.fixture
async def client(services: FakeServices) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(services.target, services.target, timeout_s=2) as running:
        yield running


@pytest.fixture
def threaded_services() -> Iterator[FakeServices]:
    """For the synchronous client and the command line."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> FakeServices:
        running = FakeServices()
        await running.start()
        return running

    running = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    yield running
    asyncio.run_coroutine_threadsafe(running.stop(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def targets(threaded_services: FakeServices) -> list[str]:
    """The flags that name them."""
    return ["--engine", threaded_services.target, "--tokenizer", threaded_services.target]
