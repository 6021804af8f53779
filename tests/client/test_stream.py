"""Streams and text: deltas, stop strings, and what happens when a loop is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections.abc import Callable

import pytest
from tests.fake_services import FakeServices, settled
from tests.fake_tokens import ADDED, EOS, random_text, text_of

from millstream.client import AsyncClient, Delta, SamplingParams
from millstream.v1 import engine_pb2

CANCELLED = engine_pb2.FINISH_REASON_CANCELLED


async def collect(client: AsyncClient, *args: object, **kwargs: object) -> list[Delta]:
    return [delta async for delta in client.stream(*args, **kwargs)]  # type: ignore[arg-type]


def joined(deltas: list[Delta]) -> tuple[str, list[int]]:
    return "".join(d.text for d in deltas), [i for d in deltas for i in d.token_ids]


async def test_deltas_and_their_last_one(client: AsyncClient) -> None:
    deltas = await collect(client, "hello")
    assert joined(deltas) == ("hello", [*b"hello", EOS])
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    last = deltas[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", EOS)
    assert last.usage is not None
    assert last.usage.output_tokens == 6
    assert last.timings is not None


async def test_a_stream_of_ids_needs_no_tokenizer(services: FakeServices) -> None:
    async with AsyncClient(services.target, None) as client:
        deltas = await collect(client, [1, 2, 3], detokenize=False)
        assert joined(deltas) == ("", [1, 2, 3, EOS])


async def test_row_1_a_matched_stop_string_cancels_at_the_engine_at_once(
    client: AsyncClient, services: FakeServices
) -> None:
    services.engine.step_s = 0.005
    params = SamplingParams(stop=["b"], max_tokens=500, ignore_eos=True)
    prompt = "a" + "b" + "c" * 400
    output = await client.generate(prompt, params, request_id="one")
    await asyncio.sleep(0.2)
    assert services.engine.live == 0
    assert services.engine.ended["one"] == CANCELLED
    assert len(services.engine.sent["one"]) < 40
    assert (output.text, output.token_ids) == ("a", list(b"ab"))
    assert (output.finish_reason, output.stop_reason) == ("stop", "b")
    assert output.usage.output_tokens == 2
    deltas = await collect(client, prompt, params, request_id="two")
    assert joined(deltas) == ("a", list(b"ab"))
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.output_tokens == 2
    assert services.engine.ended["two"] == CANCELLED


@pytest.mark.parametrize("way", ["break", "exception", "gc", "aclose", "cancel", "context"])
async def test_row_4_leaving_a_loop_cancels_the_request(
    client: AsyncClient, services: FakeServices, way: str
) -> None:
    services.engine.step_s = 0.002
    endless = SamplingParams(ignore_eos=True)

    async def one_item() -> Delta:
        stream = client.stream("abc", endless)
        match way:
            case "break":
                async for delta in stream:
                    item = delta
                    break
            case "exception":
                with contextlib.suppress(ZeroDivisionError):
                    async for item in stream:
                        _ = item.text[0] and 1 / 0
            case "gc":
                item = await anext(stream)
                cycle: list[object] = [stream]
                cycle.append(cycle)
                del stream, cycle
                gc.collect()
            case "aclose":
                item = await anext(stream)
                await stream.aclose()
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
            case "context":
                async with stream:
                    item = await anext(stream)
            case "cancel":
                item = await anext(stream)

                async def drain() -> None:
                    async for _ in stream:
                        pass

                task = asyncio.create_task(drain())
                await asyncio.sleep(0.02)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        return item

    assert (await one_item()).token_ids
    await settled(services)
    assert list(services.engine.ended.values()) == [CANCELLED]


async def test_row_9_pending_bytes_and_held_stop_prefixes_are_flushed(client: AsyncClient) -> None:
    ids = [*b"ok", *"🙂".encode()[:2]]
    params = SamplingParams(max_tokens=4)
    assert (await client.generate(ids, params)).text == "ok\ufffd"
    deltas = await collect(client, ids, params)
    assert joined(deltas) == ("ok\ufffd", ids)
    stop = SamplingParams(stop=["<end>"])
    assert (await client.generate("a<en", stop)).text == "a<en"
    assert joined(await collect(client, "a<en", stop)) == ("a<en", [*b"a<en", EOS])


@pytest.mark.parametrize("per_step", [1, 4])
async def test_row_10_the_last_tokens_come_exactly_once(
    client: AsyncClient, services: FakeServices, per_step: int
) -> None:
    services.engine.tokens_per_step = lambda: per_step
    for prompt, max_tokens in ((list(b"abcdef"), 1), ([97, 98, EOS, 99], 5), (list(b"abcdef"), 9)):
        params = SamplingParams(max_tokens=max_tokens)
        output = await client.generate(prompt, params)
        deltas = await collect(client, prompt, params)
        assert joined(deltas) == (output.text, output.token_ids)
        assert len(output.token_ids) == output.usage.output_tokens
    assert output.token_ids == [*b"abcdef", EOS]


@pytest.mark.parametrize("per_step", [1, 3, 100])
async def test_row_11_no_part_of_a_stop_string_is_shown(
    client: AsyncClient, services: FakeServices, per_step: int
) -> None:
    services.engine.tokens_per_step = lambda: per_step
    for include_stop, prompt, text in (
        (False, "ABCDEFGH", "ABC"),
        (False, "ABCDEFX", "ABCDEFX"),
        (True, "ABCDEFGH", "ABCDEFG"),
    ):
        params = SamplingParams(stop="DEFG", include_stop=include_stop)
        deltas = await collect(client, prompt, params)
        assert joined(deltas)[0] == text
        assert (await client.generate(prompt, params)).text == text


@pytest.mark.parametrize("per_step", [1, 2, 100])
async def test_row_12_stops_match_on_text(
    client: AsyncClient, services: FakeServices, per_step: int
) -> None:
    services.engine.tokens_per_step = lambda: per_step
    for prompt, stop, text, matched, count in (
        ("Paris.", ["ari"], "P", "ari", 4),
        ("aab", ["ab"], "a", "ab", 3),
        ("xab", ["b", "ab"], "x", "ab", 3),
        ("abcd", ["cd", "abc"], "", "abc", 3),
        ("abcdYZ", ["abcdX", "bc"], "a", "bc", 3),  # the match waits for the longer one
    ):
        for order in (stop, stop[::-1]):
            params = SamplingParams(stop=order)
            output = await client.generate(prompt, params)
            assert (output.text, output.stop_reason) == (text, matched)
            assert output.token_ids == list(prompt.encode())[:count]
            deltas = await collect(client, prompt, params)
            assert joined(deltas) == (text, output.token_ids)
            assert deltas[-1].stop_reason == matched


async def test_min_tokens_holds_for_stop_strings(client: AsyncClient) -> None:
    params = SamplingParams(stop="b", min_tokens=4)
    assert (await client.generate("abacab", params)).text == "abaca"


@pytest.mark.parametrize(
    ("skip", "include", "text"),
    [
        (True, False, "a<tool>"),
        (True, True, "a<tool>"),
        (False, False, "a<tool>"),
        (False, True, "a<tool><eos>"),
    ],
)
async def test_row_74_special_tokens_and_the_stop_token(
    client: AsyncClient, skip: bool, include: bool, text: str
) -> None:
    params = SamplingParams(skip_special_tokens=skip, include_stop=include)
    prompt = [97, ADDED]
    output = await client.generate(prompt, params)
    assert (output.text, output.token_ids) == (text, [97, ADDED, EOS])
    assert joined(await collect(client, prompt, params)) == (text, [97, ADDED, EOS])


async def test_a_stop_token_that_is_text_is_left_out_unless_included(client: AsyncClient) -> None:
    params = SamplingParams(stop_token_ids=[ord("c")])
    output = await client.generate("abcd", params)
    assert (output.text, output.token_ids, output.stop_reason) == ("ab", list(b"abc"), ord("c"))
    params = SamplingParams(stop_token_ids=[ord("c")], include_stop=True)
    assert (await client.generate("abcd", params)).text == "abc"


async def test_the_end_of_the_prompt_is_the_context(
    client: AsyncClient, services: FakeServices
) -> None:
    await client.generate("a long prompt")
    assert services.tokenizer.contexts == [list(b"g prompt")]
    # The prompt ends inside a character, which the answer's first bytes do not complete.
    assert (await client.generate([0xF0, 0x9F], SamplingParams(max_tokens=1))).text == "\ufffd"


async def test_a_slow_reader_gets_merged_items(client: AsyncClient) -> None:
    deltas = []
    async for delta in client.stream("x" * 300):
        deltas.append(delta)
        await asyncio.sleep(0.02)
    assert joined(deltas)[0] == "x" * 300
    assert len(deltas) < 100


async def test_many_streams_share_messages(client: AsyncClient, services: FakeServices) -> None:
    texts = [f"stream number {i}" for i in range(64)]
    results = await asyncio.gather(*(collect(client, text) for text in texts))
    assert [joined(deltas)[0] for deltas in results] == texts
    assert services.engine.streams == 1
    assert services.tokenizer.messages < 64 * 15 / 2


@pytest.mark.parametrize("seed", range(6))
async def test_random_streams_equal_the_naive_answer(
    client: AsyncClient, services: FakeServices, seed: int
) -> None:
    """Any merging on the way, random stops, lengths and cancels: joined deltas are the text and
    ids of the whole; what is cancelled ends at the engine; nothing is left."""
    rng = random.Random(seed)
    services.engine.tokens_per_step = _chunks(rng)

    async def one(number: int) -> None:
        text = random_text(rng, rng.randint(1, 40))
        stop = [random_text(rng, rng.randint(1, 3)) for _ in range(rng.randint(0, 3))]
        params = SamplingParams(
            max_tokens=rng.randint(1, 90), stop=stop, include_stop=rng.random() < 0.3
        )
        leave_after = rng.randint(1, 5) if rng.random() < 0.3 else None
        deltas = []
        async for delta in client.stream(text, params, request_id=f"{seed}-{number}"):
            deltas.append(delta)
            if leave_after == len(deltas):
                return
        assert joined(deltas) == _expected(text, params)
        output = await client.generate(text, params)
        assert (output.text, output.token_ids) == _expected(text, params)

    await asyncio.gather(*map(one, range(60)))
    await settled(services)


def _chunks(rng: random.Random) -> Callable[[], int]:
    return lambda: rng.choice((0, 1, 1, 2, 7))


def _expected(text: str, params: SamplingParams) -> tuple[str, list[int]]:
    """The answer of the fake engine, by brute force over the tokens."""
    ids = [*text.encode(), EOS]
    assert params.max_tokens is not None
    ended_by_eos = len(ids) <= params.max_tokens
    ids = ids[: params.max_tokens]
    whole = text_of(ids)
    starts = [(whole.find(stop), len(stop), stop) for stop in params.stop if stop in whole]
    if not starts:
        return whole, ids
    start, length, _ = min(starts)
    end = start + length
    # The first token after which the text has the match.
    for count in range(1, len(ids) + 1):
        last = count == len(ids)
        shown = whole if last else _complete_text(ids[:count])
        if len(shown) >= end and shown[:end] == whole[:end]:
            break
    assert ended_by_eos or count <= params.max_tokens
    return whole[: end if params.include_stop else start], ids[:count]


def _complete_text(ids: list[int]) -> str:
    return bytes(i for i in ids if i < 256).decode(errors="ignore")
