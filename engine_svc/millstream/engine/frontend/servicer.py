"""The RPCs of millstream.v1.Engine: a translation between gRPC and the EngineService."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from millstream.engine.frontend.clients import api_key
from millstream.engine.frontend.streams import Stream
from millstream.engine.service import Dialect, EngineService
from millstream.rpc.errors import EngineFault, MillstreamError, abort
from millstream.rpc.undecodable import undecodable
from millstream.v1 import engine_pb2, engine_pb2_grpc

logger = logging.getLogger(__name__)

# What is taken before other streams get a turn: short samples, about 10 ms of them; a large request
# counts for as many as it has pieces of so many bytes. And cancellations, a millisecond.
SAMPLES_PER_TURN = 512
_SAMPLE_BYTES = 256
CANCELLATIONS_PER_TURN = 8192

Context = grpc.aio.ServicerContext[Any, Any]


class EngineServicer(engine_pb2_grpc.EngineServicer):
    """Everything runs on the event loop."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    async def GetEngineInfo(
        self, request: engine_pb2.GetEngineInfoRequest, context: Context
    ) -> engine_pb2.GetEngineInfoResponse:
        try:
            return engine_pb2.GetEngineInfoResponse(engine=self._service.engine_info)
        except MillstreamError as error:
            await abort(context, error)

    async def GetStats(
        self, request: engine_pb2.GetStatsRequest, context: Context
    ) -> engine_pb2.GetStatsResponse:
        try:
            return await self._service.stats()
        except MillstreamError as error:
            await abort(context, error)

    # Not an async generator: grpc would leave it suspended, and its `finally` to the garbage
    # collector, when the RPC is cancelled while a message is being written.
    async def Generate(  # type: ignore[override]
        self, request_iterator: AsyncIterator[engine_pb2.GenerateRequest], context: Context
    ) -> None:
        try:
            key = api_key(context.invocation_metadata())
            with self._service.open_stream(key) as stream:
                await self._serve(stream, request_iterator, context)
        except MillstreamError as error:
            await abort(context, error)

    async def _serve(
        self,
        stream: Stream,
        requests: AsyncIterator[engine_pb2.GenerateRequest],
        context: Context,
    ) -> None:
        """Until the stream ends. Raises its error; cancelled when the RPC is."""
        reading = asyncio.create_task(self._read(stream, requests))
        try:
            await self._write(stream, context)
        finally:
            reading.cancel()

    async def _write(self, stream: Stream, context: Context) -> None:
        message: engine_pb2.GenerateResponse | None
        ready = engine_pb2.Ready(engine=self._service.engine_info)
        message = engine_pb2.GenerateResponse(ready=ready)
        while message is not None:
            await context.write(message)
            self._service.count_message()
            message = await stream.next()

    async def _read(
        self, stream: Stream, requests: AsyncIterator[engine_pb2.GenerateRequest]
    ) -> None:
        """Obeys a stream's messages until it is half-closed. Fails the stream, never in silence."""
        try:
            async for message in requests:
                for submissions in _turns(message.submit):
                    self._service.submit(stream, submissions)
                    await asyncio.sleep(0)
                    await stream.room()
                for first in range(0, len(message.cancel), CANCELLATIONS_PER_TURN):
                    handles = message.cancel[first : first + CANCELLATIONS_PER_TURN]
                    self._service.cancel(stream, dict.fromkeys(handles))
                    await asyncio.sleep(0)
            stream.end_when_idle(None)
        except DecodeError:
            stream.fail(undecodable("a GenerateRequest"))
        except Exception:
            logger.exception("reading a stream failed")
            stream.fail(EngineFault("internal error; the service's log has it"))


def _turns(submissions: Iterable[engine_pb2.Submission]) -> Iterator[list[engine_pb2.Submission]]:
    """Cuts so that each piece costs about as much as SAMPLES_PER_TURN short samples."""
    turn: list[engine_pb2.Submission] = []
    room = SAMPLES_PER_TURN
    for submission in submissions:
        turn.append(submission)
        room -= max(1, submission.sampling.n) + submission.ByteSize() // _SAMPLE_BYTES
        if room <= 0:
            yield turn
            turn, room = [], SAMPLES_PER_TURN
    if turn:
        yield turn


def _register(service: EngineService, server: grpc.aio.Server) -> None:
    engine_pb2_grpc.add_EngineServicer_to_server(EngineServicer(service), server)


DIALECT = Dialect(
    service_name=engine_pb2.DESCRIPTOR.services_by_name["Engine"].full_name, register=_register
)
