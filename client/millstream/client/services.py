"""The two services as one client sees them: connections and streams, opened when first needed, and
opened anew after a failure; and the check that both are for the same tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from copy import copy
from typing import Any, Generic, Protocol, TypeVar

import grpc

from millstream.client.connection import Connection, closing_told
from millstream.client.engine_stream import EngineStream, Observer
from millstream.client.text import TextStream
from millstream.rpc.errors import (
    Cancelled,
    EngineUnavailable,
    FingerprintMismatch,
    InvalidArgument,
    MillstreamError,
)
from millstream.rpc.values import check_text, refusal
from millstream.v1 import engine_pb2, tokenizer_pb2, tokenizer_pb2_grpc

_ENGINE = engine_pb2.DESCRIPTOR.services_by_name["Engine"].full_name
_TOKENIZER = tokenizer_pb2.DESCRIPTOR.services_by_name["Tokenizer"].full_name


class Services:
    """Belongs to the event loop on which it is first used."""

    def __init__(
        self,
        *,
        engine: str | None,
        tokenizer: str | None,
        timeout_s: float,
        api_key: str = "",
        observer: Observer | None = None,
    ) -> None:
        """Targets, None for a service that is not needed; `timeout_s`: how long to wait for one.
        Raises InvalidArgument."""
        if not check_text("api_key", api_key).isprintable() or not api_key.isascii():
            raise InvalidArgument("api_key: printable ASCII only", field="api_key")
        self._api_key = api_key
        for name, target in (("engine", engine), ("tokenizer", tokenizer)):
            if target is not None and not check_text(name, target):
                raise refusal(name, "a gRPC target such as localhost:50051", target)
        self.engine: Connection | None = None
        self.tokenizer: Connection | None = None
        if engine is not None:
            self.engine = Connection(
                target=engine, kind="engine", service=_ENGINE, timeout_s=timeout_s
            )
        if tokenizer is not None:
            self.tokenizer = Connection(
                target=tokenizer, kind="tokenizer", service=_TOKENIZER, timeout_s=timeout_s
            )
        self._observer = observer
        self._closed = False
        self._engine = _Opener(self._open_engine)
        self._text = _Opener(self._open_text)

    async def engine_stream(self) -> EngineStream:
        """The open Generate stream. Raises EngineUnavailable."""
        return await self._engine.get()

    async def text_stream(self) -> TextStream:
        """The open Detokenize stream. Raises EngineUnavailable."""
        return await self._text.get()

    async def both(self) -> tuple[EngineStream, TextStream]:
        """Both streams, for text: raises FingerprintMismatch if they are not for one tokenizer."""
        engine, text = await asyncio.gather(self.engine_stream(), self.text_stream())
        ours, theirs = engine.engine.tokenizer_fingerprint, text.info.fingerprint
        if ours and ours != theirs:  # an engine without tokenizer files has none
            raise FingerprintMismatch(
                f"the engine serves {engine.engine.model!r} with tokenizer {ours[:12]}, but the "
                f"tokenizer service serves {text.info.model!r} with tokenizer {theirs[:12]}"
            )
        return engine, text

    async def encode(
        self,
        inputs: Sequence[tokenizer_pb2.EncodeInput],
        *,
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> Sequence[engine_pb2.TokenSequence]:
        """One Encode call."""
        request = tokenizer_pb2.EncodeRequest(inputs=inputs, add_special_tokens=add_special_tokens)
        response = await self._call_tokenizer("Encode", request, timeout_s)
        sequences: Sequence[engine_pb2.TokenSequence] = response.sequences
        return sequences

    async def decode(
        self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool
    ) -> list[str]:
        """One Decode call."""
        request = tokenizer_pb2.DecodeRequest(
            sequences=[engine_pb2.TokenSequence(token_ids=ids) for ids in sequences],
            skip_special_tokens=skip_special_tokens,
        )
        return list((await self._call_tokenizer("Decode", request)).texts)

    def check_open(self) -> None:
        """Raises EngineUnavailable once it is closed: for those who come then."""
        if self._closed:
            raise EngineUnavailable("the client is closed")

    async def close(self) -> None:
        """Whoever waits for a service is told, with Cancelled."""
        self._closed = True
        await self._engine.close()
        await self._text.close()
        for connection in (self.engine, self.tokenizer):
            if connection is not None:
                await connection.close()

    async def _open_engine(self) -> EngineStream:
        return await EngineStream.open(self._engine_connection(), self._observer, self._api_key)

    async def _open_text(self) -> TextStream:
        return await TextStream.connect(self._tokenizer_connection())

    def _engine_connection(self) -> Connection:
        if self.engine is None:
            raise EngineUnavailable("this client has no engine service (engine=None)")
        return self.engine

    def _tokenizer_connection(self) -> Connection:
        if self.tokenizer is None:
            raise EngineUnavailable(
                "text needs a tokenizer service, and this client has none (tokenizer=None); "
                "token ids with detokenize=False need none"
            )
        return self.tokenizer

    async def _call_tokenizer(
        self, method: str, request: Any, timeout_s: float | None = None
    ) -> Any:
        connection = self._tokenizer_connection()
        await self.text_stream()  # waits until it serves
        stub: Any = tokenizer_pb2_grpc.TokenizerStub(connection.channel)
        try:
            with closing_told():
                return await getattr(stub, method)(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise connection.error(error) from None


class _Stream(Protocol):
    @property
    def broken(self) -> bool: ...

    async def close(self) -> None: ...


S = TypeVar("S", bound=_Stream)


class _Opener(Generic[S]):
    """Keeps one stream open. Who asks while it is being opened shares the result, or the error."""

    def __init__(self, open_stream: Callable[[], Coroutine[Any, Any, S]]) -> None:
        self._open = open_stream
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Task[S] | None = None
        self._closed = False

    async def get(self) -> S:
        if self._closed:  # since the caller came
            raise Cancelled("the client was closed")
        self._loop = self._loop or asyncio.get_running_loop()
        if self._loop is not asyncio.get_running_loop():
            raise RuntimeError("an AsyncClient belongs to the event loop that used it first")
        task = self._opening
        if task is None or (task.done() and (task.exception() or task.result().broken)):
            task = self._opening = asyncio.create_task(self._open_anew(task))
        try:
            with closing_told():
                return await asyncio.shield(task)
        except MillstreamError as error:
            raise copy(error) from None

    async def _open_anew(self, before: asyncio.Task[S] | None) -> S:
        if before is not None and not before.exception():
            await before.result().close()  # it is broken, but its tasks are still there
        return await self._open()

    async def close(self) -> None:
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()  # does nothing when it is open
            (stream,) = await asyncio.gather(self._opening, return_exceptions=True)
            if not isinstance(stream, BaseException):
                await stream.close()
