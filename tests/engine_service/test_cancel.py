"""Cancels, disconnects, deadlines, slow readers: the engine frees at once, no neighbour notices."""

from __future__ import annotations

import asyncio
import random
import time

import grpc
from tests.engine_fixtures import engine_fixture, stub_fixture
from tests.engine_processes import (
    EngineProcess,
    Stream,
    connect,
    engine,
    eventually,
    stats_of,
    submission,
)
from tests.fake_runners import SLEEP_ID, SLEEP_S, tokens_after

from millstream.rpc import errors
from millstream.v1 import engine_pb2, engine_pb2_grpc

CANCELLED = engine_pb2.FINISH_REASON_CANCELLED
DEADLINE = engine_pb2.FINISH_REASON_DEADLINE
LENGTH = engine_pb2.FINISH_REASON_LENGTH
MAX_NUM_SEQS = 4
MAX_QUEUED = 8


server = engine_fixture(
    "tests.fake_runners:scripted", "--no-prefix-caching", slots=MAX_NUM_SEQS, queued=MAX_QUEUED
)


async def freed_within(stub: engine_pb2_grpc.EngineStub, seconds: float) -> bool:
    """Whether no sequence and no block is held, soon enough."""

    async def freed() -> bool:
        now = await stats_of(stub)
        return not (now.num_requests_running or now.num_requests_waiting or now.kv_blocks_used)

    return await eventually(freed, seconds)


async def all_freed(stub: engine_pb2_grpc.EngineStub) -> None:
    assert await freed_within(stub, 5)


stub = stub_fixture("server", at_end=all_freed)


async def test_row_01_cancel_in_the_stream_frees_within_200_ms(
    stub: engine_pb2_grpc.EngineStub,
) -> None:
    stream = Stream(stub)
    await stream.submit(submission(1, [10], max_tokens=4000))
    await stream.until_token(1)
    await stream.cancel(1)
    assert await freed_within(stub, 0.2)
    await stream.until_ended(1)
    finished = stream.finished[1]
    assert finished.reason == CANCELLED
    assert isinstance(errors.from_status(finished.status), errors.Cancelled)
    assert stream.token_ids[1] == tokens_after(10, finished.usage.output_tokens)
    await stream.submit(submission(2, [10], max_tokens=3))  # the stream goes on
    await stream.until_ended(2)
    assert stream.token_ids[2] == [11, 12, 13]
    stream.call.cancel()


async def test_row_50_cancel_in_every_state(stub: engine_pb2_grpc.EngineStub) -> None:
    stream = Stream(stub)
    running = range(1, MAX_NUM_SEQS + 1)
    waiting = range(11, 14)
    await stream.submit(*(submission(h, [10], max_tokens=4000) for h in (*running, *waiting)))
    await stream.until_token(*running)
    await stream.cancel(12, 12, 999)  # waiting, twice, unknown
    await stream.until_ended(12)
    assert stream.token_ids[12] == []
    assert stream.finished[12].usage.output_tokens == 0
    await stream.cancel(1, 1)
    await stream.until_ended(1)
    await stream.until_token(11)  # took its place
    await stream.cancel(1, 12)  # ended already
    await stream.cancel(*running, *waiting)
    await stream.until_ended(*running, *waiting)
    assert {finished.reason for finished in stream.finished.values()} == {CANCELLED}
    # Submission and cancel in one message, and a handle that is free again.
    stream.forget(1)
    await stream.call.write(
        engine_pb2.GenerateRequest(submit=[submission(1, max_tokens=4000)], cancel=[1])
    )
    await stream.until_ended(1)
    assert stream.finished[1].reason == CANCELLED
    await stream.call.done_writing()
    assert (await stream.status())[0] is grpc.StatusCode.OK


async def test_row_03_disconnect_while_waiting(stub: engine_pb2_grpc.EngineStub) -> None:
    busy, gone = Stream(stub), Stream(stub)
    running = range(MAX_NUM_SEQS)
    await busy.submit(*(submission(h, [10], max_tokens=4000) for h in running))
    await busy.until_token(*running)
    await gone.submit(submission(1, [500], max_tokens=4000))
    while 1 not in gone.accepted:
        await gone.read()
    assert (await stats_of(stub)).num_requests_waiting == 1
    before = await stats_of(stub)
    gone.call.cancel()
    await asyncio.sleep(0.2)
    after = await stats_of(stub)
    assert (after.num_requests_waiting, after.num_requests_running) == (0, MAX_NUM_SEQS)
    assert after.prompt_tokens == before.prompt_tokens, "it was never admitted"
    busy.call.cancel()
    assert await freed_within(stub, 0.5)


async def test_row_03_disconnect_in_mid_prefill(stub: engine_pb2_grpc.EngineStub) -> None:
    other, gone = Stream(stub), Stream(stub)
    before = await stats_of(stub)
    await gone.submit(submission(1, [SLEEP_ID, 500], max_tokens=4000))
    await asyncio.sleep(0.1)  # the step that computes it runs for SLEEP_S
    gone.call.cancel()
    await other.submit(submission(1, [20], max_tokens=5))
    await other.until_ended(1)
    assert other.token_ids[1] == tokens_after(20, 5)
    assert await freed_within(stub, SLEEP_S + 0.5)
    generated = (await stats_of(stub)).generation_tokens - before.generation_tokens
    assert generated <= 5 + 2, "at most the steps that were launched"
    other.call.cancel()


