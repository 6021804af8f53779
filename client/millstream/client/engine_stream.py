"""One multiplexed Generate stream: many requests out, one message per step in.

Submissions and cancellations of one moment leave together as one message. The cost is per message,
not per token: the loop over a step's arrays appends ids to lists and wakes only who follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import grpc

from millstream.client.call_end import CallEnd
from millstream.client.connection import Connection
from millstream.client.generation import Generation
from millstream.client.logprobs import unpack
from millstream.client.naming import from_service
from millstream.client.places import Places
from millstream.client.prefixes import KnownPrefixes
from millstream.rpc.errors import (
    Cancelled,
    EngineFault,
    EngineUnavailable,
    MessageTooLarge,
    MillstreamError,
)
from millstream.rpc.options import DEFAULT_MAX_MESSAGE_BYTES
from millstream.v1 import engine_pb2, engine_pb2_grpc

_MESSAGE_BYTES = 8 * 1024 * 1024  # submissions gathered in one message; a single one may be larger
_FRAMING_BYTES = 16  # around a submission in its message
_OPEN_TIMEOUT_S = 10.0
_LAST_HANDLE = 2**32 - 1

Observer = Callable[[engine_pb2.GenerateResponse], None]
Observers = Observer | Mapping[str, Observer]  # one for all engines, or by target


class EngineStream:
    """An open stream. When it breaks, its requests fail and a new EngineStream takes its place."""

    def __init__(
        self, call: Any, connection: Connection, engine: engine_pb2.EngineInfo, observer: Observer
    ) -> None:
        self.engine = engine
        # More requests than this at once are refused as QUEUE_FULL; whoever has many waits here.
        limits = engine.limits
        self.places = Places(max(1, limits.max_num_seqs + limits.max_queued_requests))
        self.prefixes = KnownPrefixes(limits)
        self._limit_bytes = min(
            limits.max_message_bytes or DEFAULT_MAX_MESSAGE_BYTES, DEFAULT_MAX_MESSAGE_BYTES
        )
        self._call = call
        self._end = CallEnd(call)
        self._connection = connection
        self._observer = observer
        self._live: dict[int, Generation] = {}
        self._live_load = 0.0
        self._expected_load = 0.0
        self._expected_samples = 0
        self._num_samples: dict[int, int] = {}  # of first handles that the engine has not answered
        self._last_handle = 0
        self._submissions: list[tuple[engine_pb2.Submission, int]] = []  # with their sizes
        self._cancellations: list[int] = []
        self._outgoing = asyncio.Event()
        self._error: MillstreamError | None = None
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    @classmethod
    async def open(
        cls, connection: Connection, observer: Observer | None = None, api_key: str = ""
    ) -> EngineStream:
        """Waits until the engine serves; raises EngineUnavailable. `observer` sees each message."""
        await connection.wait_serving()
        stub: Any = engine_pb2_grpc.EngineStub(connection.channel)
        call = stub.Generate(metadata=[("x-api-key", api_key)] if api_key else None)
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                first = await call.read()
            if first is grpc.aio.EOF or not first.HasField("ready"):
                raise EngineFault(f"the engine at {connection.target} did not say Ready")
        except TimeoutError:
            call.cancel()
            raise EngineUnavailable(f"the engine at {connection.target} does not answer") from None
        except grpc.aio.AioRpcError as error:
            raise connection.error(error) from None
        except BaseException:
            call.cancel()
            raise
        return cls(call, connection, first.ready.engine, observer or (lambda _: None))

    @property
    def broken(self) -> bool:
        return self._error is not None

    @property
    def load(self) -> float:
        """Of the requests that are live or expected here, together."""
        return self._live_load + self._expected_load

    @property
    def is_full(self) -> bool:
        """Whether one more request would wait for another of this client's to end."""
        return len(self._live) + self._expected_samples >= self.engine.limits.max_num_seqs

    @contextlib.contextmanager
    def expecting(self, load: float, samples: int) -> Iterator[None]:
        """A request of so many samples, each such a load, will be submitted here: it waits for
        places or for room."""
        self._expected_load += load * samples
        self._expected_samples += samples
        try:
            yield
        finally:
            self._expected_load -= load * samples
            self._expected_samples -= samples

    def submit(self, submission: engine_pb2.Submission, samples: Sequence[Generation]) -> int:
        """Sends a request, whose handle is set here and returned: the first sample's. Raises
        MessageTooLarge."""
        if self._error is not None:
            raise copy(self._error)
        submission.handle = first = self._free_handles(len(samples))
        size = submission.ByteSize() + _FRAMING_BYTES
        if size > self._limit_bytes:
            raise MessageTooLarge(
                f"prompt: {len(submission.token_ids)} ids take {size} bytes; "
                f"the engine takes messages of {self._limit_bytes}",
                field="prompt",
            )
        self._live.update(enumerate(samples, first))
        self._live_load += sum(generation.load for generation in samples)
        self._num_samples[first] = len(samples)
        self._submissions.append((submission, size))
        self._outgoing.set()
        return first

    def cancel(self, handle: int) -> None:
        if handle in self._live and self._error is None:
            self._cancellations.append(handle)
            self._outgoing.set()

    async def close(self) -> None:
        """Cancels what is live and ends the stream."""
        self._break(Cancelled("the client was closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ----

    def _free_handles(self, count: int) -> int:
        """The first of so many consecutive handles that are not in use."""
        first = self._last_handle + 1
        while True:
            if first + count - 1 > _LAST_HANDLE:
                first = 1
            used = [handle for handle in range(first, first + count) if handle in self._live]
            if not used:
                self._last_handle = first + count - 1
                return first
            first = used[-1] + 1

    async def _write(self) -> None:
        try:
            while True:
                await self._outgoing.wait()
                await self._call.write(self._next_message())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the stream has ended; the reader hears how
        except Exception as failure:
            self._break(EngineFault(f"cannot write to the engine: {failure!r}"))

    def _next_message(self) -> engine_pb2.GenerateRequest:
        room = min(_MESSAGE_BYTES, self._limit_bytes)
        submissions: list[engine_pb2.Submission] = []
        for submission, size in self._submissions:
            room -= size
            if submissions and room < 0:
                break
            submissions.append(submission)
        message = engine_pb2.GenerateRequest(submit=submissions)
        del self._submissions[: len(submissions)]
        if not self._submissions:  # a cancellation never overtakes its submission
            message.cancel.extend(self._cancellations)
            self._cancellations.clear()
            self._outgoing.clear()
        return message

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                try:
                    self._observer(message)
                except Exception as failure:
                    raise EngineFault(f"the observer raised {failure!r}") from failure
                self._dispatch(message)
            error: MillstreamError = EngineUnavailable(
                f"the engine at {self._connection.target} closed the stream"
            )
        except grpc.aio.AioRpcError as failure:
            error = self._connection.error(self._end.error or failure)
        except asyncio.CancelledError:
            self._break(Cancelled("the client was closed"))
            raise
        except MillstreamError as failure:
            error = failure
        except Exception as failure:
            error = EngineFault(f"cannot read the engine's message: {failure!r}")
        self._break(error)

    def _dispatch(self, message: engine_pb2.GenerateResponse) -> None:
        live = self._live
        for accepted in message.accepted:
            self._num_samples.pop(accepted.handle, None)
            live[accepted.handle].accept(accepted)
        for piece in message.prompt_logprobs:
            generation = live[piece.handle]
            known = generation.prompt_logprobs
            following_ids = generation.prompt_token_ids[len(known) :]
            count = len(piece.logprobs.token_logprobs)
            known.extend(unpack(piece.logprobs, following_ids[:count]))
        following = self._append(message.output)
        for finished in message.finished:
            self._take(finished.handle).finish(finished)
        for generation in following:
            generation.advance()
        for rejected in message.rejected:
            count = self._num_samples.pop(rejected.handle)
            for handle in range(rejected.handle, rejected.handle + count):
                self._take(handle).fail(from_service(rejected.status))

    def _take(self, handle: int) -> Generation:
        """A live request that has ended."""
        generation = self._live.pop(handle)
        self._live_load -= generation.load
        return generation

    def _append(self, output: engine_pb2.StepOutput) -> list[Generation]:
        """Adds a message's tokens to their requests; returns those that act on each piece."""
        live = self._live
        if output.HasField("logprobs"):
            self._append_logprobs(output)
        following = []
        token_ids = output.token_ids
        if output.counts:
            end = 0
            for handle, count in zip(output.handles, output.counts, strict=True):
                start, end = end, end + count
                generation = live[handle]
                generation.token_ids.extend(token_ids[start:end])
                if generation.follow:
                    following.append(generation)
        else:
            for handle, token_id in zip(output.handles, token_ids, strict=True):
                generation = live[handle]
                generation.token_ids.append(token_id)
                if generation.follow:
                    following.append(generation)
        return following

    def _append_logprobs(self, output: engine_pb2.StepOutput) -> None:
        entries = unpack(output.logprobs, output.token_ids)
        counts = output.counts or itertools.repeat(1, len(output.handles))
        for handle, count in zip(output.handles, counts, strict=True):
            new = itertools.islice(entries, count)
            self._live[handle].logprobs.extend(entry for entry in new if entry is not None)

    def _break(self, error: MillstreamError) -> None:
        """Fails every live request; the stream is of no use any more."""
        if self._error is None:
            self._error = error
            self._call.cancel()
        live, self._live = self._live, {}
        self._live_load = 0.0
        for generation in live.values():
            generation.fail(copy(self._error))
