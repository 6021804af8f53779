"""One client of several engines: load, engines that go away and come back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from tests.fake_services import FakeServices, until

from millstream.client import AsyncClient, Client, SamplingParams
from millstream.client.types import Health
from millstream.rpc.errors import (
    EngineUnavailable,
    FingerprintMismatch,
    InvalidArgument,
    QueueFull,
)

PROMPT = [104, 105]


@contextlib.asynccontextmanager
async def several(count: int) -> AsyncIterator[list[FakeServices]]:
    running = [FakeServices() for _ in range(count)]
    for each in running:
        await each.start()
    try:
        yield running
    finally:
        for each in running:
            await each.stop()


def client_of(services: list[FakeServices], timeout_s: float = 2) -> AsyncClient:
    targets = [each.target for each in services]
    return AsyncClient(targets, services[0].target, timeout_s=timeout_s)


def submissions(services: FakeServices) -> int:
    return sum(len(message.submit) for message in services.engine.messages)


async def test_a_batch_is_spread_evenly() -> None:
    async with several(3) as services, client_of(services) as client:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        outputs = await client.generate([PROMPT] * 300, params)
        assert len(outputs) == 300
        assert [submissions(each) for each in services] == [100, 100, 100]
        texts = await client.generate(["hello"] * 30, params)
        assert {output.text for output in texts} == {"hello"}
        assert [submissions(each) for each in services] == [110, 110, 110]


async def test_long_requests_count_for_more() -> None:
    async with several(2) as services, client_of(services) as client:
        services[0].engine.step_s = services[1].engine.step_s = 0.002
        long = asyncio.create_task(
            client.generate(PROMPT, SamplingParams(max_tokens=1000, ignore_eos=True))
        )
        await until(lambda: sum(map(submissions, services)) == 1)
        short = SamplingParams(max_tokens=10, ignore_eos=True)
        await client.generate([PROMPT] * 20, short, detokenize=False)
        assert sorted(map(submissions, services)) == [1, 20]
        long.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await long
        engines = client._services.engines
        await until(lambda: not any(each.load for each in engines._ready()))
        await client.generate([PROMPT] * 20, short, detokenize=False)
        assert sorted(map(submissions, services)) == [11, 30]


def with_caches(services: list[FakeServices]) -> list[FakeServices]:
    """Before a client comes: engines that say how much their KV caches hold."""
    for each in services:
        each.engine.info.limits.block_size, each.engine.info.limits.num_blocks = 16, 1 << 12
    return services


async def test_a_conversation_stays_where_its_prefix_is_cached() -> None:
    async with several(3) as services, client_of(with_caches(services)) as client:
        said = [[number] * 200 for number in range(6)]
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        await client.generate(said, params, detokenize=False)
        assert [submissions(each) for each in services] == [2, 2, 2]
        for turn in (said[3], said[1], said[3], said[3], said[5]):
            before = [submissions(each) for each in services]
            turn += turn[-1:] * 50
            await client.generate(turn, params, detokenize=False)
            (taker,) = (i for i in range(3) if submissions(services[i]) > before[i])
            prompts = [
                list(submission.token_ids)
                for message in services[taker].engine.messages
                for submission in message.submit
            ]
            assert turn[:200] in [prompt[:200] for prompt in prompts[:-1]]


async def test_a_cached_prefix_is_no_reason_to_overload_an_engine() -> None:
    """All begin with the same long document, which one engine has had."""
    async with several(4) as services, client_of(with_caches(services)) as client:
        for each in services:
            each.engine.info.limits.max_num_seqs = 1000
        document = [7] * 16_000
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        await client.generate(document, params, detokenize=False)
        await client.generate(document, params, detokenize=False)
        assert sorted(map(submissions, services)) == [0, 0, 0, 2], "alone it has nobody before it"
        questions = [[*document, number, 1, 2, 3] for number in range(240)]
        await client.generate(questions, params, detokenize=False)
        assert max(map(submissions, services)) < 2 * min(map(submissions, services))


async def test_the_tokens_that_are_cached_are_nothing_to_do() -> None:
    async with several(2) as services, client_of(with_caches(services)) as client:
        engines = client._services.engines
        params = SamplingParams(max_tokens=5000, ignore_eos=True)
        for each in services:
            each.engine.step_s = 0.002
        outstanding = []
        for _ in range(2):
            call = asyncio.create_task(client.generate([3] * 640, params, detokenize=False))
            await until(lambda: any(each.engine.live for each in services))
            outstanding.append(sum(each.load for each in engines._ready()))
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call
            await until(lambda: not any(each.load for each in engines._ready()))
        assert outstanding == [5160, 5000]


async def test_who_would_wait_goes_to_an_engine_that_has_room() -> None:
    """However much that has to do; once all are full, the tokens count again."""
    async with several(2) as services, client_of(services) as client:
        for each in services:
            each.engine.info.limits.max_num_seqs = 4
            each.engine.step_s = 0.002
        lengths = [1000, *[10] * 7, *[10] * 6]
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
        batch = asyncio.create_task(
            client.generate([PROMPT] * 14, params, detokenize=False, return_exceptions=True)
        )
        await until(lambda: sum(map(submissions, services)) == 14)
        assert sorted(map(submissions, services)) == [4, 10]
        batch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await batch
        engines = client._services.engines._ready()
        await until(lambda: not any(each.is_full for each in engines))
        with engines[0].expecting(load=0, samples=3):
            assert not engines[0].is_full
            with engines[0].expecting(load=0, samples=1):
                assert engines[0].is_full
                await client.generate(PROMPT, params[1], detokenize=False)
        assert sorted(map(submissions, services)) == [4, 11]


async def test_what_waits_for_places_counts() -> None:
    """Two engines that take four requests at a time: all of the rest waited for the first one."""
    async with several(2) as services, client_of(services) as client:
        for each in services:
            each.engine.info.limits.max_num_seqs, each.engine.info.limits.max_queued_requests = 4, 0
            each.engine.step_s = 0.001
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        outputs = await client.generate([PROMPT] * 40, params, detokenize=False)
        assert len(outputs) == 40
        assert [submissions(each) for each in services] == [20, 20]
        engines = client._services.engines._ready()
        assert [engine.load for engine in engines] == [0, 0]


async def test_what_waits_for_room_counts() -> None:
    async with several(2) as services, client_of(services) as client:
        for each in services:
            each.engine.room, each.engine.retry_after_s = 0, 60
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        batch = asyncio.create_task(client.generate([PROMPT] * 10, params, detokenize=False))
        await until(lambda: sum(each.engine.refused for each in services) == 20)
        engines = client._services.engines._ready()
        wanted = 10 * (len(PROMPT) / 4 + 3)
        await until(lambda: sum(engine.load for engine in engines) == wanted)
        batch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await batch
        # A last refusal may still be on its way.
        await until(lambda: all(engine.load == 0 for engine in engines))


@pytest.mark.parametrize("waits_for", ["places", "room"])
async def test_what_waits_for_an_engine_that_goes_away_moves(waits_for: str) -> None:
    """It was never sent there; only what the engine had accepted is lost."""
    async with several(2) as services, client_of(services) as client:
        first, second = services
        for each in services:
            each.engine.step_s = 0.01
            if waits_for == "places":
                limits = each.engine.info.limits
                limits.max_num_seqs, limits.max_queued_requests = 4, 0
            else:
                each.engine.room, each.engine.retry_after_s = 0, 0.5
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        batch = asyncio.create_task(
            client.generate([PROMPT] * 40, params, detokenize=False, return_exceptions=True)
        )
        if waits_for == "places":
            await until(lambda: first.engine.live == second.engine.live == 4)
        else:
            await until(lambda: first.engine.refused + second.engine.refused == 80)
        await first.stop()
        second.engine.room = 1000
        errors = [each for each in await batch if isinstance(each, BaseException)]
        assert len(errors) == (4 if waits_for == "places" else 0), errors[:1]
        assert all(isinstance(error, EngineUnavailable) for error in errors)


async def test_what_was_not_accepted_moves_and_what_streams_ends() -> None:
    """One engine is stopped while it has requests of both kinds."""
    async with several(2) as services, client_of(services) as client:
        first, second = services
        for each in services:
            each.engine.step_s = 0.005
        endless = SamplingParams(max_tokens=100_000, ignore_eos=True)
        running = [client.stream(PROMPT, endless, detokenize=False) for _ in range(4)]
        for stream in running:
            await anext(stream)
        assert first.engine.live == second.engine.live == 2
        first.engine.deaf = True
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        batch = asyncio.create_task(client.generate([PROMPT] * 50, params, detokenize=False))
        one = client.stream(PROMPT, params, detokenize=False)
        waiting = asyncio.create_task(anext(one))
        await until(lambda: submissions(first) >= 2 + 25)
        await first.stop()
        assert {len(output.token_ids) for output in await batch} == {3}
        assert len((await waiting).token_ids) >= 1
        ended = 0
        for stream in running:
            try:
                await anext(stream)
            except EngineUnavailable:
                ended += 1
        assert ended == 2
        assert second.engine.live == 2
        for stream in running:
            stream.cancel()


async def test_an_engine_that_refuses_as_it_drains_is_left_alone() -> None:
    async with several(2) as services, client_of(services) as client:
        await client.generate(PROMPT, SamplingParams(max_tokens=1), detokenize=False)
        services[0].engine.draining = True
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        outputs = await client.generate([PROMPT] * 10, params, detokenize=False)
        assert len(outputs) == 10
        stream = client.stream(PROMPT, params, detokenize=False)
        assert [delta.token_ids async for delta in stream]
        services[1].engine.draining = True
        with pytest.raises(EngineUnavailable, match="stopping"):
            await client.generate(PROMPT, params, detokenize=False)


async def test_one_with_a_full_queue_is_left_to_others() -> None:
    """Streams too, which do not wait for room; and once all are full they say so."""
    async with several(3) as services, client_of(services) as client:
        services[0].engine.room = services[2].engine.room = 0
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        outputs = await client.generate([PROMPT] * 10, params, detokenize=False, timeout_s=5)
        assert len(outputs) == 10
        for _ in range(3):
            stream = client.stream(PROMPT, params, detokenize=False)
            assert [delta.token_ids async for delta in stream]
        services[1].engine.room = 0
        before = [each.engine.refused for each in services]
        with pytest.raises(QueueFull):
            await client.generate(PROMPT, params, detokenize=False, max_retries=0)
        with pytest.raises(QueueFull):
            await anext(client.stream(PROMPT, params, detokenize=False, max_retries=1))
        after = [each.engine.refused for each in services]
        assert [b - a for a, b in zip(before, after, strict=True)] == [3, 3, 3]


async def test_one_that_is_away_is_left_out_and_comes_back() -> None:
    async with several(2) as services:
        first, second = services
        port = int(first.target.rpartition(":")[2])
        await first.stop()
        async with AsyncClient([first.target, second.target], None, timeout_s=5) as client:
            params = SamplingParams(max_tokens=2, ignore_eos=True)
            outputs = await client.generate([PROMPT] * 10, params, detokenize=False)
            assert len(outputs) == 10 and submissions(second) == 10
            assert (await client.health()).engine is Health.SERVING
            await first.start(port)

            async with asyncio.timeout(5):
                while not submissions(first):
                    await client.generate([PROMPT] * 4, params, detokenize=False)
            await second.stop()
            await client.generate([PROMPT] * 10, params, detokenize=False)
            await first.stop()
            async with asyncio.timeout(8):
                with pytest.raises(EngineUnavailable):
                    await client.generate(PROMPT, params, detokenize=False)


async def test_none_is_there() -> None:
    async with several(2) as services:
        for each in services:
            await each.stop()
        async with client_of(services, timeout_s=0.3) as client:
            with pytest.raises(EngineUnavailable, match="cannot be reached"):
                await client.generate(PROMPT, detokenize=False)
            assert (await client.health()).engine is Health.UNREACHABLE


async def test_engines_of_different_tokenizers() -> None:
    async with several(2) as services, client_of(services) as client:
        services[1].engine.info.tokenizer_fingerprint = "e" * 64
        with pytest.raises(FingerprintMismatch, match="different tokenizers: ffffffff"):
            await client.generate(PROMPT, detokenize=False)


@pytest.mark.parametrize("engine", [[], ["a:1", "a:1"], ["a:1", ""], [5], 7])
def test_bad_lists(engine: object) -> None:
    with pytest.raises(InvalidArgument, match=r"^engine: "):
        Client(engine, None)  # type: ignore[arg-type]
