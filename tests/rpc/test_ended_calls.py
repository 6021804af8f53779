"""A call that its server ends is said to be unavailable, whatever gRPC itself makes of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from millstream.rpc.errors import EngineUnavailable, MillstreamError, abort, from_rpc_error


@contextlib.asynccontextmanager
async def _server() -> AsyncIterator[tuple[grpc.aio.Server, grpc.aio.Channel]]:
    """Answers each Ask, and ends each Talk with EngineUnavailable."""

    async def ask(request: Any, context: Any) -> bytes:
        return b"answer"

    async def talk(requests: Any, context: Any) -> None:
        await abort(context, EngineUnavailable("stopping"))

    handlers = {
        "Ask": grpc.unary_unary_rpc_method_handler(ask),
        "Talk": grpc.stream_stream_rpc_method_handler(talk),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("test.Service", handlers)]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield server, channel
    finally:
        await server.stop(0)


async def _talk(channel: grpc.aio.Channel) -> MillstreamError:
    call: Any = channel.stream_stream("/test.Service/Talk")()
    try:
        with contextlib.suppress(asyncio.InvalidStateError):  # it has ended
            while True:
                await call.write(b"word")
        await call.read()
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("it ended well")


async def _ask_until_it_fails(channel: grpc.aio.Channel) -> MillstreamError:
    ask: Any = channel.unary_unary("/test.Service/Ask")
    try:
        while True:
            await ask(b"question")
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)


async def test_a_write_that_meets_the_end_of_its_stream() -> None:
    async with _server() as (_, channel):
        seen = [await _talk(channel) for _ in range(300)]
    assert {type(error) for error in seen} == {EngineUnavailable}


async def test_calls_that_a_stopping_server_has_not_looked_at() -> None:
    async with _server() as (server, channel):
        asking = [asyncio.create_task(_ask_until_it_fails(channel)) for _ in range(50)]
        await asyncio.sleep(0.02)
        await server.stop(0)
        seen = await asyncio.gather(*asking)
    assert {type(error) for error in seen} == {EngineUnavailable}
