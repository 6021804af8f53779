"""The tokenizer service: its gRPC methods and its life cycle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from millstream.rpc.errors import (
    EngineFault,
    EngineUnavailable,
    InvalidArgument,
    MessageTooLarge,
    MillstreamError,
    abort,
)
from millstream.rpc.threads import in_daemon_thread
from millstream.rpc.undecodable import undecodable
from millstream.rpc.version import API_VERSION, millstream_version
from millstream.tokenizer.codec import Codec
from millstream.tokenizer.config import TokenizerConfig
from millstream.tokenizer.detokenizer import UnknownTokenId
from millstream.tokenizer.encoder import EncodeLimits, Encoder
from millstream.tokenizer.session import DetokenizeSession
from millstream.v1 import tokenizer_pb2, tokenizer_pb2_grpc

logger = logging.getLogger(__name__)

# Detokenize messages up to this size (about 2000 tokens) cost less than a hop to a thread and back
# would delay the others; larger ones must not hold the event loop up.
_MAX_INLINE_BYTES = 8 * 1024
_DRAIN_POLL_S = 0.02
_CALLS_END_S = 1.0

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTokenizer:
    """What a service serves."""

    name: str
    fingerprint: str
    codec: Codec


class TokenizerService(tokenizer_pb2_grpc.TokenizerServicer):
    """millstream.v1.Tokenizer, and a `Service` for run_service. All of it on the event loop."""

    names = (tokenizer_pb2.DESCRIPTOR.services_by_name["Tokenizer"].full_name,)

    def __init__(
        self,
        config: TokenizerConfig,
        find_tokenizer: Callable[[], LoadedTokenizer],
        *,
        max_message_bytes: int,
    ) -> None:
        """find_tokenizer: may block for minutes (a download); raises StartError."""
        self._config = config
        self._find_tokenizer = find_tokenizer
        self._max_message_bytes = max_message_bytes
        self._pool = ThreadPoolExecutor(config.threads, thread_name_prefix="encode")
        self._tokenizer: LoadedTokenizer | None = None
        self._encoder: Encoder | None = None
        self._unavailable: EngineUnavailable | None = EngineUnavailable("the tokenizer is loading")
        # The calls in progress; a Detokenize stream's session, None for a unary call.
        self._calls: dict[asyncio.Task[Any], DetokenizeSession | None] = {}

    # ---- life cycle

    def register(self, server: grpc.aio.Server) -> None:
        tokenizer_pb2_grpc.add_TokenizerServicer_to_server(self, server)

    async def load(self) -> None:
        self._tokenizer = await in_daemon_thread(self._find_tokenizer, name="load")
        limits = EncodeLimits(
            max_text_bytes=self._config.max_text_bytes, timeout_s=self._config.encode_timeout_s
        )
        self._encoder = Encoder(
            self._tokenizer.codec, self._pool, threads=self._config.threads, limits=limits
        )
        self._unavailable = None

    async def failed(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("nothing here fails for good")

    async def drain(self, timeout_s: float) -> None:
        self._unavailable = EngineUnavailable("the service is stopping")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        for session in self._calls.values():
            if session is not None:
                session.draining = True
        while self._is_busy() and loop.time() < deadline:  # noqa: ASYNC110 (many things end it)
            await asyncio.sleep(_DRAIN_POLL_S)
        await self._end_calls()

    async def close(self) -> None:
        self._unavailable = self._unavailable or EngineUnavailable("the service is stopping")
        await self._end_calls()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _is_busy(self) -> bool:
        """Whether anybody waits for something; a stream without open sequences does not."""
        return any(session is None or session.open_count for session in self._calls.values())

    async def _end_calls(self) -> None:
        calls = list(self._calls)
        for call in calls:
            call.cancel()  # _answering turns that into a status
        if calls:
            await asyncio.wait(calls, timeout=_CALLS_END_S)

    # ---- methods

    async def Encode(
        self, request: tokenizer_pb2.EncodeRequest, context: Context
    ) -> tokenizer_pb2.EncodeResponse:
        async with self._answering(context):
            assert self._encoder is not None
            return await self._encoder.encode(request)

    async def Decode(
        self, request: tokenizer_pb2.DecodeRequest, context: Context
    ) -> tokenizer_pb2.DecodeResponse:
        async with self._answering(context) as tokenizer:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, _decode, tokenizer.codec, request)

    # Not an async generator: grpc would leave it suspended, and its cleanup to the garbage
    # collector, when the call is cancelled while a message is being written.
    async def Detokenize(  # type: ignore[override]
        self, request_iterator: AsyncIterator[tokenizer_pb2.DetokenizeRequest], context: Context
    ) -> None:
        async with self._answering(context) as tokenizer:
            session = DetokenizeSession(tokenizer.codec)
            self._calls[_current_task()] = session
            async for request in request_iterator:
                if request.ByteSize() <= _MAX_INLINE_BYTES:
                    response = session.answer(request)
                else:
                    response = await asyncio.to_thread(session.answer, request)
                    if (size := response.ByteSize()) > self._max_message_bytes:
                        raise MessageTooLarge(
                            f"the answer takes {size} bytes, larger than the "
                            f"{self._max_message_bytes} that a message may have"
                        )
                await context.write(response)

    async def GetTokenizerInfo(
        self, request: tokenizer_pb2.GetTokenizerInfoRequest, context: Context
    ) -> tokenizer_pb2.GetTokenizerInfoResponse:
        async with self._answering(context) as tokenizer:
            codec = tokenizer.codec
            return tokenizer_pb2.GetTokenizerInfoResponse(
                tokenizer=tokenizer_pb2.TokenizerInfo(
                    api_version=API_VERSION,
                    model=tokenizer.name,
                    fingerprint=tokenizer.fingerprint,
                    vocab_size=codec.vocab_size,
                    has_chat_template=codec.chat.has_template,
                    bos_token_id=codec.bos_token_id,
                    eos_token_id=codec.eos_token_id,
                    max_message_bytes=self._max_message_bytes,
                    server_version=millstream_version(),
                )
            )

    @asynccontextmanager
    async def _answering(self, context: Context) -> AsyncIterator[LoadedTokenizer]:
        """Around every method: refuses it when not serving, and gives its errors their status."""
        task = _current_task()
        self._calls[task] = None
        try:
            if self._unavailable is not None or self._tokenizer is None:
                raise self._unavailable or EngineUnavailable("the tokenizer is loading")
            yield self._tokenizer
        except MillstreamError as error:
            await abort(context, error)
        except asyncio.CancelledError:
            if task.cancelling() and not self._unavailable:
                raise  # the caller left
            await abort(context, self._unavailable or EngineFault("cancelled inside the service"))
        except DecodeError:
            await abort(context, undecodable("a DetokenizeRequest"))
        except Exception as error:
            logger.exception("a call failed")
            await abort(context, error)
        finally:
            del self._calls[task]


def _decode(codec: Codec, request: tokenizer_pb2.DecodeRequest) -> tokenizer_pb2.DecodeResponse:
    skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
    texts = []
    for index, sequence in enumerate(request.sequences):
        try:
            texts.append(codec.decode(sequence.token_ids, skip_special_tokens=skip))
        except UnknownTokenId as error:
            field = f"sequences[{index}].token_ids"
            raise InvalidArgument(f"{field}: {error}", field=field) from None
    return tokenizer_pb2.DecodeResponse(texts=texts)


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task
