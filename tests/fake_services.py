"""A small engine and tokenizer service that speak the protocol, with faults on demand.

Every byte is a token (id = its value); EOS is a special token, ADDED one that is not special. The
engine answers with the prompt itself, byte by byte, and then EOS; or, with ignore_eos, with the
prompt over and over. So the right answer to anything is plain to see.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from millstream.rpc.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineUnavailable,
    InvalidArgument,
    MillstreamError,
    QueueFull,
    abort,
    to_status,
)
from millstream.rpc.health import Health
from millstream.rpc.options import server_options
from millstream.tokenizer.detokenizer import Detokenizer, PieceDecoder, Pieces
from millstream.v1 import engine_pb2, engine_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

EOS, ADDED = 256, 257
EOS_TEXT, ADDED_TEXT = "<eos>", "<tool>"
VOCAB_SIZE = 258
FINGERPRINT = "f" * 64


def decoder(skip_special_tokens: bool) -> PieceDecoder:
    pieces = [chr(i) if i < 128 else bytes([i]) for i in range(256)]
    return PieceDecoder(
        Pieces(by_id=[*pieces, "" if skip_special_tokens else EOS_TEXT, ADDED_TEXT])
    )


def text_of(token_ids: list[int], skip_special_tokens: bool = True) -> str:
    one = decoder(skip_special_tokens)
    return "".join(map(one.decode, token_ids)) + one.flush()


class FakeEngine(engine_pb2_grpc.EngineServicer):
    """Set its attributes to make it misbehave; read them to see what reached it."""

    def __init__(self) -> None:
        self.info = engine_pb2.EngineInfo(
            api_version="v1",
            model="fake",
            tokenizer_fingerprint=FINGERPRINT,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[EOS],
            max_model_len=1 << 21,
            limits=engine_pb2.EngineLimits(
                max_num_seqs=64, max_queued_requests=1 << 20, max_message_bytes=64 << 20
            ),
        )
        self.step_s = 0.0
        self.tokens_per_step: Callable[[], int] = lambda: 1
        self.room = 1 << 20  # live requests beyond which QueueFull is said
        self.retry_after_s = 0.02  # its hint then
        self.draining = False  # refuses everything
        self.deaf = False  # says nothing of what is submitted
        self.break_after_tokens: int | None = None  # then the stream ends UNAVAILABLE
        self.breaks_silently = False  # as if all were well
        self.messages: list[engine_pb2.GenerateRequest] = []
        self.sent: dict[str, list[int]] = {}  # by request id, what was generated
        self.ended: dict[str, int] = {}  # by request id, the reason
        self.refused = 0
        self.api_keys: list[str] = []  # of its streams
        self.live = 0
        self.streams = 0

    async def GetEngineInfo(self, request: Any, context: Any) -> engine_pb2.GetEngineInfoResponse:
        return engine_pb2.GetEngineInfoResponse(engine=self.info)

    async def Generate(self, requests: Any, context: Any) -> None:
        self.streams += 1
        metadata = dict(context.invocation_metadata())
        self.api_keys.append(metadata.get("x-api-key", ""))
        ready = engine_pb2.Ready(engine=self.info)
        await context.write(engine_pb2.GenerateResponse(ready=ready))
        live: dict[int, _Live] = {}
        inbox: list[engine_pb2.GenerateRequest] = []
        arrived = asyncio.Event()
        reading = asyncio.create_task(_read(requests, inbox, arrived))
        try:
            while True:
                if not live:
                    if not reading.done():
                        await arrived.wait()
                    if reading.done() and not inbox:  # half-closed: no more submissions
                        return
                message = engine_pb2.GenerateResponse()
                while inbox:
                    self._obey(inbox.pop(0), live, message)
                arrived.clear()
                if self._step(live, message):
                    if self.breaks_silently:
                        return
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine broke")
                self.live = len(live)
                if message.ByteSize():
                    await context.write(message)
                await asyncio.sleep(self.step_s)
        finally:
            reading.cancel()
            for one in live.values():
                self.ended[one.request_id] = engine_pb2.FINISH_REASON_CANCELLED
            self.live = 0
            self.streams -= 1

    def _obey(
        self,
        request: engine_pb2.GenerateRequest,
        live: dict[int, _Live],
        message: engine_pb2.GenerateResponse,
    ) -> None:
        self.messages.append(request)
        for submission in () if self.deaf else request.submit:
            handle = submission.handle
            count = max(1, submission.sampling.n)
            assert not any(handle + sample in live for sample in range(count))
            if error := self._refuses(submission, live):
                self.refused += 1
                message.rejected.add(handle=handle, status=to_status(error))
                continue
            for sample in range(max(1, submission.sampling.n)):
                live[handle + sample] = one = _Live(submission, sample)
                self.sent[one.request_id] = []
                sampling = engine_pb2.SamplingParams(seed=7, n=1)
                sampling.MergeFrom(submission.sampling)
                sampling.seed += sample
                message.accepted.add(
                    handle=handle + sample, request_id=one.request_id, sampling=sampling
                )
            if submission.sampling.HasField("prompt_logprobs"):
                targets = submission.token_ids[1:]
                top = submission.sampling.prompt_logprobs
                for piece in (targets[:3], targets[3:]):
                    columns = message.prompt_logprobs.add(handle=handle).logprobs
                    score(columns, [(top, token_id) for token_id in piece])
        for handle in request.cancel:
            if one := live.pop(handle, None):
                self._finish(one, handle, message, engine_pb2.FINISH_REASON_CANCELLED)

    def _refuses(
        self, submission: engine_pb2.Submission, live: dict[int, _Live]
    ) -> Exception | None:
        if not 0 < submission.sampling.top_p <= 1 and submission.sampling.HasField("top_p"):
            return InvalidArgument("sampling.top_p: above 0, up to 1", field="sampling.top_p")
        if not submission.token_ids or max(submission.token_ids) >= VOCAB_SIZE:
            return InvalidArgument("token_ids: empty or too large", field="token_ids")
        if self.draining:
            return EngineUnavailable("the engine is stopping")
        if len(live) + max(1, submission.sampling.n) > self.room:
            return QueueFull("full", retry_after_s=self.retry_after_s)
        return None

    def _step(self, live: dict[int, _Live], message: engine_pb2.GenerateResponse) -> bool:
        """Fills in a step's outputs; whether the stream is to break now."""
        loop = asyncio.get_running_loop()
        counts = []
        scored: list[tuple[int | None, int]] = []
        for handle, one in list(live.items()):
            tokens = list(itertools.islice(one.tokens, self.tokens_per_step()))
            if tokens:
                message.output.handles.append(handle)
                message.output.token_ids.extend(tokens)
                counts.append(len(tokens))
                self.sent[one.request_id] += tokens
                scored += [(one.num_logprobs, token_id) for token_id in tokens]
                if self.break_after_tokens is not None:
                    self.break_after_tokens -= len(tokens)
                    if self.break_after_tokens <= 0:
                        self.break_after_tokens = None
                        return True
            if one.reason is not None:
                del live[handle]
                self._finish(one, handle, message, one.reason)
            elif one.deadline is not None and loop.time() > one.deadline:
                del live[handle]
                self._finish(one, handle, message, engine_pb2.FINISH_REASON_DEADLINE)
        if any(count != 1 for count in counts):
            message.output.counts.extend(counts)
        if any(count is not None for count, _ in scored):
            score(message.output.logprobs, scored)
        return False

    def _finish(
        self, one: _Live, handle: int, message: engine_pb2.GenerateResponse, reason: int
    ) -> None:
        finished = message.finished.add(handle=handle, reason=reason)
        output = self.sent[one.request_id]
        finished.usage.prompt_tokens = one.prompt_tokens
        finished.usage.output_tokens = len(output)
        finished.timings.first_token_s = 0.5
        if reason == engine_pb2.FINISH_REASON_STOP:
            finished.stop_token_id = output[-1]
        elif reason == engine_pb2.FINISH_REASON_CANCELLED:
            finished.status.CopyFrom(to_status(Cancelled("cancelled")))
        elif reason == engine_pb2.FINISH_REASON_DEADLINE:
            finished.status.CopyFrom(
                to_status(DeadlineExceeded("timeout_ms: passed", field="timeout_ms"))
            )
        self.ended[one.request_id] = reason


