"""Stream: handles in use, merging, order, bounds; each against what a naive reader would expect."""

from __future__ import annotations

import asyncio
import random
import tracemalloc

import pytest

from millstream.engine.streams import (
    MAX_ACCEPTED_PER_MESSAGE,
    MAX_ENDED_UNSENT,
    MAX_TOKENS_PER_MESSAGE,
    Stream,
)
from millstream.rpc.errors import EngineFault, EngineUnavailable
from millstream.v1 import engine_pb2


def accept(stream: Stream, handle: int) -> None:
    stream.accept(engine_pb2.Accepted(handle=handle), None)


def reject(stream: Stream, handle: int) -> None:
    stream.reject(engine_pb2.Rejected(handle=handle))


def finished(*handles: int) -> list[engine_pb2.Finished]:
    return [engine_pb2.Finished(handle=handle) for handle in handles]


async def take(stream: Stream) -> engine_pb2.GenerateResponse:
    async with asyncio.timeout(1):
        message = await stream.next()
    assert message is not None
    return message


async def nothing_comes(stream: Stream) -> bool:
    try:
        async with asyncio.timeout(0.01):
            await stream.next()
    except TimeoutError:
        return True
    return False


async def test_a_step_is_a_message() -> None:
    stream = Stream(1)
    accept(stream, 5)
    accept(stream, 6)
    stream.add_step([5, 6], [50, 60], [])
    message = await take(stream)
    assert [accepted.handle for accepted in message.accepted] == [5, 6]
    assert list(message.output.handles) == [5, 6]
    assert list(message.output.token_ids) == [50, 60]
    assert list(message.output.counts) == []
    stream.add_step([5], [51], finished(5))
    message = await take(stream)
    assert list(message.output.token_ids) == [51]
    assert [end.handle for end in message.finished] == [5]
    assert await nothing_comes(stream)


async def test_waiting_steps_merge_with_counts() -> None:
    stream = Stream(1)
    for handle in (1, 2, 3):
        accept(stream, handle)
    stream.add_step([1, 2], [10, 20], [])
    stream.add_step([2, 1], [21, 11], finished(2))
    stream.add_step([1, 3], [12, 30], finished(1))
    message = await take(stream)
    assert list(message.output.handles) == [1, 2, 3]
    assert list(message.output.token_ids) == [10, 11, 12, 20, 21, 30]
    assert list(message.output.counts) == [3, 2, 1]
    assert [end.handle for end in message.finished] == [2, 1]


async def test_merging_needs_no_counts_when_each_has_one_token() -> None:
    stream = Stream(1)
    accept(stream, 1)
    accept(stream, 2)
    stream.add_step([1], [10], [])
    stream.add_step([2], [20], [])
    assert list((await take(stream)).output.counts) == []


async def test_an_end_without_tokens() -> None:
    stream = Stream(1)
    accept(stream, 1)
    stream.add_step([], [], finished(1))
    message = await take(stream)
    assert not message.HasField("output")
    assert [end.handle for end in message.finished] == [1]


async def test_many_accepted_requests_take_several_messages_and_precede_their_tokens() -> None:
    stream = Stream(1)
    handles = list(range(2 * MAX_ACCEPTED_PER_MESSAGE + 1))
    for handle in handles:
        accept(stream, handle)
    stream.add_step(handles, handles, finished(*handles))
    messages = [await take(stream) for _ in range(3)]
    assert [len(message.accepted) for message in messages] == [1024, 1024, 1]
    assert [len(message.output.handles) for message in messages] == [0, 0, len(handles)]
    assert [len(message.finished) for message in messages] == [0, 0, len(handles)]
    assert await nothing_comes(stream)


async def test_a_handle_is_in_use_until_its_end_is_taken() -> None:
    stream = Stream(1)
    accept(stream, 1)
    assert stream.is_live(1)
    stream.add_step([1], [10], finished(1))
    assert not stream.is_live(1)
    assert stream.in_use(1), "a second request by this handle would share its message"
    reject(stream, 2)
    assert stream.in_use(2)
    await take(stream)
    assert not stream.in_use(1)
    assert not stream.in_use(2)


async def test_refusing_a_duplicate_does_not_free_the_handle() -> None:
    stream = Stream(1)
    accept(stream, 1)
    reject(stream, 1)
    await take(stream)
    assert stream.is_live(1)
    # Its end waits behind a full message; a refusal leaves with the first.
    stream.add_step([1] * MAX_TOKENS_PER_MESSAGE, [7] * MAX_TOKENS_PER_MESSAGE, [])
    stream.add_step([1], [8], finished(1))
    reject(stream, 1)
    assert [refusal.handle for refusal in (await take(stream)).rejected] == [1]
    assert stream.in_use(1)
    await take(stream)
    assert not stream.in_use(1)


