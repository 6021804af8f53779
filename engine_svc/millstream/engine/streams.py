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
from collections.abc import Sequence
from dataclasses import dataclass

from millstream.rpc.errors import MillstreamError
from millstream.v1 import engine_pb2

# A merged message stops growing here: well below gRPC's default limit of 4 MiB.
MAX_TOKENS_PER_MESSAGE = 1 << 16
# That limit holds also for so many accepted requests with the most stop ids that there may be.
MAX_ACCEPTED_PER_MESSAGE = 1024
# While more finished and refused requests than this wait to be sent, no submissions are read.
MAX_ENDED_UNSENT = 4096


@dataclass(slots=True)
class _Waiting:
    """Tokens that wait to be sent in one message. Handles and token ids are parallel."""

    handles: Sequence[int]
    token_ids: Sequence[int]
    finished: list[engine_pb2.Finished]
    merged: bool = False

    def merge(
        self, handles: Sequence[int], token_ids: Sequence[int], finished: list[engine_pb2.Finished]
    ) -> None:
        """Adds a later step, compactly: 4 bytes a number."""
        if not isinstance(self.handles, array) or not isinstance(self.token_ids, array):
            self.handles, self.token_ids = array("I", self.handles), array("I", self.token_ids)
        self.handles.extend(handles)
        self.token_ids.extend(token_ids)
        self.finished.extend(finished)
        self.merged = True

    def output(self) -> engine_pb2.StepOutput | None:
        """The columns: one entry for each request that got tokens."""
        if not self.token_ids:
            return None
        if not self.merged:
            return engine_pb2.StepOutput(handles=self.handles, token_ids=self.token_ids)
        tokens_of: defaultdict[int, list[int]] = defaultdict(list)
        for handle, token_id in zip(self.handles, self.token_ids, strict=True):
            tokens_of[handle].append(token_id)
        return engine_pb2.StepOutput(
            handles=tokens_of.keys(),
            token_ids=itertools.chain.from_iterable(tokens_of.values()),
            counts=map(len, tokens_of.values()) if len(tokens_of) < len(self.token_ids) else (),
        )


class Stream:
    """One stream. All of it runs on the event loop."""

    def __init__(self, number: int) -> None:
        self.number = number
        # The requests that the core has: handle -> the timer of its deadline.
        self._live: dict[int, asyncio.TimerHandle | None] = {}
        self._finished_unsent: set[int] = set()
        self._refused_unsent: set[int] = set()
        self._accepted: list[engine_pb2.Accepted] = []
        self._rejected: list[engine_pb2.Rejected] = []
        self._waiting: deque[_Waiting] = deque()
        self._ending = False
        self._end_error: MillstreamError | None = None
        self._failure: MillstreamError | None = None
        self._wake = asyncio.Event()  # there is something to send, or the stream may end
        self._room = asyncio.Event()  # something was sent

    @property
    def live_handles(self) -> list[int]:
        """Handles of the requests that the core has."""
        return list(self._live)

    def is_live(self, handle: int) -> bool:
        return handle in self._live

    def in_use(self, handle: int) -> bool:
        return (
            handle in self._live
            or handle in self._finished_unsent
            or handle in self._refused_unsent
        )

    # ---- what goes in

    def accept(self, accepted: engine_pb2.Accepted, timer: asyncio.TimerHandle | None) -> None:
        """A request is on its way to the core; its timer is cancelled when it ends."""
        self._live[accepted.handle] = timer
        self._accepted.append(accepted)
        self._wake.set()

    def reject(self, rejected: engine_pb2.Rejected) -> None:
        """A request is refused. If its handle was in use, that other request goes on."""
        if not self.in_use(rejected.handle):
            self._refused_unsent.add(rejected.handle)
        self._rejected.append(rejected)
        self._wake.set()

    def add_step(
        self,
        handles: Sequence[int],
        token_ids: Sequence[int],
        finished: list[engine_pb2.Finished],
    ) -> None:
        """What one step brought this stream: parallel arrays, a handle at most once."""
        last = self._waiting[-1] if self._waiting else None
        if last is None or len(last.token_ids) >= MAX_TOKENS_PER_MESSAGE:
            self._waiting.append(_Waiting(handles, token_ids, finished))
        else:
            last.merge(handles, token_ids, finished)
        for end in finished:
            timer = self._live.pop(end.handle)
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
        handles = self.live_handles
        for timer in self._live.values():
            if timer is not None:
                timer.cancel()
        self._live.clear()
        return handles

    # ---- what comes out

    async def next(self) -> engine_pb2.GenerateResponse | None:
        """Waits for a message to send; None when the stream ends with OK. Raises its error."""
        while True:
            if self._failure is not None:
                raise self._failure
            if self._accepted or self._rejected or self._waiting:
                return self._take()
            if self._ending and not self._live:
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
        """One message: what was accepted and refused, then the oldest waiting tokens. Those wait
        while one message does not hold all that was accepted: no tokens precede their request."""
        accepted, self._accepted = (
            self._accepted[:MAX_ACCEPTED_PER_MESSAGE],
            self._accepted[MAX_ACCEPTED_PER_MESSAGE:],
        )
        if self._accepted:
            return engine_pb2.GenerateResponse(accepted=accepted)
        rejected, self._rejected = self._rejected, []
        self._refused_unsent.clear()
        if self._waiting:
            waiting = self._waiting.popleft()
            output, finished = waiting.output(), waiting.finished
            self._finished_unsent.difference_update(end.handle for end in finished)
        else:
            output, finished = None, []
        self._room.set()
        return engine_pb2.GenerateResponse(
            accepted=accepted, rejected=rejected, output=output, finished=finished
        )
