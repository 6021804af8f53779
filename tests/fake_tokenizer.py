"""A tokenizer service that speaks the protocol, with faults on demand. A text's tokens are its
bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from tests.fake_tokens import FINGERPRINT, VOCAB_SIZE, decoder, text_of

from millstream.rpc.errors import InvalidArgument, MillstreamError, abort, to_status
from millstream.tokenizer.detokenizer import Detokenizer
from millstream.v1 import tokenizer_pb2, tokenizer_pb2_grpc


class FakeTokenizer(tokenizer_pb2_grpc.TokenizerServicer):
    """Set its attributes to make it misbehave; read them to see what reached it."""

    def __init__(self) -> None:
        self.info = tokenizer_pb2.TokenizerInfo(
            api_version="v1", model="fake", fingerprint=FINGERPRINT, vocab_size=VOCAB_SIZE
        )
        self.fail_at_token: int | None = None  # of every sequence
        self.break_after_messages: int | None = None  # then the stream ends UNAVAILABLE
        self.ends_with: MillstreamError | None = None  # after an answer
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
                if self.ends_with is not None:
                    await abort(context, self.ends_with)

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
