"""AsyncClient.generate, chat, encode, decode and info against the fake services."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.fake_services import FakeServices, fake_services, settled, until
from tests.fake_tokens import EOS

from millstream.client import AsyncClient, FinishReason, Health, SamplingParams
from millstream.rpc.errors import (
    DeadlineExceeded,
    EngineFault,
    EngineUnavailable,
    FingerprintMismatch,
    InvalidArgument,
    MessageTooLarge,
    MillstreamError,
    QueueFull,
)
from millstream.rpc.health import Health as ServerHealth
from millstream.v1 import engine_pb2

CANCELLED = engine_pb2.FINISH_REASON_CANCELLED


async def test_a_text_gives_an_output_with_everything(client: AsyncClient) -> None:
    output = await client.generate("hello", request_id="mine")
    assert output.text == "hello"
    assert output.token_ids == [*b"hello", EOS]
    assert output.finish_reason is FinishReason.STOP
    assert output.finish_reason == "stop"
    assert output.stop_reason == EOS
    assert output.usage.prompt_tokens == 5
    assert output.usage.output_tokens == 6
    assert output.timings.first_token_s == 0.5
    assert output.prompt_token_ids == list(b"hello")
    assert output.request_id == "mine"
    assert output.seed == 7
    assert output.to_dict() == {"text": "hello", "token_ids": [*b"hello", EOS]}


@pytest.mark.parametrize("kind", [EngineUnavailable, DeadlineExceeded, EngineFault])
async def test_a_fault_of_the_tokenizer_is_no_reason_to_ask_for_each_text_alone(
    client: AsyncClient, services: FakeServices, kind: type[MillstreamError]
) -> None:
    """A batch that took too long would take as long again for each of its texts."""
    services.tokenizer.encode_error = kind("not now")
    outputs = await client.generate(["a text"] * 20, return_exceptions=True)
    assert [type(output) for output in outputs] == [kind] * 20
    assert services.tokenizer.encode_calls == 1


async def test_a_list_gives_a_list_in_order(client: AsyncClient) -> None:
    prompts = ["a prompt", [1, 2, 3], "another", list(b"ids")]
    params = [SamplingParams(max_tokens=n) for n in (20, 2, 4, 20)]
    outputs = await client.generate(prompts, params)
    assert [o.text for o in outputs] == ["a prompt", "\x01\x02", "anot", "ids"]
    assert [o.finish_reason for o in outputs] == ["stop", "length", "length", "stop"]
    assert await client.generate([]) == []
    assert [o.text for o in await client.generate(["one"])] == ["one"]


async def test_a_flat_list_of_ids_is_one_prompt(client: AsyncClient) -> None:
    output = await client.generate(list(b"xy"), SamplingParams(max_tokens=1))
    assert (output.text, output.token_ids) == ("x", [120])


async def test_500_prompts_are_one_message(client: AsyncClient, services: FakeServices) -> None:
    prompts = [[i % 256, 1] for i in range(500)]
    outputs = await client.generate(prompts, SamplingParams(max_tokens=3), detokenize=False)
    assert [o.token_ids[0] for o in outputs] == [i % 256 for i in range(500)]
    assert [len(m.submit) for m in services.engine.messages] == [500]
    assert services.tokenizer.messages == 0


class WatchedPrompt(list[int]):
    """Calls `seen` when it is looked through."""

    seen: Callable[[], None]

    def __iter__(self) -> Iterator[int]:
        self.seen()
        return super().__iter__()


async def test_the_first_of_many_prompts_leave_while_the_others_are_checked(
    client: AsyncClient, services: FakeServices
) -> None:
    options: dict[str, Any] = {"detokenize": False, "use_tqdm": False}
    await client.generate([1], SamplingParams(max_tokens=1), **options)  # the stream is open
    sent: list[int] = []
    last = WatchedPrompt([1, 2])
    last.seen = lambda: sent.append(sum(len(m.submit) for m in services.engine.messages))
    params = SamplingParams(max_tokens=2)
    await client.generate([[i % 256, 1] for i in range(5000)] + [last], params, **options)
    assert 1 < sent[0] < 5001, "the first call's and some"
    assert len(services.engine.messages) < 50, "many in each"


async def test_lists_that_change_while_prompts_are_checked_are_as_they_were(
    client: AsyncClient,
) -> None:
    """A list that became shorter left out prompts, in silence."""
    watched = WatchedPrompt([1])
    prompts = [watched] * 300
    params = [SamplingParams(max_tokens=1)] * 300
    request_ids = [f"r{i}" for i in range(300)]
    lists: list[list[Any]] = [prompts, params, request_ids]
    watched.seen = lambda: [each.clear() for each in lists] and None
    outputs = await client.generate(prompts, params, request_id=request_ids, detokenize=False)
    assert [output.request_id for output in outputs] == [f"r{i}" for i in range(300)]


async def test_a_call_that_is_cancelled_while_its_prompts_are_checked_ends_all(
    client: AsyncClient, services: FakeServices
) -> None:
    params = SamplingParams(max_tokens=10_000, ignore_eos=True)
    await client.generate([1], SamplingParams(max_tokens=1), detokenize=False)
    last = WatchedPrompt([1, 2])
    last.seen = lambda: call.cancel() and None
    call = asyncio.create_task(client.generate([[1]] * 1000 + [last], params, detokenize=False))
    with pytest.raises(asyncio.CancelledError):
        await call
    await settled(services)


async def test_texts_are_encoded_in_bounded_batches(
    client: AsyncClient, services: FakeServices
) -> None:
    texts = [f"text {i}" for i in range(300)]
    outputs = await client.generate(texts)
    assert [o.text for o in outputs] == texts
    assert services.tokenizer.encode_calls == 3
    # No stop strings: each text is made at once at its end, together with others.
    assert services.tokenizer.messages < 150


async def test_ids_alone_need_no_tokenizer(services: FakeServices) -> None:
    async with AsyncClient(services.target, None) as client:
        output = await client.generate([5, 6], SamplingParams(max_tokens=2), detokenize=False)
        assert (output.token_ids, output.text) == ([5, 6], "")
        with pytest.raises(EngineUnavailable, match="tokenizer"):
            await client.generate("text")
        with pytest.raises(EngineUnavailable, match="tokenizer"):
            await client.generate([5, 6])
    # The default target is not even tried.
    async with AsyncClient(services.target, timeout_s=0.1) as client:
        await client.generate([5, 6], detokenize=False)


async def test_a_refused_request_is_raised_after_the_others_end(
    client: AsyncClient, services: FakeServices
) -> None:
    params = [SamplingParams(), SamplingParams(top_p=0.0), SamplingParams()]
    with pytest.raises(InvalidArgument, match=r"^top_p: above 0") as caught:
        await client.generate(["one", "two", "three"], params)
    assert caught.value.field == "top_p"
    assert list(services.engine.ended.values()) == [engine_pb2.FINISH_REASON_STOP] * 2


@pytest.mark.parametrize("prompt", ["", []])
async def test_row_19_an_empty_prompt_is_refused_alone(
    client: AsyncClient, prompt: str | list[int]
) -> None:
    """The tokenizer adds no BOS: the engine gets no ids, and says so."""
    outcomes = await client.generate([prompt, "two"], return_exceptions=True)
    assert isinstance(outcomes[0], InvalidArgument)
    assert outcomes[0].field == "prompt"
    assert outcomes[1].text == "two"


async def test_return_exceptions_keeps_the_places(client: AsyncClient) -> None:
    prompts = ["one", "two", [-1], "\ud83d", [1, 2**40], "six", 7, [1, "x"]]
    params = [SamplingParams(temperature=0)] * 8
    params[1] = SamplingParams(top_p=2.0)
    params[5] = SamplingParams(seed=-1)
    outcomes = await client.generate(prompts, params, return_exceptions=True)  # type: ignore[arg-type]
    assert outcomes[0].text == "one"
    assert all(isinstance(outcome, InvalidArgument) for outcome in outcomes[1:])
    messages = [str(outcome) for outcome in outcomes[1:]]
    assert messages[0].startswith("top_p:")
    assert messages[1].startswith("prompt[0]:")
    assert messages[2].startswith("prompt: character 0 is a lone surrogate")
    assert messages[3].startswith("prompt[1]:")
    assert messages[4].startswith("seed:")
    assert messages[5].startswith("prompt: a string")
    assert messages[6].startswith("prompt[1]:")


async def test_row_76_lone_surrogates_are_refused_before_any_call() -> None:
    client = AsyncClient("localhost:1", "localhost:1", timeout_s=0.1)  # nobody is there
    for call in (
        lambda: client.encode("\ud83d"),
        lambda: client.generate("\ud83d"),
        lambda: client.chat([{"role": "user", "content": "\ud83d"}]),
        lambda: client.chat([{"role": "user", "content": "x", "name": "\ud83d"}]),
        lambda: client.generate("x", SamplingParams(stop="\ud83d")),
        lambda: client.generate("x", SamplingParams(regex="\ud83d")),
        lambda: client.generate("x", request_id="\ud83d"),
    ):
        with pytest.raises(ValueError, match="surrogate"):
            await call()
    with pytest.raises(ValueError, match="surrogate"):
        client.stream("\ud83d")
    await client.close()


@pytest.mark.parametrize(
    ("keywords", "name"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**32}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x", ""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"include_stop": 1}, "include_stop"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
    ],
)
async def test_what_protobuf_would_refuse_names_the_python_field(
    keywords: dict[str, object], name: str
) -> None:
    client = AsyncClient("localhost:1", "localhost:1")
    with pytest.raises(InvalidArgument, match=f"^{name}") as caught:
        await client.generate("x", SamplingParams(**keywords))  # type: ignore[arg-type]
    assert caught.value.field == name


async def test_bad_keywords(client: AsyncClient) -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        await client.generate("x", max_tokens=3)  # type: ignore[call-overload]
    with pytest.raises(InvalidArgument, match="sampling_params: 1 for 2"):
        await client.generate(["x", "y"], [SamplingParams()])
    with pytest.raises(InvalidArgument, match="sampling_params"):
        await client.generate("x", {"max_tokens": 1})  # type: ignore[call-overload]
    for timeout_s in (0, -1, float("nan"), "soon"):
        with pytest.raises(InvalidArgument, match="timeout_s"):
            await client.generate("x", timeout_s=timeout_s)  # type: ignore[call-overload]
    with pytest.raises(InvalidArgument, match="detokenize"):
        await client.generate("x", SamplingParams(stop="y"), detokenize=False)


async def test_a_full_queue_is_paced(client: AsyncClient, services: FakeServices) -> None:
    services.engine.room = 3
    texts = [f"text {i}" for i in range(20)]
    outputs = await client.generate(texts)
    assert [o.text for o in outputs] == texts
    assert services.engine.refused > 0
    services.engine.room = 0
    with pytest.raises(DeadlineExceeded):
        await client.generate("x", timeout_s=0.1)
    with pytest.raises(QueueFull) as caught:
        async for _ in client.stream("x"):
            pass
    assert caught.value.retry_after_s == 0.02


async def test_no_more_requests_at_once_than_the_engine_has_places_for(
    client: AsyncClient, services: FakeServices
) -> None:
    services.engine.info.limits.max_num_seqs = 3
    services.engine.info.limits.max_queued_requests = 2
    services.engine.room = 5
    outputs = await client.generate([[i] for i in range(40)], detokenize=False)
    assert [o.token_ids[0] for o in outputs] == list(range(40))
    assert services.engine.refused == 0


async def test_a_deadline_ends_the_request(client: AsyncClient, services: FakeServices) -> None:
    services.engine.step_s = 0.01
    endless = SamplingParams(ignore_eos=True)
    with pytest.raises(DeadlineExceeded, match=r"^timeout_s: passed"):
        await client.generate("x", endless, timeout_s=0.1)
    with pytest.raises(DeadlineExceeded):
        await client.generate([1], endless, timeout_s=0.1, detokenize=False)
    with pytest.raises(TimeoutError):
        async for _ in client.stream("x", endless, timeout_s=0.1):
            pass
    assert services.engine.live == 0


@pytest.mark.parametrize("silent", ["engine", "tokenizer", "encode"])
async def test_a_deadline_ends_the_request_when_a_service_says_nothing(
    client: AsyncClient, services: FakeServices, silent: str
) -> None:
    """As one that is suspended, or behind a network that lost the connection."""
    await client.generate("both streams are open")
    services.engine.deaf = silent == "engine"
    services.tokenizer.deaf = silent == "tokenizer"
    services.tokenizer.hold = silent == "encode"
    prompt: Any = "x" if silent == "encode" else [1]
    async with asyncio.timeout(5):
        with pytest.raises(DeadlineExceeded, match=r"^timeout_s: "):
            await client.generate(prompt, timeout_s=0.1)
        with pytest.raises(DeadlineExceeded, match=r"^timeout_s: "):
            async for _ in client.stream(prompt, timeout_s=0.1):
                pass
        outcomes = await client.generate([prompt] * 3, timeout_s=0.1, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [DeadlineExceeded] * 3
    services.engine.deaf = services.tokenizer.deaf = services.tokenizer.hold = False


async def test_a_deadline_ends_the_wait_for_services() -> None:
    nobody = "127.0.0.1:1"
    async with AsyncClient(nobody, nobody, timeout_s=60) as client, asyncio.timeout(5):
        for prompt in ("x", [1]):
            with pytest.raises(DeadlineExceeded, match=r"^timeout_s: "):
                await client.generate(prompt, timeout_s=0.1)
            with pytest.raises(DeadlineExceeded, match=r"^timeout_s: "):
                async for _ in client.stream(prompt, timeout_s=0.1):
                    pass


async def test_cancelling_the_task_cancels_the_requests(
    client: AsyncClient, services: FakeServices
) -> None:
    services.engine.step_s = 0.002
    endless = SamplingParams(ignore_eos=True)
    task = asyncio.create_task(client.generate(["abc"] * 7, endless))
    await until(lambda: services.engine.live == 7)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await settled(services)
    assert list(services.engine.ended.values()) == [CANCELLED] * 7


async def test_row_71_a_decode_error_fails_the_request_and_cancels_it(
    client: AsyncClient, services: FakeServices
) -> None:
    services.engine.step_s = 0.002
    services.tokenizer.fail_at_token = 3
    endless = SamplingParams(ignore_eos=True, stop="never")
    with pytest.raises(InvalidArgument, match="cannot be decoded"):
        await client.generate("abc", endless)
    with pytest.raises(InvalidArgument, match="cannot be decoded"):
        async for _ in client.stream("abc", endless):
            pass
    await settled(services)
    assert list(services.engine.ended.values()) == [CANCELLED] * 2
    services.tokenizer.fail_at_token = None
    assert (await client.generate("abc")).text == "abc"


async def test_a_broken_engine_stream_fails_its_requests_and_is_reopened(
    client: AsyncClient, services: FakeServices
) -> None:
    services.engine.step_s = 0.001
    services.engine.break_after_tokens = 30
    endless = SamplingParams(ignore_eos=True)
    outcomes = await client.generate(["ab", "cd"], endless, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [EngineUnavailable] * 2
    assert services.target in str(outcomes[0])
    assert (await client.generate("again")).text == "again"
    assert services.engine.streams == 1


async def test_a_broken_text_stream_cancels_at_the_engine_and_is_reopened(
    client: AsyncClient, services: FakeServices
) -> None:
    services.engine.step_s = 0.001
    services.tokenizer.break_after_messages = 3
    with pytest.raises(EngineUnavailable, match="tokenizer"):
        await client.generate("ab", SamplingParams(ignore_eos=True, stop="never"))
    await settled(services)
    assert list(services.engine.ended.values()) == [CANCELLED]
    assert (await client.generate("again")).text == "again"


async def test_services_that_restart_are_found_again() -> None:
    async with fake_services() as first:
        client = AsyncClient(first.target, first.target, timeout_s=5)
        assert (await client.generate("one")).text == "one"
        port = int(first.target.rsplit(":")[-1])
    second = FakeServices()
    await second.start(port)
    assert (await client.generate("two")).text == "two"
    await client.close()
    await second.stop()


async def test_nobody_there_names_the_target() -> None:
    async with AsyncClient("127.0.0.1:1", "127.0.0.1:1", timeout_s=0.2) as client:
        with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:1 cannot be reached"):
            await client.generate("x")
        health = await client.health()
        assert health.engine is health.tokenizer is Health.UNREACHABLE
        assert not health.ok


async def test_another_service_at_the_target_is_named() -> None:
    """As where the second of two replicas has the tokenizer's usual port."""
    services = FakeServices()
    services.health = ServerHealth(["millstream.v1.Engine"])
    services.health.set_serving(True)
    await services.start()
    async with AsyncClient(services.target, services.target, timeout_s=0.2) as client:
        with pytest.raises(EngineUnavailable, match=r"tokenizer .* another service listens"):
            await client.generate("x")
        health = await client.health()
        assert (health.engine, health.tokenizer) == (Health.SERVING, Health.ABSENT)
        assert not health.ok
    await services.stop()


