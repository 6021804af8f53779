"""Intake before a core that only notes what it is given."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tests.engine_processes import submission
from tests.toy_runner import toy_info

from millstream.engine.frontend import admission
from millstream.engine.frontend.admission import Admission
from millstream.engine.frontend.intake import Intake
from millstream.engine.frontend.streams import Stream
from millstream.engine.request import FinishReason, GrammarSpec, Request
from millstream.rpc.errors import InvalidArgument, MillstreamError, QueueFull, from_status
from millstream.v1 import engine_pb2


class NotingCore:
    num_live = num_ids = 0

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.finished: list[int] = []
        self.compiled = asyncio.Event()
        self.refusal: MillstreamError | None = None

    async def prepare_grammar(self, spec: GrammarSpec) -> None:
        await self.compiled.wait()
        if self.refusal is not None:
            raise self.refusal

    def forget_grammar(self, spec: GrammarSpec) -> None: ...

    def submit(self, firsts: list[Request]) -> None:
        self.requests += firsts

    def finish(self, keys: list[int], reason: FinishReason) -> None:
        self.finished += keys


def intake_of(core: Any) -> Intake:
    intake = Intake(core)
    info = replace(toy_info(max_model_len=500, num_blocks=500), structured_output=True)
    intake.admission = Admission(info, 100, engine_pb2.SamplingParams())
    return intake


async def test_the_deadline_of_a_refused_request_ends_no_other_one() -> None:
    """Its handle may be in use again."""
    core = NotingCore()
    core.refusal = InvalidArgument("no such grammar")
    intake, stream = intake_of(core), Stream(1)
    intake.submit(stream, [submission(5, n=2, timeout_ms=50, regex="a+")], None)
    held = stream.held(5)
    assert held is not None
    core.compiled.set()
    await held.task
    assert [each.handle for each in (await taken(stream)).rejected] == [5]
    intake.submit(stream, [submission(5), submission(6)], None)
    passed = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, passed.set)
    await passed.wait()
    assert not core.finished


async def test_ids_of_one_message_and_of_what_is_on_hold_count(monkeypatch: Any) -> None:
    monkeypatch.setattr(admission, "MAX_LIVE_IDS", 1000)
    core = NotingCore()
    intake, stream = intake_of(core), Stream(1)
    stream.client.num_live = 1
    asks = [submission(i, [1] * 400) for i in range(3)]
    intake.submit(stream, [asks[0], submission(5, [1] * 400, regex="a+"), asks[1]], None)
    intake.submit(stream, asks[2:], None)
    held = stream.held(5)
    assert held is not None
    refused = {each.handle: from_status(each.status) for each in (await taken(stream)).rejected}
    assert list(refused) == [1] and isinstance(refused[1], QueueFull)
    assert [request.key & 0xFF for request in core.requests] == [0, 2]
    core.compiled.set()
    await held.task
    assert [request.key & 0xFF for request in core.requests] == [0, 2, 5]


@pytest.mark.parametrize("grammar", [{}, {"regex": "a+"}])
async def test_ids_count_once_for_each_sample(
    monkeypatch: pytest.MonkeyPatch, grammar: dict[str, Any]
) -> None:
    """Of what is in the same message, or on hold."""
    monkeypatch.setattr(admission, "MAX_LIVE_IDS", 1000)
    intake, stream = intake_of(NotingCore()), Stream(1)
    stream.client.num_live = 1
    intake.submit(
        stream, [submission(0, [1] * 200, n=4, **grammar), submission(9, [1] * 201)], None
    )
    assert [each.handle for each in (await taken(stream)).rejected] == [9]
    stream.close()


async def taken(stream: Stream) -> engine_pb2.GenerateResponse:
    message = await stream.next()
    assert message is not None
    return message
