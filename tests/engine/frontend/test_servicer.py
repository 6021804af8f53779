"""EngineServicer against a service that only notes what it is given."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

from millstream.engine.frontend.servicer import EngineServicer
from millstream.engine.frontend.streams import Stream
from millstream.v1 import engine_pb2


class NotingService:
    """Notes the handles of each call of `submit`, and when others had a turn."""

    def __init__(self) -> None:
        self.engine_info = engine_pb2.EngineInfo()
        self.taken: list[list[int]] = []
        self.cancelled: list[list[int]] = []
        self.others_turns = 0
        self.others_turns_before: list[int] = []  # each call of `submit` and `cancel`

    @contextlib.contextmanager
    def open_stream(self, key: str) -> Iterator[Stream]:
        yield Stream(1)

    def submit(self, stream: Stream, submissions: Sequence[engine_pb2.Submission]) -> None:
        self.taken.append([submission.handle for submission in submissions])
        self.others_turns_before.append(self.others_turns)

    def cancel(self, stream: Stream, handles: Iterable[int]) -> None:
        self.cancelled.append(list(handles))
        self.others_turns_before.append(self.others_turns)

    def count_message(self) -> None: ...

    async def be_another(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.others_turns += 1


class Context:
    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def write(self, message: engine_pb2.GenerateResponse) -> None: ...


async def serve(service: NotingService, message: engine_pb2.GenerateRequest) -> None:
    """A stream with this one message, beside others who want their turns."""

    async def requests() -> AsyncIterator[engine_pb2.GenerateRequest]:
        yield message

    context: Any = Context()
    anything: Any = service
    other = asyncio.create_task(service.be_another())
    await EngineServicer(anything).Generate(requests(), context)
    other.cancel()
    turns = service.others_turns_before
    assert all(earlier < later for earlier, later in itertools.pairwise(turns))


async def test_others_have_turns_while_a_long_list_is_taken() -> None:
    """Row 88: of many requests in one message; n samples count each."""
    count, n = 1000, 2
    service = NotingService()
    sampling = engine_pb2.SamplingParams(n=n)
    submit = [engine_pb2.Submission(handle=i, sampling=sampling) for i in range(count)]
    await serve(service, engine_pb2.GenerateRequest(submit=submit))
    assert list(itertools.chain.from_iterable(service.taken)) == list(range(count))
    assert max(map(len, service.taken)) <= 512 / n, "about 10 ms"


async def test_large_requests_are_taken_few_at_a_time() -> None:
    """Row 88: its cost grows with its ids, too: 64 with biases held all streams up for 2 s."""
    count = 20
    service = NotingService()
    sampling = engine_pb2.SamplingParams(logit_bias=dict.fromkeys(range(30_000), 0.5))
    submit = [engine_pb2.Submission(handle=i, sampling=sampling) for i in range(count)]
    await serve(service, engine_pb2.GenerateRequest(submit=submit))
    assert service.taken == [[handle] for handle in range(count)]


async def test_others_have_turns_while_many_cancellations_are_taken() -> None:
    """Row 88: 64 MiB are as many of them; 20 million held all streams up for 3 s."""
    handles = list(range(100_000))
    service = NotingService()
    await serve(service, engine_pb2.GenerateRequest(cancel=handles))
    assert list(itertools.chain.from_iterable(service.cancelled)) == handles
    assert max(map(len, service.cancelled)) <= 10_000, "about a millisecond"


async def test_a_handle_is_cancelled_once_however_often_a_message_says_it() -> None:
    """The core would be told each time: a key of 9 bytes for 1 byte of the message."""
    service = NotingService()
    await serve(service, engine_pb2.GenerateRequest(cancel=[3, 1, 3] * 1000))
    assert service.cancelled == [[3, 1]]