async def test_waits_until_the_services_serve(services: FakeServices) -> None:
    services.health.set_serving(False)
    async with AsyncClient(services.target, services.target, timeout_s=0.2) as client:
        with pytest.raises(EngineUnavailable, match="is not serving"):
            await client.generate("x")
        assert (await client.health()).engine is Health.NOT_SERVING
    async with AsyncClient(services.target, services.target) as client:
        asyncio.get_running_loop().call_later(0.2, services.health.set_serving, True)
        assert (await client.generate("x")).text == "x"
        assert (await client.health()).ok


async def test_fingerprints_must_agree(services: FakeServices) -> None:
    async with AsyncClient(services.target, services.target) as client:
        services.tokenizer.info.fingerprint = "0" * 64
        with pytest.raises(FingerprintMismatch, match="0000"):
            await client.generate("x")
        with pytest.raises(FingerprintMismatch):
            await client.generate([1])
        await client.generate([1], detokenize=False)
    services.engine.info.tokenizer_fingerprint = ""  # an engine without tokenizer files
    async with AsyncClient(services.target, services.target) as client:
        assert (await client.generate("x")).text == "x"


async def test_row_24_large_prompts_pass_and_too_large_ones_hurt_nobody(
    client: AsyncClient, services: FakeServices
) -> None:
    one = SamplingParams(max_tokens=1)
    services.engine.info.vocab_size = 200_000
    big = [255] * 1_400_000
    output = await client.generate(big, one, detokenize=False)
    assert output.usage.prompt_tokens == 1_400_000
    text = "x" * 5_000_000
    assert len(await client.encode(text)) == 5_000_000


