"""The queue through gRPC: bounded, with hints when to come again; fair; left at a deadline.

A step takes PACE_S. What is printed (pytest -s) are the waiting times."""

from __future__ import annotations

import asyncio
import itertools
import time

from tests.engine_fixtures import engine_fixture, stub_fixture
from tests.engine_processes import EngineProcess, Stream, eventually, stats_of, submission
from tests.fake_runners import PACE_S

from millstream.client import AsyncClient, SamplingParams
from millstream.rpc import errors
from millstream.v1 import engine_pb2, engine_pb2_grpc

DEADLINE = engine_pb2.FINISH_REASON_DEADLINE
LENGTH = engine_pb2.FINISH_REASON_LENGTH
SLOTS, QUEUE = 4, 1200
SHORT = 8  # tokens
LONG = 4000


server = engine_fixture("tests.fake_runners:paced", slots=SLOTS, queued=QUEUE)
small_server = engine_fixture("tests.fake_runners:paced", slots=SLOTS, queued=8)


async def emptied(stub: engine_pb2_grpc.EngineStub) -> None:
    async def empty() -> bool:
        now = await stats_of(stub)
        return not (now.num_requests_running or now.num_requests_waiting)

    assert await eventually(empty, 5)


stub = stub_fixture("server", at_end=emptied)
small = stub_fixture("small_server", at_end=emptied)


async def waiting(stub: engine_pb2_grpc.EngineStub, count: int) -> None:
    """Until so many requests wait."""

    async def so_many() -> bool:
        return (await stats_of(stub)).num_requests_waiting >= count

    assert await eventually(so_many, 10)


# ---- fairness


async def test_a_thousand_queued_requests_do_not_starve_another_streams_one(
    stub: engine_pb2_grpc.EngineStub,
) -> None:
    greedy, modest = Stream(stub), Stream(stub)
    await greedy.submit(*(submission(h, [10], max_tokens=SHORT) for h in range(SLOTS + 1000)))
    await waiting(stub, 900)
    began = time.monotonic()
    await modest.submit(submission(1, [10], max_tokens=SHORT))
    await modest.until_ended(1)
    took_s = time.monotonic() - began
    left = (await stats_of(stub)).num_requests_waiting
    waited_s = modest.finished[1].timings.queue_s
    alone_s = SHORT * PACE_S
    everyone_s = 1000 / SLOTS * alone_s
    print(
        f"one request behind 1,000 of another stream: waited {1e3 * waited_s:.0f} ms for a slot, "
        f"took {1e3 * took_s:.0f} ms; {left} of the 1,000 still wait "
        f"(first come, first served: {1e3 * everyone_s:.0f} ms)"
    )
    assert modest.finished[1].reason == LENGTH
    assert left > 700, "it did not wait for them"
    assert waited_s < everyone_s / 5
    greedy.call.cancel()


async def test_streams_with_one_api_key_are_one_client(stub: engine_pb2_grpc.EngineStub) -> None:
    greedy = Stream(stub, api_key="greedy")
    await greedy.submit(*(submission(h, [10], max_tokens=SHORT) for h in range(SLOTS + 200)))
    await waiting(stub, 150)
    again, other = Stream(stub, api_key="greedy"), Stream(stub, api_key="other")
    await again.submit(submission(1, [10], max_tokens=SHORT))
    turns_s = 0.0
    for handle in range(3):
        await other.submit(submission(handle, [10], max_tokens=SHORT))
        await other.until_ended(handle)
        timings = other.finished[handle].timings
        turns_s += timings.first_token_s + timings.decode_s
    assert (await stats_of(stub)).num_requests_waiting > 50
    await greedy.cancel(*range(SLOTS + 200))
    await again.until_ended(1)
    waited_s = again.finished[1].timings.queue_s
    print(
        f"three of another key took {turns_s:.3f} s, one more of the same key waited {waited_s:.3f}"
    )
    assert waited_s > turns_s, "it waited behind its own client's"
    for stream in (greedy, again, other):
        stream.call.cancel()


async def test_priorities_through_grpc(stub: engine_pb2_grpc.EngineStub) -> None:
    stream = Stream(stub)
    await stream.submit(*(submission(h, [10], max_tokens=40) for h in range(SLOTS)))
    await stream.until_token(*range(SLOTS))
    late = {20: 0, 21: 5, 22: -5, 23: 0, 24: -5}
    await stream.submit(
        *(submission(h, [10], max_tokens=40, priority=priority) for h, priority in late.items())
    )
    await stream.until_ended(*late)
    by_wait = sorted(late, key=lambda handle: stream.finished[handle].timings.queue_s)
    assert set(by_wait[:4]) == {22, 24, 20, 23} and by_wait[4] == 21
    stream.call.cancel()


# ---- deadlines


