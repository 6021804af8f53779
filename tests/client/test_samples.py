"""n > 1 in the client: one output a prompt that holds all samples, mixed deltas, one fate each.

Sample i of the fake engine answers with the prompt from its i-th id on.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict

import pytest
from tests.fake_services import FakeServices, settled, until
from tests.fake_tokens import EOS

from millstream.client import AsyncClient, Client, SamplingParams
from millstream.rpc.errors import InvalidArgument, QueueFull
from millstream.v1 import engine_pb2

CANCELLED = engine_pb2.FINISH_REASON_CANCELLED


async def test_the_output_is_the_first_sample_and_has_all(client: AsyncClient) -> None:
    output = await client.generate("hello", SamplingParams(n=3, seed=40))
    assert output.text == "hello"
    assert [sample.text for sample in output.samples] == ["hello", "ello", "llo"]
    assert output.samples[0] is output
    assert [sample.seed for sample in output.samples] == [40, 41, 42]
    assert [sample.sampling.n for sample in output.samples] == [3, 3, 3]
    assert [sample.other_samples for sample in output.other_samples] == [[], []]
    alone = await client.generate("hello")
    assert (alone.samples, alone.other_samples) == ([alone], [])


async def test_lists_and_chats_keep_their_shape(client: AsyncClient) -> None:
    params = [SamplingParams(n=2), SamplingParams(), SamplingParams(n=3)]
    outputs = await client.generate(["abc", "def", "ghi"], params)
    assert outputs[0].text == "abc"
    assert [[s.text for s in output.samples] for output in outputs] == [
        ["abc", "bc"],
        ["def"],
        ["ghi", "hi", "i"],
    ]
    answer = await client.chat([{"role": "user", "content": "x"}], SamplingParams(n=2))
    assert [sample.text for sample in answer.samples] == ["user:x", "ser:x"]
    ids = await client.generate([7, 8, 9], SamplingParams(n=2), detokenize=False)
    assert [sample.token_ids for sample in ids.samples] == [[7, 8, 9, EOS], [8, 9, EOS]]


async def test_a_streams_samples_come_mixed_and_each_has_an_end(
    client: AsyncClient, services: FakeServices
) -> None:
    rng = random.Random(1)
    services.engine.tokens_per_step = lambda: rng.randint(0, 3)
    texts: dict[int, str] = defaultdict(str)
    ends: dict[int, object] = {}
    order = []
    async for delta in client.stream("a longer text, to be mixed", SamplingParams(n=4)):
        assert delta.sample not in ends, "a delta after the last one"
        order.append(delta.sample)
        texts[delta.sample] += delta.text
        if delta.finish_reason is not None:
            ends[delta.sample] = delta.finish_reason
            assert delta.usage is not None
            assert delta.sampling is not None
            assert delta.sampling.seed == 7 + delta.sample
    assert texts == {i: "a longer text, to be mixed"[i:] for i in range(4)}
    assert set(ends) == {0, 1, 2, 3}
    assert order != sorted(order)


async def test_leaving_a_stream_cancels_every_sample(
    client: AsyncClient, services: FakeServices
) -> None:
    services.engine.step_s = 0.005
    async for delta in client.stream("xyz", SamplingParams(n=3, ignore_eos=True)):
        if delta.sample == 2:
            break
    await settled(services)
    assert list(services.engine.ended.values()) == [CANCELLED] * 3


async def test_a_stop_string_ends_its_sample_alone(
    client: AsyncClient, services: FakeServices
) -> None:
    """Sample 0 is "abcabc...", sample 1 "bcbc..."; only the first has "ab"."""
    services.engine.step_s = 0.002
    params = SamplingParams(n=2, stop="ab", ignore_eos=True, max_tokens=40)
    output = await client.generate("abc", params)
    first, second = output.samples
    assert (first.text, first.stop_reason) == ("", "ab")
    assert (second.text, second.finish_reason) == ("bc" * 20, "length")


async def test_a_refused_request_frees_all_its_handles(
    client: AsyncClient, services: FakeServices
) -> None:
    for _ in range(3):
        with pytest.raises(InvalidArgument, match="top_p"):
            await client.generate("x", SamplingParams(n=4, top_p=2.0))
    services.engine.room = 3
    with pytest.raises(QueueFull):
        async for _ in client.stream("abcd", SamplingParams(n=4)):
            pass
    engine = await client._services.any_engine()
    assert not engine._live
    assert not engine._num_samples


async def test_handles_are_consecutive_free_and_start_again(
    client: AsyncClient, services: FakeServices
) -> None:
    services.engine.step_s = 0.002
    engine = await client._services.any_engine()
    live = asyncio.create_task(client.generate("x", SamplingParams(n=2, ignore_eos=True)))
    await until(lambda: services.engine.live == 2)  # 1 and 2
    engine._last_handle = 2**32 - 3
    await client.generate("abc", SamplingParams(n=3))
    handles = [one.handle for message in services.engine.messages for one in message.submit]
    assert handles == [1, 3], "two were left at the end, and 1 and 2 are in use"
    live.cancel()


async def test_every_sample_takes_a_place(client: AsyncClient, services: FakeServices) -> None:
    services.engine.info.limits.max_num_seqs = 4
    services.engine.info.limits.max_queued_requests = 3
    services.engine.room = 7
    params = [SamplingParams(n=1 + i % 5) for i in range(30)]
    outputs = await client.generate(["some text"] * 30, params)
    assert [len(output.samples) for output in outputs] == [1 + i % 5 for i in range(30)]
    assert services.engine.refused == 0


@pytest.mark.parametrize("n", [-1, 2**32, 1.5, True, "2"])
async def test_what_is_no_count_is_refused(client: AsyncClient, n: object) -> None:
    with pytest.raises(InvalidArgument, match=r"^n: "):
        await client.generate("x", SamplingParams(n=n))  # type: ignore[arg-type]


def test_without_asyncio(threaded_services: FakeServices) -> None:
    with Client(threaded_services.target, threaded_services.target) as client:
        output = client.generate("ab", SamplingParams(n=2))
        assert [sample.text for sample in output.samples] == ["ab", "b"]
        deltas = list(client.stream("ab", SamplingParams(n=2)))
        assert {delta.sample for delta in deltas} == {0, 1}


# ---- every resolved value comes back


async def test_an_output_echoes_what_was_asked_and_resolved(client: AsyncClient) -> None:
    asked = SamplingParams(
        temperature=0.5, top_k=3, seed=9, max_tokens=50, stop_token_ids=[5], logit_bias={4: 1.0},
        stop=["zz", "q"], include_stop=True, skip_special_tokens=False,
    )  # fmt: skip
    output = await client.generate("hello", asked)
    assert output.sampling == SamplingParams(
        temperature=0.5, top_k=3, seed=9, max_tokens=50, stop_token_ids=[5], logit_bias={4: 1.0},
        stop=("zz", "q"), include_stop=True, skip_special_tokens=False, n=1,
        allowed_token_ids=[], bad_words=[],
    )  # fmt: skip
    again = await client.generate("hello", output.sampling)
    assert (again.text, again.sampling) == (output.text, output.sampling)
    *_, last = [delta async for delta in client.stream("hello", asked)]
    assert last.sampling == output.sampling
