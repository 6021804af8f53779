"""The state of one open Generate stream: which handles are in use, and what waits to be sent.

The core's steps are added as they come and never wait for the reader. A reader that keeps up gets a
message per step; for one that lags, later steps are merged into the waiting message, so that a
stream holds its requests' tokens and no more. A handle is in use from its submission until its
`finished` or `rejected` is taken for sending: no message speaks of two requests by one handle.
"""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millstream.engine.frontend.clients import Client
from millstream.engine.frontend.logprob_columns import LogprobColumns, in_pieces
from millstream.engine.frontend.step_parts import StepPart
from millstream.rpc.errors import MillstreamError
from millstream.v1 import engine_pb2

# A merged message stops growing here (tokens and log probabilities together): well below gRPC's
# default limit of 4 MiB.
MAX_VALUES_PER_MESSAGE = 1 << 16
# So do lists of accepted and of refused requests, in bytes. One of the former may be six times as
# large, when it names every token id of a large vocabulary; nothing comes behind it.
MAX_ACCEPTED_BYTES = 1 << 19
# While more finished and refused requests than this wait to be sent, no submissions are read.
MAX_ENDED_UNSENT = 4096


class _Waiting:
    """Tokens that wait to be sent in one message. Handles and token ids are parallel."""

    def __init__(self, part: StepPart) -> None:
        self.finished = part.finished
        self._handles: Sequence[int] = part.handles
        self._token_ids: Sequence[int] = part.token_ids
        self._logprobs: LogprobColumns | None = None
        self._merged = False
        if any(part.logprobs):
            self._logprobs = LogprobColumns(part.logprobs)

    @property
    def full(self) -> bool:
        num_values = self._logprobs.num_values if self._logprobs is not None else 0
        return max(num_values, len(self._token_ids)) >= MAX_VALUES_PER_MESSAGE

    def merge(self, part: StepPart) -> None:
        """Adds a later step, compactly: 4 bytes a number."""
        if not isinstance(self._handles, array) or not isinstance(self._token_ids, array):
            self._handles, self._token_ids = array("I", self._handles), array("I", self._token_ids)
        if self._logprobs is None and any(part.logprobs):
            self._logprobs = LogprobColumns([None] * len(self._token_ids))
        if self._logprobs is not None:
            self._logprobs.extend(part.logprobs or [None] * len(part.token_ids))
        self._handles.extend(part.handles)
        self._token_ids.extend(part.token_ids)
        self.finished.extend(part.finished)
        self._merged = True

    def output(self) -> engine_pb2.StepOutput | None:
        """The columns: one entry for each request that got tokens."""
        token_ids, logprobs = self._token_ids, self._logprobs
        if not token_ids:
            return None
        if not self._merged:
            return engine_pb2.StepOutput(
                handles=self._handles,
                token_ids=token_ids,
                logprobs=logprobs.message() if logprobs is not None else None,
            )
        places_of: defaultdict[int, list[int]] = defaultdict(list)
        for place, handle in enumerate(self._handles):
            places_of[handle].append(place)
        order = list(itertools.chain.from_iterable(places_of.values()))
        return engine_pb2.StepOutput(
            handles=places_of.keys(),
            token_ids=[token_ids[place] for place in order],
            counts=map(len, places_of.values()) if len(places_of) < len(order) else (),
            logprobs=logprobs.message(order) if logprobs is not None else None,
        )


@dataclass(slots=True, kw_only=True)
class Hold:
    """A request that is neither accepted nor refused yet."""

    task: asyncio.Task[None]  # decides; ends with the stream
    timer: asyncio.TimerHandle | None  # of its deadline
    give_up: Callable[[MillstreamError], None]  # refuses its submission at once
    cancelled: bool = False  # it ends as soon as it is accepted


