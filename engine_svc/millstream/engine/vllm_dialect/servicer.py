"""The RPCs of vllm.grpc.engine.VllmEngine, over the same EngineService as millstream.v1.

Each Generate is a stream with one submission; what goes in and comes out of it is translated
(submission.py, generation.py), nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc
from smg_grpc_proto.generated import common_pb2 as common

from millstream.engine.frontend.clients import api_key
from millstream.engine.frontend.servicer import CANCELLATIONS_PER_TURN
from millstream.engine.frontend.streams import Stream
from millstream.engine.plan import RunnerInfo
from millstream.engine.service import Dialect, EngineService
from millstream.engine.vllm_dialect.describe import LoadReports, model_info, server_info
from millstream.engine.vllm_dialect.generation import Generation
from millstream.engine.vllm_dialect.kv_events import Batches
from millstream.engine.vllm_dialect.stop_detokenizers import StopDetokenizers
from millstream.engine.vllm_dialect.submission import in_vllm_terms, to_submission
from millstream.engine.vllm_dialect.tokenizer_zip import tokenizer_chunks
from millstream.rpc.errors import (
    Cancelled,
    CursorExpired,
    DuplicateHandle,
    EngineUnavailable,
    MillstreamError,
    Unsupported,
    abort,
)

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class _Running:
    """A Generate that runs, for who aborts it."""

    stream: Stream
    aborted: bool = False


class VllmServicer(vllm_grpc.VllmEngineServicer):  # type: ignore[misc]
    """Everything runs on the event loop."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._running: dict[str, _Running] = {}
        self._detokenizers = StopDetokenizers()
        self._loads = LoadReports()
        self._started_at = time.monotonic()
        self._last_request = 0.0

    # ---- generation

    # Not an async generator: see EngineServicer.Generate.
    async def Generate(self, request: vllm.GenerateRequest, context: Context) -> None:
        self._last_request = time.time()
        async with _answering(context):
            key = api_key(context.invocation_metadata())
            with self._service.open_stream(key) as stream, self._named(request, stream) as running:
                await self._generate(request, running, context)

    @contextmanager
    def _named(self, request: vllm.GenerateRequest, stream: Stream) -> Iterator[_Running]:
        """While it runs, Abort finds the request by its id. One without an id cannot be aborted
        but by its RPC's end."""
        request_id, running = request.request_id, _Running(stream)
        if request_id in self._running:
            raise DuplicateHandle(f"request_id: {request_id!r} is running", field="request_id")
        if request_id:
            self._running[request_id] = running
        try:
            yield running
        finally:
            self._running.pop(request_id, None)

    async def _generate(
        self, request: vllm.GenerateRequest, running: _Running, context: Context
    ) -> None:
        info, stream = self._loaded(), running.stream
        submission, stops = to_submission(request, max_model_len=info.max_model_len)
        new_detokenizer = None
        if stops.strings:
            await self._detokenizers.load(self._service.model.path)
            new_detokenizer = partial(self._detokenizers.new, stops, context=submission.token_ids)
        generation = Generation(
            list(submission.token_ids),
            stream=request.stream,
            logprobs=submission.sampling.HasField("logprobs"),
            prompt_logprobs=submission.sampling.HasField("prompt_logprobs"),
            eos_token_ids=info.eos_token_ids,
            detokenizer=new_detokenizer,
        )
        if running.aborted:  # while the tokenizer was loading
            raise Cancelled("the request was aborted before the engine had it")
        self._service.submit(stream, [submission])
        stream.end_when_idle(None)
        while (message := await stream.next()) is not None:
            answers = list(generation.take(message))
            self._service.cancel(stream, generation.stopped)
            for answer in answers:
                await context.write(answer)
                self._service.count_message()

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        for number, request_id in enumerate(request.request_ids, 1):
            running = self._running.get(request_id)
            if running is not None and not running.aborted:
                running.aborted = True
                self._service.cancel(running.stream, running.stream.live_handles)
            if number % CANCELLATIONS_PER_TURN == 0:
                await asyncio.sleep(0)
        return vllm.AbortResponse()

    # ---- what there is

    async def HealthCheck(
        self, request: vllm.HealthCheckRequest, context: Context
    ) -> vllm.HealthCheckResponse:
        unavailable = self._service.unavailable
        return vllm.HealthCheckResponse(
            healthy=unavailable is None, message=unavailable or "the engine serves"
        )

    async def GetModelInfo(
        self, request: vllm.GetModelInfoRequest, context: Context
    ) -> vllm.GetModelInfoResponse:
        async with _answering(context):
            info, model = self._loaded(), self._service.model
            defaults = self._service.sampling_defaults
            return await asyncio.to_thread(
                model_info, info, name=model.name, model_dir=model.path, defaults=defaults
            )

    async def GetServerInfo(
        self, request: vllm.GetServerInfoRequest, context: Context
    ) -> vllm.GetServerInfoResponse:
        async with _answering(context):
            return server_info(
                self._loaded(),
                await self._service.stats(),
                uptime_s=time.monotonic() - self._started_at,
                last_request=self._last_request,
            )

    async def GetLoads(
        self, request: vllm.GetLoadsRequest, context: Context
    ) -> vllm.GetLoadsResponse:
        async with _answering(context):
            if request.dp_rank:
                raise Unsupported("dp_rank: only 0, there is one", field="dp_rank")
            return self._loads.report(self._loaded(), await self._service.stats())

    async def GetTokenizer(self, request: common.GetTokenizerRequest, context: Context) -> None:
        async with _answering(context):
            self._loaded()
            path = self._service.model.path
            for chunk in await asyncio.to_thread(lambda: list(tokenizer_chunks(path))):
                await context.write(chunk)

    async def SubscribeKvEvents(
        self, request: common.SubscribeKvEventsRequest, context: Context
    ) -> None:
        async with _answering(context):
            if request.start_sequence_number:
                raise CursorExpired(
                    "start_sequence_number: no history is kept, subscribe with 0",
                    field="start_sequence_number",
                )
            batches = Batches()
            with self._service.watch_blocks() as watcher:
                for batch in batches.snapshot(await watcher.next()):
                    await context.write(batch)
                while True:
                    for batch in batches.live(await watcher.next()):
                        await context.write(batch)

    # ---- what there is not

    async def Embed(self, request: vllm.EmbedRequest, context: Context) -> None:
        await _refuse("Embed: text generation only", context)

    async def FlushCache(self, request: common.FlushCacheRequest, context: Context) -> None:
        await _refuse("FlushCache: the prefix cache gives way by itself", context)

    async def StartProfile(self, request: common.StartProfileRequest, context: Context) -> None:
        await _refuse("StartProfile: no profiler", context)

    async def StopProfile(self, request: common.StopProfileRequest, context: Context) -> None:
        await _refuse("StopProfile: no profiler", context)

    def _loaded(self) -> RunnerInfo:
        """What the core told once it was loaded. Raises EngineUnavailable before."""
        if self._service.info is None:
            raise EngineUnavailable(self._service.unavailable or "")
        return self._service.info


@asynccontextmanager
async def _answering(context: Context) -> AsyncIterator[None]:
    """Around every method: gives its errors their status."""
    try:
        yield
    except MillstreamError as error:
        await abort(context, in_vllm_terms(error))
    except (asyncio.CancelledError, grpc.aio.AbortError):
        raise
    except Exception as error:
        logger.exception("a call failed")
        await abort(context, error)


async def _refuse(why: str, context: Context) -> None:
    await abort(context, Unsupported(why))


def _register(service: EngineService, server: grpc.aio.Server) -> None:
    vllm_grpc.add_VllmEngineServicer_to_server(VllmServicer(service), server)


DIALECT = Dialect(
    service_name=vllm.DESCRIPTOR.services_by_name["VllmEngine"].full_name, register=_register
)
