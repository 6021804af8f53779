"""How requests reach an engine and how their tokens are timed: on the client's one stream, on a
stream each, or as text through the tokenizer service. All belong to one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import grpc

from millstream.client.aio import AsyncClient
from millstream.client.bench.progress import Progress
from millstream.client.bench.traces import StreamTraces, Trace
from millstream.client.bench.turns import Turns
from millstream.client.call_end import CallEnd
from millstream.client.connection import service_error
from millstream.client.engine_stream import Observer
from millstream.client.engines import engine_targets
from millstream.client.naming import from_service
from millstream.client.types import Health
from millstream.client.workload import Requests
from millstream.rpc.errors import EngineUnavailable, MillstreamError
from millstream.rpc.sampling_params import to_proto
from millstream.v1 import engine_pb2


class Sender(Protocol):
    """Sends requests, named by ids that no two have at once, and tells what came of them."""

    async def prepare(self, requests: Requests) -> Requests:
        """What `send` needs besides prompts; before the clock starts."""

    async def send(self, requests: Requests, ids: Sequence[str], sent_s: float) -> list[Trace]:
        """Sends all of them at once and returns when they have ended; `sent_s`, by
        time.perf_counter(): when they were due. A request's own failure is its trace's error."""

    async def none_lives(self) -> bool:
        """Whether a further request would wait for an engine in vain: to be asked when one has
        failed with EngineUnavailable."""


class OneStream:
    """All requests on one Generate stream (of each engine), by AsyncClient.generate with ids."""

    def __init__(self, progress: Progress) -> None:
        """`client` is to be set before `send`, and to have observers from here."""
        self.client: AsyncClient | None = None
        self._progress = progress
        self._traces: dict[str, Trace] = {}

    def new_observer(self) -> Observer:
        """For one engine's stream: two would use the same handles."""
        stream = StreamTraces(self._traces)

        def observe(message: engine_pb2.GenerateResponse) -> None:
            stream.note(time.perf_counter(), message)
            self._progress.note(
                num_tokens=len(message.output.token_ids), num_ended=len(message.finished)
            )

        return observe

    async def prepare(self, requests: Requests) -> Requests:
        return requests

    async def send(self, requests: Requests, ids: Sequence[str], sent_s: float) -> list[Trace]:
        assert self.client is not None
        traces = {request_id: Trace(sent_s=sent_s) for request_id in ids}
        self._traces.update(traces)
        try:
            outputs = await self.client.generate(
                requests.prompts,
                requests.params,
                request_id=ids,
                detokenize=False,
                return_exceptions=True,
                use_tqdm=False,
            )
        finally:
            for request_id in ids:
                del self._traces[request_id]
        for trace, output in zip(traces.values(), outputs, strict=True):
            if isinstance(output, MillstreamError):
                trace.error = output
        return list(traces.values())

    async def none_lives(self) -> bool:
        assert self.client is not None
        return await _none_lives(self.client)


class StreamPerRequest:
    """A Generate stream for each request, as clients behind a balancing proxy do, over a few
    channels. A full queue is a failure here: nothing is sent again."""

    def __init__(
        self,
        client: AsyncClient,
        turns: Turns,
        progress: Progress,
    ) -> None:
        """`client`: of the same engines; it is asked whether any is left."""
        self._client = client
        self._turns = turns
        self._progress = progress

    async def prepare(self, requests: Requests) -> Requests:
        return requests

    async def send(self, requests: Requests, ids: Sequence[str], sent_s: float) -> list[Trace]:
        return await asyncio.gather(
            *(
                self._send_one(prompt, params, request_id, sent_s)
                for prompt, params, request_id in zip(
                    requests.prompts, requests.params, ids, strict=True
                )
            )
        )

    async def none_lives(self) -> bool:
        return not await _serves(self._client)

    async def _send_one(self, prompt: Any, params: Any, request_id: str, sent_s: float) -> Trace:
        trace = Trace(sent_s=sent_s)
        try:
            submission = engine_pb2.Submission(
                handle=1, token_ids=prompt, sampling=to_proto(params), request_id=request_id
            )
            await self._follow(submission, trace)
        except MillstreamError as error:
            trace.error = trace.error or error
        self._progress.note(num_ended=1)
        return trace

    async def _follow(self, submission: engine_pb2.Submission, trace: Trace) -> None:
        """Submits on a stream and reads that to its end. Raises why there is no answer, unless the
        trace has it."""
        stream = StreamTraces({submission.request_id: trace})
        target, stub = self._turns.next()
        call = stub.Generate()
        end = CallEnd(call)
        has_finished = False
        try:
            await call.write(engine_pb2.GenerateRequest(submit=[submission]))
            await call.done_writing()
            while (message := await call.read()) is not grpc.aio.EOF:
                stream.note(time.perf_counter(), message)
                self._progress.note(num_tokens=len(message.output.token_ids))
                for rejected in message.rejected:
                    raise from_service(rejected.status)
                has_finished = has_finished or bool(message.finished)
        except grpc.aio.AioRpcError as failure:
            raise service_error("engine", target, end.error or failure) from None
        finally:
            call.cancel()
        if not has_finished:
            raise EngineUnavailable(f"the engine at {target} closed the stream")


class TextStreams:
    """Text in and out: each request is encoded, generated and detokenized, by AsyncClient.stream.
    Tokens count when they are here with their text."""

    def __init__(self, client: AsyncClient, progress: Progress) -> None:
        self._progress = progress
        self._client = client

    async def prepare(self, requests: Requests) -> Requests:
        return replace(requests, texts=await self._client.decode(requests.prompts))

    async def send(self, requests: Requests, ids: Sequence[str], sent_s: float) -> list[Trace]:
        assert requests.texts is not None
        return await asyncio.gather(
            *(
                self._send_one(text, params, request_id, sent_s)
                for text, params, request_id in zip(
                    requests.texts, requests.params, ids, strict=True
                )
            )
        )

    async def none_lives(self) -> bool:
        return await _none_lives(self._client)

    async def _send_one(self, text: str, params: Any, request_id: str, sent_s: float) -> Trace:
        trace = Trace(sent_s=sent_s)
        try:
            async for delta in self._client.stream(text, params, request_id=request_id):
                if delta.token_ids:
                    trace.pieces.append((time.perf_counter(), len(delta.token_ids)))
                    self._progress.note(num_tokens=len(delta.token_ids))
                if delta.usage is not None:
                    trace.prompt_tokens = delta.usage.prompt_tokens
                    trace.cached_tokens = delta.usage.cached_tokens
        except MillstreamError as error:
            trace.error = error
        self._progress.note(num_ended=1)
        return trace


async def _none_lives(client: AsyncClient) -> bool:
    """Of requests on the client's own streams: where the only engine's broke, the run is over,
    though another engine may come to the same place."""
    return len(engine_targets(client.engine_target)) == 1 or not await _serves(client)


async def _serves(client: AsyncClient) -> bool:
    health = await client.health()
    return health.engine is Health.SERVING and health.tokenizer in (None, Health.SERVING)