async def test_row_24_a_prompt_beyond_the_limit_is_refused_in_the_client(
    services: FakeServices,
) -> None:
    services.engine.info.limits.max_message_bytes = 1 << 20
    async with AsyncClient(services.target, services.target) as client:
        prompts = [[1] * 2_000_000, [2, 3]]
        outcomes = await client.generate(prompts, return_exceptions=True, detokenize=False)
        assert isinstance(outcomes[0], MessageTooLarge)
        assert "prompt" in str(outcomes[0])
        assert outcomes[1].token_ids == [2, 3, EOS]


async def test_row_24_a_batch_beyond_the_limit_goes_in_several_messages(
    client: AsyncClient, services: FakeServices
) -> None:
    services.engine.info.limits.max_message_bytes = limit = 1 << 17
    prompts = [[i] * 20_000 for i in range(30)]
    outputs = await client.generate(prompts, SamplingParams(max_tokens=1), detokenize=False)
    assert [output.token_ids for output in outputs] == [[i] for i in range(30)]
    assert all(message.ByteSize() <= limit for message in services.engine.messages)


async def test_chat(client: AsyncClient) -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    assert (await client.chat(turns)).text == "system:s|user:hi"
    outputs = await client.chat([turns, turns[1:]])
    assert [o.text for o in outputs] == ["system:s|user:hi", "user:hi"]
    text = "".join([delta.text async for delta in client.chat_stream(turns)])
    assert text == "system:s|user:hi"
    with pytest.raises(InvalidArgument, match=r"messages\[0\]"):
        await client.chat([{"content": "no role"}])
    with pytest.raises(InvalidArgument, match="messages"):
        await client.chat([[]])
    with pytest.raises(InvalidArgument, match=r"^messages\[0\]\.role: unknown"):
        await client.chat([{"role": "bad", "content": ""}])
    with pytest.raises(InvalidArgument, match="tools: not JSON"):
        await client.chat(turns, tools=[{"f": object()}])


