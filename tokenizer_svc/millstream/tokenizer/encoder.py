"""Encode requests: cut into chunks, encoded on a pool of threads, within limits.

A chunk is a few milliseconds of one thread, and a request has only a few of them queued at a time.
So requests share the threads fairly, building the answer overlaps with encoding, and when the
caller leaves, what is not begun is dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from millstream.rpc.errors import DeadlineExceeded, InvalidArgument
from millstream.tokenizer.codec import Codec
from millstream.v1 import tokenizer_pb2

_CHUNK_BYTES = 16 * 1024
_INPUT_BYTES = 8  # that an input counts for beside its own, which may be none


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeLimits:
    """What one Encode request may cost."""

    max_text_bytes: int
    timeout_s: float


class Encoder:
    """Encodes whole requests. Its methods run on the event loop, the work on `pool`."""

    def __init__(self, codec: Codec, pool: Executor, *, threads: int, limits: EncodeLimits) -> None:
        self._codec = codec
        self._pool = pool
        self._max_chunks_queued = 4 * threads
        self._limits = limits

    async def encode(self, request: tokenizer_pb2.EncodeRequest) -> tokenizer_pb2.EncodeResponse:
        """Raises InvalidArgument, NoChatTemplate, DeadlineExceeded."""
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                return await self._encode(request)
        except TimeoutError:
            raise DeadlineExceeded(
                f"encoding took longer than {self._limits.timeout_s:g} s"
            ) from None

    async def _encode(self, request: tokenizer_pb2.EncodeRequest) -> tokenizer_pb2.EncodeResponse:
        add_special_tokens = (
            request.add_special_tokens if request.HasField("add_special_tokens") else True
        )
        loop = asyncio.get_running_loop()
        response = tokenizer_pb2.EncodeResponse()
        queued: deque[asyncio.Future[tokenizer_pb2.EncodeResponse]] = deque()
        try:
            for start, inputs in self._chunks(request):
                if len(queued) == self._max_chunks_queued:
                    response.MergeFrom(await queued[0])
                    queued.popleft()
                job = loop.run_in_executor(
                    self._pool, self._encode_chunk, inputs, start, add_special_tokens
                )
                queued.append(job)
            while queued:
                response.MergeFrom(await queued[0])
                queued.popleft()
        finally:
            for job in queued:
                job.cancel()
        return response

    def _chunks(
        self, request: tokenizer_pb2.EncodeRequest
    ) -> Iterator[tuple[int, Sequence[tokenizer_pb2.EncodeInput]]]:
        """Slices of the inputs, with the first one's index, of about _CHUNK_BYTES each."""
        start, size = 0, 0
        for index, item in enumerate(request.inputs):
            item_bytes = item.ByteSize()
            if item_bytes > self._limits.max_text_bytes:
                raise InvalidArgument(
                    f"inputs[{index}]: {item_bytes} bytes, more than the "
                    f"{self._limits.max_text_bytes} that one input may have",
                    field=f"inputs[{index}]",
                )
            counted = item_bytes + _INPUT_BYTES
            if size and size + counted > _CHUNK_BYTES:
                yield start, request.inputs[start:index]
                start, size = index, 0
            size += counted
        if request.inputs:
            yield start, request.inputs[start:]

    def _encode_chunk(
        self, inputs: Sequence[tokenizer_pb2.EncodeInput], start: int, add_special_tokens: bool
    ) -> tokenizer_pb2.EncodeResponse:
        """The inputs' ids, on a thread of the pool. `start`: the first one's index, for errors."""
        texts: list[str] = []
        chats: dict[int, list[int]] = {}  # ids by position in `inputs`
        for position, item in enumerate(inputs):
            match item.WhichOneof("input"):
                case "text":
                    texts.append(item.text)
                case "chat":
                    field = f"inputs[{start + position}].chat"
                    chats[position] = self._encode_chat(item.chat, field)
                case _:
                    field = f"inputs[{start + position}]"
                    raise InvalidArgument(f"{field}: a text or a chat is needed", field=field)
        encoded = iter(self._codec.encode_batch(texts, add_special_tokens=add_special_tokens))
        response = tokenizer_pb2.EncodeResponse()
        for position in range(len(inputs)):
            ids = chats[position] if position in chats else next(encoded)
            response.sequences.add().token_ids.extend(ids)
        return response

    def _encode_chat(self, chat: tokenizer_pb2.Chat, field: str) -> list[int]:
        # The template writes the special tokens, BOS among them: none are added.
        if chat.plain_content:
            segments = self._codec.chat.render_segments(chat, field=field)
            return self._codec.encode_segments(segments)
        text = self._codec.chat.render(chat, field=field)
        return self._codec.encode_batch([text], add_special_tokens=False)[0]
