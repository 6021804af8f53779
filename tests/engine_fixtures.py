"""Fixtures of modules whose tests share engines: `server = engine_fixture(...)`, and
`stub = stub_fixture("server")` for a connection of each test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from tests.engine_processes import EngineProcess, connect, engine

from millstream.v1 import engine_pb2_grpc

AtEnd = Callable[[engine_pb2_grpc.EngineStub], Awaitable[None]]


def engine_fixture(runner: str, *flags: str, slots: int, queued: int) -> Any:
    """One engine for a module's tests, with so many slots and places for requests that wait;
    `runner` as in `package.module:function`."""

    @pytest.fixture(scope="module")
    def server() -> Iterator[EngineProcess]:
        limits = f"--max-num-seqs {slots} --max-queued-requests {queued}".split()
        with engine(*limits, *flags, runner=runner) as started:
            yield started

    return server


def stub_fixture(server: str, *, at_end: AtEnd | None = None) -> Any:
    """For each test a connection to the engine of the fixture of this name; `at_end` checks what
    the test has left there."""

    @pytest.fixture
    async def stub(request: pytest.FixtureRequest) -> AsyncIterator[engine_pb2_grpc.EngineStub]:
        started: EngineProcess = request.getfixturevalue(server)
        async with connect(started.target) as connected:
            yield connected
            if at_end is not None:
                await at_end(connected)

    return stub