async def test_a_queued_request_ends_at_its_deadline_at_no_cost(
    small: engine_pb2_grpc.EngineStub,
) -> None:
    stream = Stream(small)
    before = await stats_of(small)
    await stream.submit(
        *(submission(h, [10], max_tokens=LONG) for h in range(SLOTS)),
        *(submission(h, [10] * 50, timeout_ms=200) for h in range(10, 18)),
    )
    await stream.submit(submission(30, [10]))
    await stream.until_ended(30)
    assert isinstance(stream.refusal(30), errors.QueueFull)
    await stream.until_ended(*range(10, 18))
    for handle in range(10, 18):
        ended = stream.finished[handle]
        assert ended.reason == DEADLINE
        assert isinstance(errors.from_status(ended.status), errors.DeadlineExceeded)
        assert 0.1 < ended.timings.queue_s < 1
        assert (ended.usage.output_tokens, ended.timings.prefill_s) == (0, 0)
    now = await stats_of(small)
    assert now.num_requests_waiting == 0
    assert now.prompt_tokens - before.prompt_tokens == SLOTS, "none of their prompts was computed"
    stream.forget(30)
    await stream.submit(submission(30, [10], timeout_ms=50))  # their places are free
    await stream.until_ended(30)
    assert stream.finished[30].reason == DEADLINE
    stream.call.cancel()


# ---- the bound


async def test_samples_count_each_and_a_list_is_taken_as_far_as_it_goes(
    small: engine_pb2_grpc.EngineStub,
) -> None:
    stream = Stream(small)
    await stream.submit(
        submission(0, [10], n=SLOTS + 6, max_tokens=LONG),
        submission(20, [10], n=3, max_tokens=LONG),  # two places are left
        submission(30, [10], n=2, max_tokens=LONG),
        submission(40, [10], max_tokens=LONG),
    )
    await stream.until_ended(20, 40)
    assert isinstance(stream.refusal(20), errors.QueueFull)
    assert isinstance(stream.refusal(40), errors.QueueFull)
    while 31 not in stream.accepted:
        await stream.read()
    await waiting(small, 8)
    await stream.cancel(5)  # a sample gives up its place alone
    await stream.until_ended(5)
    stream.forget(40)
    await stream.submit(submission(40, [10], max_tokens=LONG))
    while 40 not in stream.accepted:
        await stream.read()
    stream.call.cancel()


async def test_a_full_queue_is_not_closed_to_a_client_that_has_nothing_there(
    small: engine_pb2_grpc.EngineStub,
) -> None:
    greedy, modest = Stream(small), Stream(small)
    await modest.submit(submission(0, [10], n=2, max_tokens=1))  # what it had and has no more
    await modest.until_ended(0, 1)
    modest.forget(1)
    await greedy.submit(*(submission(h, [10], max_tokens=SHORT * 10) for h in range(SLOTS + 9)))
    await greedy.until_ended(SLOTS + 8)
    assert isinstance(greedy.refusal(SLOTS + 8), errors.QueueFull)
    await modest.submit(submission(1, [10], max_tokens=2), submission(2, [10], max_tokens=2))
    await modest.until_ended(2)
    assert isinstance(modest.refusal(2), errors.QueueFull), "one is what it gets"
    await modest.until_ended(1)
    assert modest.finished[1].reason == LENGTH
    for stream in (greedy, modest):
        stream.call.cancel()


async def test_the_hint_comes_from_the_measured_rate(small: engine_pb2_grpc.EngineStub) -> None:
    """Requests of 20 steps in 4 slots: a place comes free each 5 steps, on average."""
    stream = Stream(small)
    handles = itertools.count()

    async def submit(count: int) -> list[int]:
        new = [next(handles) for _ in range(count)]
        await stream.submit(*(submission(h, [10], max_tokens=20) for h in new))
        return new

    await submit(SLOTS + 8)
    ended, began = 0, time.monotonic()
    while ended < 60:  # the queue stays full
        await stream.read()
        await submit(len(stream.finished) - ended)
        ended = len(stream.finished)
    place_s = (time.monotonic() - began) / ended
    refused = await submit(6)
    await stream.until_ended(*refused)
    hints = [stream.refusal(h).retry_after_s or 0 for h in refused if h in stream.rejected]
    print(f"a place came free each {1e3 * place_s:.0f} ms; hints {[round(1e3 * s) for s in hints]}")
    assert len(hints) >= 3
    assert hints == sorted(hints)
    for places, hint_s in enumerate(hints, 1):
        assert 0.05 <= hint_s < 3 * max(places * place_s, 0.05)
    assert hints[-1] > 0.3 * len(hints) * place_s
    stream.call.cancel()


async def test_clients_that_keep_to_the_hints_all_get_through(small_server: EngineProcess) -> None:
    """Four clients of one engine, each of which would fill it."""
    refused = 0

    def observe(message: engine_pb2.GenerateResponse) -> None:
        nonlocal refused
        refused += len(message.rejected)

    async def one(number: int) -> None:
        async with AsyncClient(small_server.target, None, observer=observe) as client:
            params = SamplingParams(max_tokens=10)
            outputs = await client.generate([[number]] * 30, params, detokenize=False)
            assert len(outputs) == 30

    began = time.monotonic()
    await asyncio.gather(*map(one, range(4)))
    took_s = time.monotonic() - began
    print(f"120 requests through 12 places in {took_s:.1f} s; refused {refused} times")
    assert 0 < refused < 120 * 6, "they come when there is room, not over and over"