async def test_one_bad_chat_does_not_spoil_the_batch_it_is_encoded_with(
    client: AsyncClient,
) -> None:
    good, bad = [{"role": "user", "content": "x"}], [{"role": "bad", "content": "x"}]
    outcomes = await client.chat([good, bad, good], return_exceptions=True)
    assert [getattr(o, "text", None) for o in outcomes] == ["user:x", None, "user:x"]
    assert isinstance(outcomes[1], InvalidArgument)


async def test_encode_and_decode(client: AsyncClient) -> None:
    assert await client.encode("é") == [0xC3, 0xA9]
    texts = [f"text {i}" for i in range(300)]
    ids = await client.encode(texts)
    assert await client.decode(ids) == texts
    assert await client.decode([0xC3, 0xA9, EOS]) == "é"
    assert await client.decode([97, EOS], skip_special_tokens=False) == "a<eos>"
    assert await client.decode([]) == ""
    assert await client.encode([]) == []
    with pytest.raises(InvalidArgument, match=r"token_ids\[1\]"):
        await client.decode([1, -1])


async def test_info(client: AsyncClient) -> None:
    info = await client.info()
    assert info.engine is not None
    assert info.tokenizer is not None
    assert (info.engine.model, info.tokenizer.model) == ("fake", "fake")


async def test_a_closed_client_refuses(services: FakeServices) -> None:
    client = AsyncClient(services.target, services.target)
    services.engine.step_s = 0.002
    task = asyncio.create_task(client.generate("x", SamplingParams(ignore_eos=True)))
    await until(lambda: services.engine.live > 0)
    await client.close()
    await client.close()
    with pytest.raises(Exception, match="closed"):
        await task
    with pytest.raises(EngineUnavailable, match="closed"):
        await client.generate("x")
    await settled(services)


async def test_random_lists_come_back_whole(client: AsyncClient, services: FakeServices) -> None:
    rng = random.Random(5)
    services.engine.tokens_per_step = lambda: rng.randint(0, 5)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 60))] for _ in range(200)]
    params = [SamplingParams(max_tokens=rng.randint(1, 80)) for _ in prompts]
    outputs = await client.generate(prompts, params, detokenize=False)
    for prompt, one, output in zip(prompts, params, outputs, strict=True):
        assert output.token_ids == [*prompt, EOS][: one.max_tokens]
