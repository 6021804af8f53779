"""A channel to one service: waits until it serves, asks for its health, names it in errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream.client.naming import in_keywords
from millstream.client.types import Health
from millstream.rpc.errors import Cancelled, EngineUnavailable, MillstreamError, from_rpc_error
from millstream.rpc.options import channel_options

_CHECK_TIMEOUT_S = 5.0
_RETRY_S = 0.2
# A service that is just starting is found within this, not within gRPC's own 20 s.
_RECONNECT = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
]


@contextlib.contextmanager
def closing_told() -> Iterator[None]:
    """Whoever waits for a service while the client is closed is told so, with Cancelled. Only a
    task that is itself cancelled sees CancelledError."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Cancelled("the client was closed") from None


class Connection:
    """Belongs to the event loop that is running when it is first used."""

    def __init__(self, *, target: str, kind: str, service: str, timeout_s: float) -> None:
        """`kind` is "engine" or "tokenizer", `service` the full name of its gRPC service."""
        self.target = target
        self.kind = kind
        self._service = service
        self._timeout_s = timeout_s
        self._channel: grpc.aio.Channel | None = None

    @property
    def channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            options = [*channel_options(self.target), *_RECONNECT]
            self._channel = grpc.aio.insecure_channel(self.target, options=options)
        return self._channel

    async def wait_serving(self) -> None:
        """Returns once the service is SERVING; raises EngineUnavailable if it is not in time."""
        seen = "cannot be reached"
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                contextlib.aclosing(self.watch()) as healths,
            ):
                async for health in healths:
                    if health is Health.SERVING:
                        return
                    if health is Health.NOT_SERVING:
                        seen = "is not serving"
                    elif health is Health.ABSENT:
                        seen = "is not there: another service listens"
        except TimeoutError:
            raise EngineUnavailable(
                f"the {self.kind} at {self.target} {seen} (waited {self._timeout_s:g} s)"
            ) from None

    async def check(self) -> Health:
        """The health at this moment; does not wait for a service that is not there."""
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        request = health_pb2.HealthCheckRequest(service=self._service)
        try:
            with closing_told():
                response = await stub.Check(request, timeout=_CHECK_TIMEOUT_S)
        except Cancelled:
            return Health.UNREACHABLE
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return Health.ABSENT
            found = error.code() is grpc.StatusCode.UNIMPLEMENTED
            return Health.NOT_SERVING if found else Health.UNREACHABLE
        return _health(response)

    async def watch(self) -> AsyncGenerator[Health, None]:
        """The health now and at each change, for ever; survives the service's restarts."""
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        request = health_pb2.HealthCheckRequest(service=self._service)
        last: Health | None = None
        while True:
            # Waiting for the channel fails at no time, but says nothing of a service that is away.
            call = stub.Watch(request, wait_for_ready=last is Health.UNREACHABLE)
            try:
                async for response in call:
                    last = _health(response)
                    yield last
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:  # no health service: assume well
                    yield Health.SERVING
                    return
            finally:
                call.cancel()
            if last is Health.UNREACHABLE:
                await asyncio.sleep(_RETRY_S)
            else:
                last = Health.UNREACHABLE
                yield last

    def error(self, error: grpc.RpcError) -> MillstreamError:
        """The exception behind a failed RPC of this service."""
        return service_error(self.kind, self.target, error)

    async def close(self) -> None:
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()


def service_error(kind: str, target: str, error: grpc.RpcError) -> MillstreamError:
    """The exception behind a failed RPC of a service; which one, where it is unavailable."""
    translated = in_keywords(from_rpc_error(error))
    if isinstance(translated, EngineUnavailable):
        return EngineUnavailable(
            f"the {kind} at {target} is unavailable: {translated.message}",
            retry_after_s=translated.retry_after_s,
        )
    return translated


def _health(response: Any) -> Health:
    status = health_pb2.HealthCheckResponse
    if response.status == status.SERVICE_UNKNOWN:
        return Health.ABSENT
    return Health.SERVING if response.status == status.SERVING else Health.NOT_SERVING