def score(columns: engine_pb2.Logprobs, tokens: list[tuple[int | None, int]]) -> None:
    """Adds the log probabilities of tokens, of which so many likeliest are wanted: minus the id in
    sixteenths, the likeliest are the ids above. In one message some may have none."""
    for count, token_id in tokens:
        columns.token_logprobs.append(math.nan if count is None else -token_id / 16)
        columns.top_counts.append(count or 0)
        columns.top_token_ids.extend(token_id + i for i in range(count or 0))
        columns.top_logprobs.extend(-(token_id + i) / 16 for i in range(count or 0))


class _Live:
    """A sample of a request and the tokens that it will get: the prompt's from the sample's number
    on, so that they differ."""

    names = itertools.count()

    def __init__(self, submission: engine_pb2.Submission, sample: int = 0) -> None:
        self.request_id = submission.request_id or f"fake-{next(self.names)}"
        self.request_id += f"/{sample}" if sample else ""
        self.prompt_tokens = len(submission.token_ids)
        self.num_logprobs: int | None = None
        if submission.sampling.HasField("logprobs"):
            self.num_logprobs = submission.sampling.logprobs
        self.reason: int | None = None
        self.deadline: float | None = None
        if submission.HasField("timeout_ms"):
            self.deadline = asyncio.get_running_loop().time() + submission.timeout_ms / 1000
        self.tokens = self._answer(submission, sample)

    def _answer(self, submission: engine_pb2.Submission, sample: int) -> Iterator[int]:
        prompt, sampling = list(submission.token_ids)[sample:], submission.sampling
        endless = itertools.cycle(prompt) if sampling.ignore_eos else itertools.chain(prompt, [EOS])
        for number, token_id in enumerate(endless, 1):
            stops = token_id in sampling.stop_token_ids or token_id == EOS
            if stops and not (token_id == EOS and sampling.ignore_eos):
                self.reason = engine_pb2.FINISH_REASON_STOP
            elif sampling.HasField("max_tokens") and number >= sampling.max_tokens:
                self.reason = engine_pb2.FINISH_REASON_LENGTH
            yield token_id
            if self.reason is not None:
                return


