"""Structured output at the front end: what is refused, and what waits for its grammar."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator

import grpc
import pytest
from tests.engine_fixtures import engine_fixture, stub_fixture
from tests.engine_processes import Stream, connect, engine, eventually, submission
from tests.fake_runners import tokens_after

from millstream.engine.validation.structured_output import MAX_GRAMMAR_CHARS
from millstream.rpc import errors
from millstream.v1 import engine_pb2, engine_pb2_grpc

CANCELLED = engine_pb2.FINISH_REASON_CANCELLED
DEADLINE = engine_pb2.FINISH_REASON_DEADLINE
LENGTH = engine_pb2.FINISH_REASON_LENGTH
SLOTS, QUEUE = 4, 4


server = engine_fixture("tests.fake_runners:grammars", slots=SLOTS, queued=QUEUE)
stub = stub_fixture("server")


@pytest.fixture
async def stream(stub: engine_pb2_grpc.EngineStub) -> AsyncIterator[Stream]:
    opened = Stream(stub)
    yield opened
    opened.call.cancel()


def choice(*values: str) -> engine_pb2.StringList:
    return engine_pb2.StringList(values=values)


async def test_accepted_once_the_grammar_is_there(stream: Stream) -> None:
    await stream.submit(
        submission(1, [10], max_tokens=2, json_schema="{}"),
        submission(2, [20], max_tokens=2, json_object=True),
        submission(3, [30], max_tokens=2, regex="é+"),
        submission(4, [40], max_tokens=2, choice=choice("a", "", "é")),
        submission(5, [50], max_tokens=2, grammar="start: X"),
        submission(6, [60], max_tokens=2, json_object=False),
    )
    await stream.until_ended(*range(1, 7))
    assert not stream.rejected
    told = {handle: accepted.sampling for handle, accepted in stream.accepted.items()}
    assert told[1].json_schema == "{}" and told[2].json_object
    assert told[3].regex == "é+" and told[4].choice == choice("a", "", "é")
    assert told[5].grammar == "start: X"
    assert told[6].WhichOneof("structured_output") is None
    assert stream.token_ids[3] == tokens_after(30, 2)


@pytest.mark.parametrize("field", ["json_schema", "regex", "grammar"])
async def test_a_bad_grammar_is_refused_with_its_reason(stream: Stream, field: str) -> None:
    await stream.submit(submission(1, **{field: "fail at line 3: what is this?"}))
    await stream.until_ended(1)
    refusal = stream.refusal(1)
    assert isinstance(refusal, errors.InvalidArgument)
    assert refusal.field == f"sampling.{field}"
    assert refusal.message == f"sampling.{field}: at line 3: what is this?"
    assert not stream.accepted
    stream.forget(1)
    await stream.submit(submission(1, max_tokens=1))  # the handle is free again
    await stream.until_ended(1)
    assert stream.finished[1].reason == LENGTH


async def test_one_for_which_there_is_no_room_may_come_again(stream: Stream) -> None:
    await stream.submit(submission(1, regex="full now"))
    await stream.until_ended(1)
    refusal = stream.refusal(1)
    assert isinstance(refusal, errors.QueueFull)
    assert (refusal.field, refusal.message) == ("sampling.regex", "sampling.regex: now")
    assert refusal.retry_after_s and refusal.retry_after_s > 0


async def test_bad_values(stream: Stream) -> None:
    await stream.submit(
        submission(1, choice=choice()),
        submission(2, regex="a" * (MAX_GRAMMAR_CHARS + 1)),
        submission(3, choice=choice("a" * MAX_GRAMMAR_CHARS)),
    )
    await stream.until_ended(1, 2, 3)
    for handle, field in ((1, "choice"), (2, "regex"), (3, "choice")):
        assert isinstance(stream.refusal(handle), errors.InvalidArgument)
        assert stream.refusal(handle).field == f"sampling.{field}"
    assert str(MAX_GRAMMAR_CHARS) in stream.refusal(2).message
    await stream.submit(submission(5, grammar="vocabulary no such file"))
    await stream.until_ended(5)
    assert isinstance(stream.refusal(5), errors.NoTokenizer)
    assert "no such file" in stream.refusal(5).message


async def test_an_engine_without_a_tokenizer_says_so() -> None:
    with engine(runner="tests.fake_runners:echo") as server:
        async with connect(server.target) as stub:
            stream = Stream(stub)
            await stream.submit(
                submission(1, json_object=True),
                submission(2, max_tokens=1),
                submission(3, regex="a" * (MAX_GRAMMAR_CHARS + 1)),
            )
            await stream.until_ended(1, 2, 3)
            assert isinstance(stream.refusal(1), errors.NoTokenizer)
            assert stream.refusal(1).field == "sampling.json_object"
            assert isinstance(stream.refusal(3), errors.InvalidArgument), "a bad value is first"
            stream.call.cancel()


async def test_a_slow_grammar_holds_up_nobody(stream: Stream) -> None:
    await stream.submit(submission(1, max_tokens=1, regex="wait 2.0"))
    await stream.submit(submission(2, max_tokens=1), submission(3, max_tokens=1, regex="a"))
    begun = time.monotonic()
    await stream.until_ended(2, 3)
    assert time.monotonic() - begun < 1.8
    assert 1 not in stream.accepted
    await stream.until_ended(1)
    assert stream.finished[1].reason == LENGTH


async def test_what_was_prepared_lately_is_accepted_at_once(stream: Stream) -> None:
    await stream.submit(submission(1, max_tokens=1, regex="wait 2.5"))
    await stream.until_ended(1)
    begun = time.monotonic()
    await stream.submit(submission(2, max_tokens=1, regex="wait 2.5"))
    await stream.until_ended(2)
    assert time.monotonic() - begun < 2


async def test_the_core_is_told_what_to_forget() -> None:
    """Of grammars that requests came with, that were refused, that nobody waits for any more."""
    with engine(runner="tests.fake_runners:grammars") as server:
        async with connect(server.target) as stub:
            stream = Stream(stub)
            for number in range(100):
                bad = submission(1000 + number, regex=f"fail {number}")
                await stream.submit(submission(number, max_tokens=1, regex=f"a{number}"), bad)
            await stream.until_ended(*range(100), *range(1000, 1100))
            gone = Stream(stub)
            await gone.submit(*(submission(i, regex=f"wait 0.{i}") for i in range(1, 5)))
            gone.call.cancel()

            async def few_are_kept() -> bool:
                stream.forget(5000)
                await stream.submit(submission(5000, regex="how many are kept"))
                await stream.until_ended(5000)
                return stream.refusal(5000).message == "sampling.regex: 64 are kept"

            assert await eventually(few_are_kept, 10), stream.refusal(5000).message
            stream.call.cancel()


async def test_a_held_handle_is_in_use(stream: Stream) -> None:
    await stream.submit(submission(1, max_tokens=1, n=3, regex="wait 0.3"))
    await stream.submit(submission(3), submission(4, max_tokens=1))
    await stream.until_ended(3, 4)
    assert isinstance(stream.refusal(3), errors.DuplicateHandle)
    stream.rejected.clear()
    await stream.until_ended(1, 2, 3)
    assert not stream.rejected
    assert [stream.finished[handle].reason for handle in (1, 2, 3)] == [LENGTH] * 3


async def test_a_bad_grammar_refuses_all_samples_at_once(stream: Stream) -> None:
    await stream.submit(submission(1, n=3, regex="fail so"))
    await stream.until_ended(1)
    await stream.submit(submission(2, max_tokens=1), submission(3, max_tokens=1))
    await stream.until_ended(2, 3)
    assert not stream.accepted.keys() & {1}


async def test_cancelled_while_it_waits(stream: Stream) -> None:
    await stream.submit(submission(1, [10], max_tokens=500, n=2, regex="wait 0.2"))
    await stream.cancel(1)
    await stream.until_token(2)
    await stream.until_ended(1)
    assert stream.finished[1].reason == CANCELLED
    assert len(stream.token_ids[1]) <= 2
    await stream.cancel(2)
    await stream.until_ended(2)


async def test_its_deadline_counts_the_waiting(stream: Stream) -> None:
    await stream.submit(submission(2, regex="wait 0.1", timeout_ms=300))
    begun = time.monotonic()
    await stream.until_ended(2)
    assert stream.finished[2].reason == DEADLINE
    assert time.monotonic() - begun < 10  # 4,000 tokens take twice as long


async def test_a_deadline_does_not_wait_for_the_grammar(stream: Stream) -> None:
    """All samples are refused together, their places are free, their handles may be used again."""
    await stream.submit(
        *(submission(1 + 4 * i, regex="wait 7.5", timeout_ms=100, n=4) for i in range(2))
    )
    begun = time.monotonic()
    await stream.until_ended(1, 5)
    for handle in (1, 5):
        assert isinstance(stream.refusal(handle), errors.DeadlineExceeded)
        assert "grammar" in stream.refusal(handle).message
    await stream.submit(*(submission(handle, max_tokens=1) for handle in range(2, 10)))
    await stream.until_ended(*range(2, 10))
    assert time.monotonic() - begun < 5
    assert {stream.finished[handle].reason for handle in range(2, 10) if handle != 5} == {LENGTH}
    assert not stream.accepted.keys() & {1}


async def test_a_drain_does_not_wait_for_the_grammar() -> None:
    flags = ("--drain-timeout-s", "0.3")
    with engine(*flags, runner="tests.fake_runners:grammars") as server:
        async with connect(server.target) as stub:
            stream = Stream(stub)
            await stream.submit(submission(1, regex="wait 60", n=2), submission(9, max_tokens=1))
            await stream.until_ended(9)
            server.process.send_signal(signal.SIGTERM)
            await stream.until_ended(1)
            assert isinstance(stream.refusal(1), errors.EngineUnavailable)
            assert (await stream.status())[0] == grpc.StatusCode.UNAVAILABLE
            assert server.process.wait(10) == 0


async def test_half_closing_waits_for_it(stream: Stream) -> None:
    await stream.submit(submission(1, max_tokens=1, regex="wait 0.3"))
    await stream.call.done_writing()
    await stream.until_ended(1)
    assert stream.finished[1].reason == LENGTH


async def test_held_requests_count_in_the_queue(
    stream: Stream, stub: engine_pb2_grpc.EngineStub
) -> None:
    """And leave it with their stream."""
    for handle in range(SLOTS + QUEUE):
        await stream.submit(submission(handle, max_tokens=1, regex="wait 9.0"))
    await stream.submit(submission(100, max_tokens=1))
    await stream.until_ended(100)
    assert isinstance(stream.refusal(100), errors.QueueFull)
    stream.call.cancel()

    async def has_room() -> bool:
        other = Stream(stub)
        await other.submit(submission(1, max_tokens=1, n=SLOTS + QUEUE))
        await other.until_ended(1)
        other.call.cancel()
        return 1 in other.finished

    assert await eventually(has_room, 6.0)