class Stream:
    """One stream. All of it runs on the event loop."""

    def __init__(self, number: int, client: Client | None = None) -> None:
        """`client`: whose it is; None: its own."""
        self.number = number
        self.client = client or Client(number)
        # The requests that the core has: handle -> the timer of its deadline.
        self._live: dict[int, asyncio.TimerHandle | None] = {}
        self._held: dict[int, Hold] = {}
        self._finished_unsent: set[int] = set()
        self._refused_unsent: set[int] = set()
        self._accepted: deque[Callable[[], engine_pb2.Accepted]] = deque()
        self._rejected: deque[engine_pb2.Rejected] = deque()
        self._prompt_logprobs: deque[tuple[int, LogprobColumns]] = deque()  # by handle, in pieces
        self._waiting: deque[_Waiting] = deque()
        self._ending = False
        self._end_error: MillstreamError | None = None
        self._failure: MillstreamError | None = None
        self._wake = asyncio.Event()  # there is something to send, or the stream may end
        self._room = asyncio.Event()  # something was sent

    @property
    def live_handles(self) -> list[int]:
        """Handles of the requests that the core has, or will have."""
        return [*self._live, *self._held]

    def is_live(self, handle: int) -> bool:
        return handle in self._live or handle in self._held

    def in_use(self, handle: int) -> bool:
        return (
            self.is_live(handle)
            or handle in self._finished_unsent
            or handle in self._refused_unsent
        )

    # ---- what goes in

    def hold(self, handle: int, hold: Hold) -> None:
        """A request waits to be accepted or refused."""
        self._held[handle] = hold
        self.client.num_live += 1

    def held(self, handle: int) -> Hold | None:
        """The request that waits to be accepted or refused, if it does."""
        return self._held.get(handle)

    def release(self, handle: int) -> Hold:
        """A request is about to be accepted or refused."""
        self.client.num_live -= 1
        return self._held.pop(handle)

    def accept(
        self,
        handle: int,
        timer: asyncio.TimerHandle | None,
        accepted: Callable[[], engine_pb2.Accepted],
    ) -> None:
        """A request is on its way to the core; its timer is cancelled when it ends. `accepted` is
        called when it can be sent: it is larger than what it is made of."""
        self._live[handle] = timer
        self.client.num_live += 1
        self._accepted.append(accepted)
        self._wake.set()

    def reject(self, rejected: engine_pb2.Rejected) -> None:
        """A request is refused. If its handle was in use, that other request goes on."""
        if not self.in_use(rejected.handle):
            self._refused_unsent.add(rejected.handle)
        self._rejected.append(rejected)
        self._wake.set()

    def add_step(self, part: StepPart) -> None:
        """What one step brought this stream."""
        for handle, entries in part.prompt_logprobs:
            pieces = in_pieces(entries, MAX_VALUES_PER_MESSAGE)
            self._prompt_logprobs.extend((handle, piece) for piece in pieces)
        last = self._waiting[-1] if self._waiting else None
        if last is None or last.full:
            self._waiting.append(_Waiting(part))
        else:
            last.merge(part)
        for end in part.finished:
            timer = self._live.pop(end.handle)
            self.client.num_live -= 1
            if timer is not None:
                timer.cancel()
            self._finished_unsent.add(end.handle)
        self._wake.set()

    def end_when_idle(self, error: MillstreamError | None) -> None:
        """Ends the stream once nothing is in flight: with OK, or with `error`. The first call
        counts."""
        if not self._ending:
            self._ending, self._end_error = True, error
        self._wake.set()

    def fail(self, error: MillstreamError) -> None:
        """Ends the stream with `error` at once. The first call counts."""
        self._failure = self._failure or error
        self._wake.set()

    def close(self) -> list[int]:
        """The stream is gone: stops its timers; returns the handles that the core still has."""
        handles = list(self._live)
        timers = [*self._live.values(), *(hold.timer for hold in self._held.values())]
        for timer in timers:
            if timer is not None:
                timer.cancel()
        for hold in self._held.values():
            hold.task.cancel()
        self.client.num_live -= len(self._live) + len(self._held)
        self._live.clear()
        self._held.clear()
        return handles

    # ---- what comes out

    async def next(self) -> engine_pb2.GenerateResponse | None:
        """Waits for a message to send; None when the stream ends with OK. Raises its error."""
        while True:
            if self._failure is not None:
                raise self._failure
            if self._accepted or self._rejected or self._waiting:  # where prompts' also come
                return self._take()
            if self._ending and not self.live_handles:
                if self._end_error is not None:
                    raise self._end_error
                return None
            self._wake.clear()
            await self._wake.wait()

    async def room(self) -> None:
        """Waits until submissions may be read: the reader takes what ends."""
        while len(self._finished_unsent) + len(self._rejected) > MAX_ENDED_UNSENT:
            self._room.clear()
            await self._room.wait()

    def _take(self) -> engine_pb2.GenerateResponse:
        """One message: what was accepted and refused, then prompts' log probabilities, then the
        oldest waiting tokens. What does not fit makes all that comes after it wait: no tokens
        precede their request or the log probabilities of its prompt."""
        message = engine_pb2.GenerateResponse()
        size = 0
        while self._accepted and size < MAX_ACCEPTED_BYTES:
            accepted = self._accepted.popleft()()
            size += accepted.ByteSize()
            message.accepted.append(accepted)
        if self._accepted or size >= MAX_ACCEPTED_BYTES:
            return message
        while self._rejected and size < MAX_ACCEPTED_BYTES:
            rejected = self._rejected.popleft()
            size += rejected.ByteSize()
            message.rejected.append(rejected)
        if self._rejected:
            self._room.set()
            return message
        self._refused_unsent.clear()
        values = 0
        while self._prompt_logprobs and values < MAX_VALUES_PER_MESSAGE:
            handle, piece = self._prompt_logprobs.popleft()
            values += piece.num_values
            message.prompt_logprobs.add(handle=handle, logprobs=piece.message())
        if self._waiting and not self._prompt_logprobs:
            waiting = self._waiting.popleft()
            if (output := waiting.output()) is not None:
                message.output.CopyFrom(output)
            message.finished.extend(waiting.finished)
            self._finished_unsent.difference_update(end.handle for end in waiting.finished)
        self._room.set()
        return message
