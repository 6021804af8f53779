"""grpc.health.v1 over one table of statuses.

grpcio-health-checking's own asyncio servicer forgets its other watchers when one leaves, and lets a
slow watcher hold up a change of status; hence this one, over that package's stubs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_Status = health_pb2.HealthCheckResponse.ServingStatus
_MOST_SHOWN = 100  # characters of a name, in metadata of which gRPC takes 8 KiB


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The health of "" and of each named service; NOT_SERVING until `set_serving(True)`."""

    def __init__(self, service_names: Iterable[str]) -> None:
        self._names = frozenset({"", *service_names})
        self._serving = False
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def serving(self) -> bool:
        return self._serving

    def set_serving(self, serving: bool) -> None:
        """Sets the status of every name; watchers hear of it. Call it on the event loop."""
        self._serving = serving
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """NOT_SERVING for good: watchers are told, then their streams end, which would otherwise
        hold up the server's stop."""
        self._closed = True
        self.set_serving(False)

    def _status(self, name: str) -> int:
        if name not in self._names:
            return int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        status = health_pb2.HealthCheckResponse
        return int(status.SERVING if self._serving else status.NOT_SERVING)

    async def Check(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._names:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"no service {request.service[:_MOST_SHOWN]!r} here"
            )
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        sent: int | None = None
        while True:
            changed = self._changed  # taken before the status is read: no change is missed
            status = self._status(request.service)
            if status != sent:
                yield health_pb2.HealthCheckResponse(status=status)
                sent = status
            elif self._closed:
                return
            else:
                await changed.wait()
