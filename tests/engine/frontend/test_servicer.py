"""EngineServicer against a service that only notes what it is given."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from millstream.engine.frontend.servicer import EngineServicer
from millstream.engine.frontend.streams import Stream
from millstream.v1 import engine_pb2


class NotingService:
    """Notes the handles of each call of `submit`, and when others had a turn."""

    def __init__(self) -> None:
        self.engine_info = engine_pb2.EngineInfo()
        self.taken: list[list[int]] = []
        self.others_turns = 0
        self.others_turns_before: list[int] = []  # each call of `submit`

    @contextlib.contextmanager
    def open_stream(self, key: str) -> Iterator[Stream]:
        yield Stream(1)

    def submit(self, stream: Stream, submissions: Sequence[engine_pb2.Submission]) -> None:
        self.taken.append([submission.handle for submission in submissions])
        self.others_turns_before.append(self.others_turns)

    def cancel(self, stream: Stream, handles: Sequence[int]) -> None: ...

    def count_message(self) -> None: ...

    async def be_another(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.others_turns += 1


class Context:
    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def write(self, message: engine_pb2.GenerateResponse) -> None: ...


async def test_others_have_turns_while_a_long_list_is_taken() -> None:
    """Row 88: of many requests in one message; n samples count each."""
    count, n = 1000, 2
    service: Any = NotingService()

    async def requests() -> AsyncIterator[engine_pb2.GenerateRequest]:
        sampling = engine_pb2.SamplingParams(n=n)
        submit = [engine_pb2.Submission(handle=i, sampling=sampling) for i in range(count)]
        yield engine_pb2.GenerateRequest(submit=submit)

    context: Any = Context()
    other = asyncio.create_task(service.be_another())
    await EngineServicer(service).Generate(requests(), context)
    other.cancel()
    assert list(itertools.chain.from_iterable(service.taken)) == list(range(count))
    assert max(map(len, service.taken)) <= 512 / n, "about 10 ms"
    turns = service.others_turns_before
    assert all(earlier < later for earlier, later in itertools.pairwise(turns))
