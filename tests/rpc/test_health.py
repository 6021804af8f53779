"""grpc.health.v1: Check and Watch, for "" and each name, with any number of watchers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream.rpc.health import Health

Response = health_pb2.HealthCheckResponse


@pytest.fixture
async def served() -> AsyncIterator[tuple[Health, health_pb2_grpc.HealthStub]]:
    server = grpc.aio.server()
    health = Health(["a.Service"])
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield health, health_pb2_grpc.HealthStub(channel)
    health.close()
    await server.stop(5)


def request(service: str = "") -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


async def test_check(served: tuple[Health, health_pb2_grpc.HealthStub]) -> None:
    health, stub = served
    for serving, status in ((False, Response.NOT_SERVING), (True, Response.SERVING)):
        health.set_serving(serving)
        for name in ("", "a.Service"):
            assert (await stub.Check(request(name))).status == status
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stub.Check(request("no.Service"))
    assert failure.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_long_name_is_cut(served: tuple[Health, health_pb2_grpc.HealthStub]) -> None:
    """gRPC takes 8 KiB of metadata: the caller heard RESOURCE_EXHAUSTED, of the metadata."""
    _, stub = served
    for name in ("x" * 10_000, "\N{SNOWMAN}" * 10_000):
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.Check(request(name))
        assert failure.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watchers_are_independent(
    served: tuple[Health, health_pb2_grpc.HealthStub],
) -> None:
    health, stub = served
    first, second = stub.Watch(request()), stub.Watch(request("a.Service"))
    unknown = stub.Watch(request("no.Service"))
    async with asyncio.timeout(10):
        assert (await first.read()).status == Response.NOT_SERVING
        assert (await second.read()).status == Response.NOT_SERVING
        assert (await unknown.read()).status == Response.SERVICE_UNKNOWN
        first.cancel()  # one leaves, the other still hears
        health.set_serving(True)
        assert (await second.read()).status == Response.SERVING
        health.set_serving(True)  # no change, no message
        health.set_serving(False)
        assert (await second.read()).status == Response.NOT_SERVING


async def test_close_ends_watches_after_their_last_word(
    served: tuple[Health, health_pb2_grpc.HealthStub],
) -> None:
    health, stub = served
    health.set_serving(True)
    watch = stub.Watch(request())
    async with asyncio.timeout(10):
        assert (await watch.read()).status == Response.SERVING
        health.close()
        assert (await watch.read()).status == Response.NOT_SERVING
        assert await watch.read() is grpc.aio.EOF
        assert await watch.code() is grpc.StatusCode.OK
