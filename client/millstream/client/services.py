"""The two services as one client sees them: connections and streams, opened when first needed, and
opened anew after a failure; and the check that both are for the same tokenizer."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import grpc

from millstream.client.connection import Connection, closing_told
from millstream.client.engine_stream import EngineStream, Observers
from millstream.client.engines import Engines, check_target, engine_targets
from millstream.client.jobs import Job
from millstream.client.opener import Opener
from millstream.client.text import TextStream
from millstream.rpc.errors import (
    EngineUnavailable,
    FingerprintMismatch,
    InvalidArgument,
)
from millstream.rpc.values import check_text
from millstream.v1 import engine_pb2, tokenizer_pb2, tokenizer_pb2_grpc

ENGINE = engine_pb2.DESCRIPTOR.services_by_name["Engine"].full_name
_TOKENIZER = tokenizer_pb2.DESCRIPTOR.services_by_name["Tokenizer"].full_name


class Services:
    """Belongs to the event loop on which it is first used."""

    def __init__(
        self,
        *,
        engine: str | Sequence[str] | None,
        tokenizer: str | None,
        timeout_s: float,
        api_key: str = "",
        observer: Observers | None = None,
    ) -> None:
        """Targets, None for a service that is not needed; several engines share the requests.
        `timeout_s`: how long to wait for a service. Raises InvalidArgument."""
        if not check_text("api_key", api_key).isprintable() or not api_key.isascii():
            raise InvalidArgument("api_key: printable ASCII only", field="api_key")
        self._api_key = api_key
        self._observer = observer
        self._closed = False
        connect = functools.partial(Connection, timeout_s=timeout_s)
        targets = engine_targets(engine)
        self.engines = Engines(
            [connect(target=target, kind="engine", service=ENGINE) for target in targets],
            self._open_engine,
        )
        self.tokenizer: Connection | None = None
        if tokenizer is not None:
            target = check_target("tokenizer", tokenizer)
            self.tokenizer = connect(target=target, kind="tokenizer", service=_TOKENIZER)
        self._text = Opener(self._open_text)

    async def any_engine(self) -> EngineStream:
        """An open Generate stream. Raises EngineUnavailable."""
        await self.engines.opened()
        return self.engines.any_ready()

    async def engine_stream(self, job: Job, avoid: Collection[EngineStream] = ()) -> EngineStream:
        """The open Generate stream of the engine for an encoded job, which may be another at the
        next await. Raises EngineUnavailable."""
        await self.engines.opened()
        return self.engines.choose(job, avoid)

    async def text_stream(self) -> TextStream:
        """The open Detokenize stream. Raises EngineUnavailable."""
        return await self._text.get()

    async def both(
        self, job: Job, avoid: Collection[EngineStream] = ()
    ) -> tuple[EngineStream, TextStream]:
        """Both streams, for text: raises FingerprintMismatch if they are not for one tokenizer."""
        _, text = await asyncio.gather(self.engines.opened(), self.text_stream())
        engine = self.engines.choose(job, avoid)
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
    ) -> Sequence[engine_pb2.TokenSequence]:
        """One Encode call."""
        request = tokenizer_pb2.EncodeRequest(inputs=inputs, add_special_tokens=add_special_tokens)
        response = await self._call_tokenizer("Encode", request)
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
        await self.engines.close()
        await self._text.close()
        if self.tokenizer is not None:
            await self.tokenizer.close()

    async def _open_engine(self, connection: Connection) -> EngineStream:
        observer = self._observer
        if isinstance(observer, Mapping):
            observer = observer.get(connection.target)
        return await EngineStream.open(connection, observer, self._api_key)

    async def _open_text(self) -> TextStream:
        return await TextStream.connect(self._tokenizer_connection())

    def _tokenizer_connection(self) -> Connection:
        if self.tokenizer is None:
            raise EngineUnavailable(
                "text needs a tokenizer service, and this client has none (tokenizer=None); "
                "token ids with detokenize=False need none"
            )
        return self.tokenizer

    async def _call_tokenizer(self, method: str, request: Any) -> Any:
        connection = self._tokenizer_connection()
        await self.text_stream()  # waits until it serves
        stub: Any = tokenizer_pb2_grpc.TokenizerStub(connection.channel)
        try:
            with closing_told():
                return await getattr(stub, method)(request)
        except grpc.aio.AioRpcError as error:
            raise connection.error(error) from None