async def test_timers_end_with_their_requests() -> None:
    loop = asyncio.get_running_loop()
    stream = Stream(1)
    timers = [loop.call_later(60, print) for _ in range(2)]
    for handle, timer in enumerate(timers):
        stream.accept(engine_pb2.Accepted(handle=handle), timer)
    stream.add_step([], [], finished(0))
    assert [timer.cancelled() for timer in timers] == [True, False]
    assert stream.close() == [1]
    assert timers[1].cancelled()


async def test_ends_with_ok_once_everything_is_sent() -> None:
    stream = Stream(1)
    accept(stream, 1)
    await take(stream)
    stream.end_when_idle(None)
    assert await nothing_comes(stream)
    stream.add_step([1], [10], finished(1))
    stream.end_when_idle(EngineUnavailable("later calls do not count"))
    await take(stream)
    assert await stream.next() is None


async def test_ends_with_an_error_once_everything_is_sent() -> None:
    stream = Stream(1)
    accept(stream, 1)
    stream.end_when_idle(EngineUnavailable("stopping"))
    await take(stream)
    stream.add_step([1], [10], finished(1))
    await take(stream)
    with pytest.raises(EngineUnavailable, match="stopping"):
        await stream.next()


async def test_fails_at_once() -> None:
    stream = Stream(1)
    accept(stream, 1)
    waiting = asyncio.create_task(Stream.next(stream))
    await waiting
    waiting = asyncio.create_task(Stream.next(stream))
    await asyncio.sleep(0)
    stream.fail(EngineFault("first"))
    stream.fail(EngineFault("second"))
    with pytest.raises(EngineFault, match="first"):
        await waiting


async def test_reading_waits_while_too_many_ends_are_unsent() -> None:
    stream = Stream(1)
    for handle in range(MAX_ENDED_UNSENT + 1):
        reject(stream, handle)
    room = asyncio.create_task(stream.room())
    await asyncio.sleep(0.01)
    assert not room.done()
    await take(stream)
    async with asyncio.timeout(1):
        await room


@pytest.mark.parametrize("seed", range(20))
async def test_random_steps_and_readers(seed: int) -> None:
    """Whatever the reader's pace: every token once and in order, accepted before tokens before the
    end, and no message with two requests of one handle."""
    rng = random.Random(seed)
    stream = Stream(1)
    sent: dict[tuple[int, int], list[int]] = {}  # (handle, nth use): tokens
    got: dict[tuple[int, int], list[int]] = {}
    uses = dict.fromkeys(range(6), 0)
    begun = dict.fromkeys(range(6), 0)
    ended: set[int] = set(range(6))

    def step() -> None:
        for handle in range(6):
            if not stream.in_use(handle) and rng.random() < 0.3:
                uses[handle] += 1
                sent[handle, uses[handle]] = []
                accept(stream, handle)
        live = rng.sample(stream.live_handles, rng.randint(0, len(stream.live_handles)))
        tokens = [rng.randrange(2**32) for _ in live]
        for handle, token in zip(live, tokens, strict=True):
            sent[handle, uses[handle]].append(token)
        stream.add_step(live, tokens, finished(*(h for h in live if rng.random() < 0.2)))

    def read(message: engine_pb2.GenerateResponse) -> None:
        for accepted in message.accepted:
            assert accepted.handle in ended
            ended.discard(accepted.handle)
            begun[accepted.handle] += 1
            got[accepted.handle, begun[accepted.handle]] = []
        counts = message.output.counts or [1] * len(message.output.handles)
        token_ids = iter(message.output.token_ids)
        for handle, count in zip(message.output.handles, counts, strict=True):
            assert handle not in ended
            got[handle, begun[handle]] += [next(token_ids) for _ in range(count)]
        assert next(token_ids, None) is None
        for end in message.finished:
            assert end.handle not in ended
            ended.add(end.handle)

    for _ in range(200):
        step()
        while rng.random() < 0.4 and not await nothing_comes_now(stream):
            read(await take(stream))
    stream.add_step([], [], finished(*stream.live_handles))
    stream.end_when_idle(None)
    while (message := await stream.next()) is not None:
        read(message)
    assert got == sent
    assert not any(stream.in_use(handle) for handle in range(6))


async def nothing_comes_now(stream: Stream) -> bool:
    return not (stream._accepted or stream._rejected or stream._waiting)


async def test_row_32_what_waits_is_small() -> None:
    stream = Stream(1)
    accept(stream, 1)
    tracemalloc.start()
    for token_id in range(200_000):
        stream.add_step([1], [token_id], [])
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 200_000 * 12, f"{used / 200_000:.1f} bytes a token"
    token_ids: list[int] = []
    while len(token_ids) < 200_000:
        message = await take(stream)
        assert message.ByteSize() < 2**20
        token_ids += message.output.token_ids
    assert token_ids == list(range(200_000))