async def _read(requests: Any, inbox: list[Any], arrived: asyncio.Event) -> None:
    try:
        async for request in requests:
            inbox.append(request)
            arrived.set()
    finally:
        arrived.set()


class FakeTokenizer(tokenizer_pb2_grpc.TokenizerServicer):
    """Set its attributes to make it misbehave; read them to see what reached it."""

    def __init__(self) -> None:
        self.info = tokenizer_pb2.TokenizerInfo(
            api_version="v1", model="fake", fingerprint=FINGERPRINT, vocab_size=VOCAB_SIZE
        )
        self.fail_at_token: int | None = None  # of every sequence
        self.break_after_messages: int | None = None  # then the stream ends UNAVAILABLE
        self.hold = False  # Encode and Decode do not answer
        self.encode_error: MillstreamError | None = None
        self.deaf = False  # Detokenize does not
        self.encode_calls = 0
        self.encoded: list[str] = []
        self.decoded = 0  # sequences
        self.contexts: list[list[int]] = []
        self.open_sequences = 0
        self.messages = 0

    async def GetTokenizerInfo(
        self, request: Any, context: Any
    ) -> tokenizer_pb2.GetTokenizerInfoResponse:
        return tokenizer_pb2.GetTokenizerInfoResponse(tokenizer=self.info)

    async def Encode(
        self, request: tokenizer_pb2.EncodeRequest, context: Any
    ) -> tokenizer_pb2.EncodeResponse:
        self.encode_calls += 1
        await self._held()
        if self.encode_error is not None:
            await abort(context, self.encode_error)
        response = tokenizer_pb2.EncodeResponse()
        for one in request.inputs:
            text = one.text
            self.encoded.append(text)
            if one.HasField("chat"):
                if any(message.role == "bad" for message in one.chat.messages):
                    field = "inputs[0].chat.messages[0].role"
                    await abort(context, InvalidArgument(f"{field}: unknown", field=field))
                text = "|".join(f"{m.role}:{m.content}" for m in one.chat.messages)
            response.sequences.add(token_ids=text.encode())
        return response

    async def Decode(
        self, request: tokenizer_pb2.DecodeRequest, context: Any
    ) -> tokenizer_pb2.DecodeResponse:
        self.decoded += len(request.sequences)
        await self._held()
        skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens
        texts = [text_of(list(one.token_ids), skip) for one in request.sequences]
        return tokenizer_pb2.DecodeResponse(texts=texts)

    async def _held(self) -> None:
        while self.hold:  # noqa: ASYNC110 (nothing tells of it)
            await asyncio.sleep(0.005)

    async def Detokenize(
        self, requests: AsyncIterator[tokenizer_pb2.DetokenizeRequest], context: Any
    ) -> AsyncIterator[tokenizer_pb2.DetokenizeResponse]:
        sequences: dict[int, Detokenizer] = {}
        fed: dict[int, int] = {}
        async for request in requests:
            self.messages += 1
            if self.break_after_messages is not None:
                self.break_after_messages -= 1
                if self.break_after_messages <= 0:
                    self.break_after_messages = None
                    self.open_sequences = 0
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
            response = tokenizer_pb2.DetokenizeResponse()
            for opening in request.open:
                assert opening.handle not in sequences
                self.contexts.append(list(opening.context_token_ids))
                fed[opening.handle] = 0
                sequences[opening.handle] = Detokenizer(
                    decoder(opening.skip_special_tokens),
                    context=opening.context_token_ids,
                    stops=list(opening.stop),
                    include_stop=opening.include_stop,
                    min_tokens=opening.min_tokens,
                )
            end = 0
            tokens = request.tokens
            counts = tokens.counts or [1] * len(tokens.handles)
            for handle, count in zip(tokens.handles, counts, strict=True):
                start, end = end, end + count
                fed[handle] += count
                if self.fail_at_token is not None and fed[handle] >= self.fail_at_token:
                    del sequences[handle]
                    error = InvalidArgument("token_ids: cannot be decoded", field="token_ids")
                    response.failed.add(handle=handle, status=to_status(error))
                    continue
                text = sequences[handle].extend(tokens.token_ids[start:end])
                self._answer(sequences, handle, text, response)
            for handle in request.close:
                if handle in sequences:
                    self._answer(sequences, handle, sequences[handle].flush(), response)
                    sequences.pop(handle, None)
            self.open_sequences = len(sequences)
            if not self.deaf:
                yield response

    @staticmethod
    def _answer(
        sequences: dict[int, Detokenizer],
        handle: int,
        text: str,
        response: tokenizer_pb2.DetokenizeResponse,
    ) -> None:
        if text:
            response.handles.append(handle)
            response.texts.append(text)
        if match := sequences[handle].stopped:
            response.stopped.add(handle=handle, stop=match.stop, token_count=match.token_count)
            del sequences[handle]


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


def random_text(rng: random.Random, length: int) -> str:
    return "".join(rng.choice("abc é🙂世") for _ in range(length))
