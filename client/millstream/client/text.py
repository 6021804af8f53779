"""One multiplexed Detokenize stream: token ids of many requests in, texts and stop strings out.

It works in turns: everything that has come since the last answer leaves as one message, and the
next leaves after its answer. So a turn grows with the load, and an answer is known to be for all
that was sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from copy import copy
from typing import Any

import grpc

from millstream.client.call_end import CallEnd
from millstream.client.connection import Connection
from millstream.client.generation import Generation
from millstream.client.naming import from_service
from millstream.rpc.errors import (
    Cancelled,
    EngineFault,
    EngineUnavailable,
    MillstreamError,
)
from millstream.rpc.text_context import text_context
from millstream.v1 import engine_pb2, tokenizer_pb2, tokenizer_pb2_grpc

_INFO_TIMEOUT_S = 10.0
_TURN_TOKENS = 256 * 1024  # 1.3 MB at most; a single session may bring more


class TextSession:
    """The text of one request. Created by TextStream.open; talks to its generation."""

    __slots__ = ("_stream", "closing", "generation", "handle", "opening", "pending")

    def __init__(
        self, stream: TextStream, opening: tokenizer_pb2.DetokenizeOpen, generation: Generation
    ) -> None:
        self._stream = stream
        self.handle = opening.handle
        self.opening: tokenizer_pb2.DetokenizeOpen | None = opening  # None once it is sent
        self.generation: Generation | None = generation  # None once nobody reads
        self.pending: list[int] = []
        self.closing = False

    def feed(self, token_ids: Sequence[int]) -> None:
        self.pending.extend(token_ids)
        self._stream.ready(self)

    def close(self) -> None:
        """No more tokens come; held text is still delivered."""
        self.closing = True
        self._stream.ready(self)

    def discard(self) -> None:
        """Nobody wants the text any more."""
        self.generation = None
        self.pending.clear()
        if self.opening is None:
            self.close()
        else:
            self._stream.forget(self)


class TextStream:
    """An open stream. When it breaks, its requests fail and a new TextStream takes its place."""

    def __init__(
        self, call: Any, connection: Connection, info: tokenizer_pb2.TokenizerInfo
    ) -> None:
        self.info = info
        self._connection = connection
        self._call = call
        self._end = CallEnd(call)
        self._sessions: dict[int, TextSession] = {}
        self._ready: dict[int, TextSession] = {}  # have something to send, oldest first
        self._work = asyncio.Event()
        self._last_handle = 0
        self._error: MillstreamError | None = None
        self._task = asyncio.create_task(self._run())

    @classmethod
    async def connect(cls, connection: Connection) -> TextStream:
        """Waits until the tokenizer serves; raises EngineUnavailable."""
        await connection.wait_serving()
        stub: Any = tokenizer_pb2_grpc.TokenizerStub(connection.channel)
        request = tokenizer_pb2.GetTokenizerInfoRequest()
        try:
            response = await stub.GetTokenizerInfo(request, timeout=_INFO_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise connection.error(error) from None
        return cls(stub.Detokenize(), connection, response.tokenizer)

    @property
    def broken(self) -> bool:
        return self._error is not None or self._call.done()

    def open(
        self, generation: Generation, *, stop: Sequence[str], min_tokens: int,
        include_stop: bool, skip_special_tokens: bool,
    ) -> TextSession:  # fmt: skip
        if self._error is not None:
            raise copy(self._error)
        self._last_handle = self._last_handle % (2**32 - 1) + 1
        opening = tokenizer_pb2.DetokenizeOpen(
            handle=self._last_handle,
            context_token_ids=text_context(generation.prompt_token_ids),
            stop=stop,
            min_tokens=min_tokens,
            include_stop=include_stop,
            skip_special_tokens=skip_special_tokens,
        )
        session = TextSession(self, opening, generation)
        self._sessions[session.handle] = session
        return session

    def ready(self, session: TextSession) -> None:
        """The session has something to send."""
        if session.handle in self._sessions:
            self._ready[session.handle] = session
            self._work.set()

    def forget(self, session: TextSession) -> None:
        self._sessions.pop(session.handle, None)
        self._ready.pop(session.handle, None)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    # ----

    async def _run(self) -> None:
        try:
            while True:
                await self._work.wait()
                if turn := self._take_turn():
                    await self._exchange(turn)
        except grpc.aio.AioRpcError as failure:
            self._error = self._connection.error(self._end.error or failure)
        except asyncio.InvalidStateError:  # a write to a stream that has ended
            end = self._end.error
            self._error = self._closed() if end is None else self._connection.error(end)
        except MillstreamError as error:
            self._error = error
        except Exception as failure:
            self._error = EngineFault(f"cannot read the tokenizer's message: {failure!r}")
        except BaseException:  # cancelled, or the loop went away under it
            self._error = Cancelled("the client was closed")
            raise
        finally:
            assert self._error is not None
            self._call.cancel()
            sessions, self._sessions = self._sessions, {}
            for session in sessions.values():
                if session.generation is not None:
                    session.generation.fail(copy(self._error))

    async def _exchange(self, turn: list[TextSession]) -> None:
        request = _request(turn)
        sent = [(session, len(session.pending), session.closing) for session in turn]
        for session in turn:  # what comes from now on is for a later turn
            session.opening = None
            session.pending = []
        await self._call.write(request)
        answer = await self._call.read()
        if answer is grpc.aio.EOF:
            raise self._closed()
        self._dispatch(sent, answer)

    def _closed(self) -> EngineUnavailable:
        return EngineUnavailable(f"the tokenizer at {self._connection.target} closed the stream")

    def _take_turn(self) -> list[TextSession]:
        """The sessions of the next message."""
        turn: list[TextSession] = []
        tokens = 0
        for session in self._ready.values():
            tokens += len(session.pending)
            if turn and tokens > _TURN_TOKENS:
                break
            turn.append(session)
        for session in turn:
            del self._ready[session.handle]
        if not self._ready:
            self._work.clear()
        return turn

    def _dispatch(
        self, sent: list[tuple[TextSession, int, bool]], answer: tokenizer_pb2.DetokenizeResponse
    ) -> None:
        sessions = self._sessions
        for handle, text in zip(answer.handles, answer.texts, strict=True):
            if (generation := sessions[handle].generation) is not None:
                generation.add_text(text)
        for stopped in answer.stopped:
            session = sessions[stopped.handle]
            self.forget(session)
            if session.generation is not None:
                session.generation.stop(stopped.stop, stopped.token_count)
        for failed in answer.failed:
            session = sessions[failed.handle]
            self.forget(session)
            if session.generation is not None:
                session.generation.fail(from_service(failed.status))
        for session, token_count, closed in sent:
            if session.handle in sessions:  # neither stopped nor failed
                if session.generation is not None:
                    session.generation.confirm(token_count, closed=closed)
                if closed:
                    self.forget(session)


def _request(turn: list[TextSession]) -> tokenizer_pb2.DetokenizeRequest:
    handles: list[int] = []
    token_ids: list[int] = []
    counts: list[int] = []
    for session in turn:
        if session.pending:
            handles.append(session.handle)
            token_ids.extend(session.pending)
            counts.append(len(session.pending))
    if len(token_ids) == len(handles):
        counts = []  # one each
    return tokenizer_pb2.DetokenizeRequest(
        open=[session.opening for session in turn if session.opening is not None],
        tokens=engine_pb2.StepOutput(handles=handles, token_ids=token_ids, counts=counts),
        close=[session.handle for session in turn if session.closing],
    )