async def test_the_rpcs_own_deadline_cancels_all(stub: engine_pb2_grpc.EngineStub) -> None:
    stream = Stream(stub, timeout_s=0.3)
    await stream.submit(submission(1, max_tokens=4000))
    assert (await stream.status())[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await freed_within(stub, 0.5)


async def test_a_lost_connection_cancels_all(server: EngineProcess) -> None:
    async with connect(server.target) as lost:
        stream = Stream(lost)
        await stream.submit(*(submission(h, max_tokens=4000) for h in range(8)))
        await stream.until_token(1)
    async with connect(server.target) as stub:
        assert await freed_within(stub, 0.5)


async def test_deadlines_count_queueing_and_running(stub: engine_pb2_grpc.EngineStub) -> None:
    stream = Stream(stub)
    running = range(MAX_NUM_SEQS)
    await stream.submit(
        *(submission(h, [10], max_tokens=4000) for h in running),
        submission(11, [10], timeout_ms=150),  # waits
        submission(12, [10], timeout_ms=60_000, max_tokens=2),
        submission(13, [10], timeout_ms=0),
    )
    await stream.until_ended(11, 13)
    assert stream.finished[11].reason == DEADLINE
    assert stream.token_ids[11] == []
    assert 0.14 < stream.finished[11].timings.queue_s < 1
    assert isinstance(errors.from_status(stream.finished[11].status), errors.DeadlineExceeded)
    assert stream.refusal(13).field == "timeout_ms"
    await stream.cancel(*running)
    await stream.until_ended(12)
    assert stream.finished[12].reason == LENGTH
    await stream.submit(submission(20, [10], timeout_ms=100, max_tokens=4000))
    await stream.call.done_writing()
    assert (await stream.status())[0] is grpc.StatusCode.OK, "half-closed: its end ends the stream"
    assert stream.finished[20].reason == DEADLINE
    assert stream.token_ids[20] == tokens_after(10, len(stream.token_ids[20])) != []


async def test_a_full_queue_refuses_with_a_retry_hint(stub: engine_pb2_grpc.EngineStub) -> None:
    stream = Stream(stub)
    most = MAX_NUM_SEQS + MAX_QUEUED
    await stream.submit(*(submission(h, [10], max_tokens=4000) for h in range(most + 3)))
    await stream.until_ended(*range(most, most + 3))
    for handle in range(most, most + 3):
        refusal = stream.refusal(handle)
        assert isinstance(refusal, errors.QueueFull)
        assert refusal.retry_after_s is not None
        assert refusal.retry_after_s > 0
    await stream.cancel(0)
    await stream.until_ended(0)
    await stream.submit(submission(50, [10]))
    while 50 not in stream.accepted:
        assert await stream.read() is not None
    stream.call.cancel()
    assert await freed_within(stub, 0.5)


async def test_random_cancels_disconnects_and_deadlines_leave_nothing(
    stub: engine_pb2_grpc.EngineStub,
) -> None:
    rng = random.Random(0)

    async def one() -> None:
        stream = Stream(stub, api_key=rng.choice([None, "a", "b"]))
        submissions = [
            submission(
                handle,
                [rng.randrange(500)],
                max_tokens=rng.randint(1, 100),
                timeout_ms=rng.choice([None, rng.randint(1, 200)]),
                n=rng.choice([1, 1, 3]),
                priority=rng.choice([0, 0, -1, 7]),
            )
            for handle in range(0, 4 * rng.randint(1, 4), 4)
        ]
        await stream.submit(*submissions)
        await asyncio.sleep(rng.random() * 0.3)
        await stream.cancel(*(handle for handle in range(16) if rng.random() < 0.3))
        if rng.random() < 0.5:
            stream.call.cancel()
            return
        await stream.call.done_writing()
        assert (await stream.status())[0] is grpc.StatusCode.OK
        ended = set(stream.finished)
        for one in submissions:
            samples = set(range(one.handle, one.handle + one.sampling.n))
            assert (one.handle in stream.rejected) != (samples <= ended)
            ended -= samples
        assert not ended

    async with asyncio.timeout(40), asyncio.TaskGroup() as group:
        for _ in range(60):
            group.create_task(one())
            await asyncio.sleep(0.01)
    assert await freed_within(stub, 1)

    async def no_stream_is_open() -> bool:
        return (await stats_of(stub)).open_streams == 0

    assert await eventually(no_stream_is_open, 5)


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096


async def test_row_32_slow_readers_hold_up_nobody() -> None:
    """20 streams read one message and then nothing; their tokens wait merged, in little memory."""
    tokens_each = 20_000
    flags = ["--max-num-seqs", "32", "--max-model-len", str(tokens_each + 16)]
    with engine(*flags) as server:
        async with connect(server.target) as stub:
            quick = Stream(stub)
            await quick.submit(submission(1, max_tokens=100))
            await quick.until_ended(1)
            before = resident_bytes(server.process.pid)
            slow = [Stream(stub) for _ in range(20)]
            for stream in slow:
                await stream.submit(submission(1, [7], max_tokens=tokens_each, ignore_eos=True))
                await stream.until_token(1)
            started = time.monotonic()
            await quick.submit(submission(2, [5], max_tokens=2000, ignore_eos=True))
            await quick.until_ended(2)
            assert time.monotonic() - started < 10

            async def all_finished() -> bool:
                return (await stats_of(stub)).requests_finished == 22

            assert await eventually(all_finished, 60)
            grown = resident_bytes(server.process.pid) - before
            assert grown < 100 * 2**20, f"{grown / 2**20:.0f} MiB for {20 * tokens_each} tokens"
            for stream in slow:
                await stream.until_ended(1)
                assert stream.token_ids[1] == tokens_after(7, tokens_each)
                assert len(stream.messages) < tokens_each / 4
