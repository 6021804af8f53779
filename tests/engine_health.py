"""What an engine's health service tells, for tests."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream.rpc.options import channel_options

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class HealthWatch:
    """Every status that Watch tells, for "" and for the engine's name."""

    def __init__(self, target: str, service: str = "") -> None:
        self._channel = grpc.aio.insecure_channel(target, options=channel_options(target))
        self.stub = health_pb2_grpc.HealthStub(self._channel)
        self._call = self.stub.Watch(health_pb2.HealthCheckRequest(service=service))

    async def next(self, timeout_s: float = 10) -> int:
        async with asyncio.timeout(timeout_s):
            return int((await self._call.read()).status)

    async def check(self, service: str = "") -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        return int((await self.stub.Check(request, timeout=5)).status)

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()
