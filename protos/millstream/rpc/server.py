"""The life of a service process: bind, load, serve, drain, stop. Both services run through it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from millstream.rpc.health import SERVICE_NAME as HEALTH_SERVICE_NAME
from millstream.rpc.health import Health
from millstream.rpc.options import DEFAULT_MAX_MESSAGE_BYTES, address, server_options
from millstream.rpc.process import freeze_what_lives
from millstream.rpc.undecodable import UndecodableRequests

logger = logging.getLogger(__name__)

CLOSE_GRACE_S = 2.0
# After a failure: how long the port stays open, so that health checks and streams hear of it.
FAILURE_NOTICE_S = 0.5


class StartError(Exception):
    """The service cannot start: one clear line for the person who started it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where a service listens and how it stops."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    drain_timeout_s: float = 5.0
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    # A connected socket of the parent process, if it wants one: the service writes a JSON line
    # {"port": N} there once it serves, and stops when the other end is closed.
    control_fd: int | None = None


class Service(Protocol):
    """What differs between the two services. All of it runs on the event loop."""

    @property
    def names(self) -> tuple[str, ...]:
        """Full names of its gRPC services."""

    def register(self, server: grpc.aio.Server) -> None:
        """Adds its servicers."""

    async def load(self) -> None:
        """Gets ready to serve; raises StartError."""

    async def failed(self) -> str:
        """Returns why, once the service can serve no longer; otherwise never."""

    async def drain(self, timeout_s: float) -> None:
        """Refuses new work and lets what is there finish, for so long at most, then ends it."""

    async def close(self) -> None:
        """Frees everything; also after a failed `load`."""


async def run_service(service: Service, config: ServerConfig) -> int:
    """Runs a service until a signal, its parent's end or its failure; returns the exit code."""
    stop_requested = asyncio.Event()
    _install_signals(stop_requested)  # first: a server must not be cancelled while it starts
    health = Health(service.names)
    server = grpc.aio.server(
        interceptors=[UndecodableRequests()], options=server_options(config.max_message_bytes)
    )
    port = _register_and_bind(server, service, health, config)
    await server.start()
    control = asyncio.create_task(_watch_control(config.control_fd, stop_requested))
    failure: str | None = None
    try:
        started = time.monotonic()
        loading = asyncio.create_task(service.load())
        if await _first(loading, stop_requested.wait()) is not loading:
            logger.info("stopped while loading")
            return 0
        loading.result()
        freeze_what_lives()
        health.set_serving(True)
        listening = address(config.host, port)
        logger.info("serving on %s after %.1f s", listening, time.monotonic() - started)
        _announce(config.control_fd, port)
        failing = asyncio.create_task(service.failed())
        if await _first(failing, stop_requested.wait()) is failing:
            failure = failing.result()
            logger.error("cannot serve any longer: %s", failure)
        health.set_serving(False)
        if failure is not None:
            await asyncio.sleep(FAILURE_NOTICE_S)
        else:
            logger.info("stopping: draining for up to %.1f s", config.drain_timeout_s)
            stop_requested.clear()  # a second signal cuts the drain short
            draining = asyncio.create_task(service.drain(config.drain_timeout_s))
            if await _first(draining, stop_requested.wait()) is not draining:
                await service.drain(0)
    finally:
        health.close()
        control.cancel()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(service.close(), CLOSE_GRACE_S)
        await server.stop(CLOSE_GRACE_S)
    logger.info("stopped")
    return 0 if failure is None else 1


async def _first(task: asyncio.Task[Any], other: Coroutine[Any, Any, Any]) -> Awaitable[Any]:
    """Waits for either; returns the task when it is done, else cancels it and returns the other."""
    waiting = asyncio.create_task(other)
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    loser = waiting if task.done() else task
    loser.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await loser
    return task if loser is waiting else waiting


def _register_and_bind(
    server: grpc.aio.Server, service: Service, health: Health, config: ServerConfig
) -> int:
    from grpc_health.v1 import health_pb2_grpc

    from millstream.rpc.reflection import enable_reflection

    service.register(server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    enable_reflection((*service.names, HEALTH_SERVICE_NAME), server)
    wanted = address(config.host, config.port)
    try:
        port = server.add_insecure_port(wanted)
    except RuntimeError:
        port = 0
    if port == 0:
        raise StartError(f"cannot listen on {wanted}: the port is taken or the host is not ours")
    return int(port)


def _install_signals(stop_requested: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop_requested.set)


def _announce(control_fd: int | None, port: int) -> None:
    if control_fd is not None:
        with contextlib.suppress(OSError):  # a parent that is gone is _watch_control's business
            os.write(control_fd, json.dumps({"port": port}).encode() + b"\n")


async def _watch_control(control_fd: int | None, stop_requested: asyncio.Event) -> None:
    if control_fd is None:
        return
    loop = asyncio.get_running_loop()
    closed = asyncio.Event()
    loop.add_reader(control_fd, closed.set)  # the parent never writes: readable means closed
    try:
        await closed.wait()
        stop_requested.set()
    finally:
        loop.remove_reader(control_fd)
