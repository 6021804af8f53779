"""The fake engine and the fake tokenizer service on a port of their own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import grpc
from grpc_health.v1 import health_pb2_grpc
from tests.fake_engine import FakeEngine
from tests.fake_tokenizer import FakeTokenizer

from millstream.rpc.health import Health
from millstream.rpc.options import server_options
from millstream.v1 import engine_pb2_grpc, tokenizer_pb2_grpc


class FakeServices:
    """Both services on one port, as `engine` and `tokenizer`; `target` is where."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.tokenizer = FakeTokenizer()
        self.health = Health(["millstream.v1.Engine", "millstream.v1.Tokenizer"])
        self.health.set_serving(True)
        self.target = ""
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> None:
        self._server = grpc.aio.server(options=server_options())
        engine_pb2_grpc.add_EngineServicer_to_server(self.engine, self._server)
        tokenizer_pb2_grpc.add_TokenizerServicer_to_server(self.tokenizer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        self.target = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)


@contextlib.asynccontextmanager
async def fake_services() -> AsyncIterator[FakeServices]:
    services = FakeServices()
    await services.start()
    try:
        yield services
    finally:
        await services.stop()


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Waits for something that happens on a server."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (nothing tells us of it)
            await asyncio.sleep(0.005)


async def settled(services: FakeServices) -> None:
    """Waits until nothing is left on the servers."""
    await until(lambda: not services.engine.live and not services.tokenizer.open_sequences)
