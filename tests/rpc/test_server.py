"""run_service: the life of a service process, with a service that only notes what happens to it."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream.rpc.server import ServerConfig, StartError, run_service


@pytest.fixture(autouse=True)
def nothing_stays_frozen() -> Iterator[None]:
    yield
    gc.unfreeze()


class Noted:
    """A Service; `events` are the calls in order."""

    names = ("test.Noted",)

    def __init__(
        self, *, load_s: float = 0, drain_s: float = 0, load_error: Exception | None = None
    ) -> None:
        self.events: list[str] = []
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._load_s = load_s
        self._drain_s = drain_s
        self._load_error = load_error

    def register(self, server: grpc.aio.Server) -> None:
        self.events.append("register")

    async def load(self) -> None:
        await asyncio.sleep(self._load_s)
        if self._load_error is not None:
            raise self._load_error
        self.events.append("load")

    async def failed(self) -> str:
        return await asyncio.shield(self.failure)

    async def drain(self, timeout_s: float) -> None:
        self.events.append(f"drain {timeout_s:g}")
        await asyncio.sleep(min(timeout_s, self._drain_s))

    async def close(self) -> None:
        self.events.append("close")


class Running:
    """A service in a task, and the parent's end of its control socket."""

    def __init__(self, service: Noted, **config: Any) -> None:
        self.service = service
        self.ours, self._theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.task = asyncio.create_task(
            run_service(service, ServerConfig(control_fd=self._theirs.fileno(), **config))
        )

    async def port(self) -> int:
        line = await asyncio.get_running_loop().sock_recv(self.ours, 1000)
        assert line.endswith(b"\n")
        return int(json.loads(line)["port"])

    async def ended(self, timeout_s: float = 5) -> int:
        async with asyncio.timeout(timeout_s):
            code = await self.task
        self.ours.close()
        self._theirs.close()
        return code


def terminate(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


async def check(port: int) -> int:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest())).status)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_closes(number: int) -> None:
    running = Running(Noted(), drain_timeout_s=3)
    assert await check(await running.port()) == health_pb2.HealthCheckResponse.SERVING
    terminate(number)
    assert await running.ended() == 0
    assert running.service.events == ["register", "load", "drain 3", "close"]


async def test_what_a_start_made_is_kept_from_the_garbage_collector() -> None:
    running = Running(Noted(load_s=0.1))
    await asyncio.sleep(0.05)
    assert gc.get_freeze_count() == 0
    await running.port()
    assert gc.get_freeze_count() > 10_000  # a full collection would look at them
    terminate()
    await running.ended()


async def test_the_end_of_the_parent_drains_and_closes() -> None:
    running = Running(Noted())
    await running.port()
    running.ours.close()
    assert await running.ended() == 0
    assert running.service.events[-2:] == ["drain 5", "close"]


async def test_a_parent_that_left_while_loading() -> None:
    running = Running(Noted(load_s=60))
    await asyncio.sleep(0.1)
    running.ours.close()
    assert await running.ended() == 0
    assert running.service.events == ["register", "close"]


async def test_row_81_a_signal_while_loading() -> None:
    running = Running(Noted(load_s=60))
    await asyncio.sleep(0.1)
    terminate()
    assert await running.ended() == 0
    assert running.service.events == ["register", "close"]


async def test_row_81_a_second_signal_cuts_the_drain_short() -> None:
    running = Running(Noted(drain_s=60), drain_timeout_s=60)
    await running.port()
    terminate()
    await asyncio.sleep(0.2)
    terminate()
    assert await running.ended() == 0
    assert running.service.events == ["register", "load", "drain 60", "drain 0", "close"]


async def test_a_failure_turns_health_first_and_gives_exit_code_1() -> None:
    running = Running(Noted())
    port = await running.port()
    running.service.failure.set_result("broken")
    await asyncio.sleep(0.1)
    assert await check(port) == health_pb2.HealthCheckResponse.NOT_SERVING
    assert await running.ended() == 1
    assert running.service.events == ["register", "load", "close"]


async def test_watchers_do_not_hold_up_the_stop() -> None:
    running = Running(Noted())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await running.port()}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        begun = time.monotonic()
        terminate()
        assert await running.ended() == 0
        assert time.monotonic() - begun < 1
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_what_keeps_it_from_loading_is_raised_after_closing() -> None:
    running = Running(Noted(load_error=StartError("no such model")))
    with pytest.raises(StartError, match="no such model"):
        await running.ended()
    assert running.service.events == ["register", "close"]


async def test_row_23_a_taken_port_is_a_start_error() -> None:
    running = Running(Noted())
    port = await running.port()
    second = Running(Noted(), port=port)
    with pytest.raises(StartError, match=f"127.0.0.1:{port}"):
        await second.ended()
    running.ours.close()
    assert await running.ended() == 0


async def test_port_0_twice_gives_two_ports() -> None:
    first, second = Running(Noted()), Running(Noted())
    assert await first.port() != await second.port()
    for running in (first, second):
        running.ours.close()
        assert await running.ended() == 0


async def test_ipv6_loopback() -> None:
    running = Running(Noted(), host="::1")
    port = await running.port()
    async with grpc.aio.insecure_channel(f"[::1]:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    running.ours.close()
    assert await running.ended() == 0
