"""Log probabilities and bad words in the client: parallel to ids, cut where the text is cut, with
texts; against services whose right answer is plain to see (tests/fake_services.py)."""

from __future__ import annotations

import pytest
from tests.fake_services import FakeServices
from tests.fake_tokens import EOS, EOS_TEXT

from millstream.client import AsyncClient, Logprob, Output, SamplingParams
from millstream.client.logprobs import unpack
from millstream.rpc.errors import InvalidArgument
from millstream.v1 import engine_pb2


def wanted(token_ids: list[int], count: int) -> list[tuple[int, float, list[int]]]:
    return [(i, -i / 16, [i + more for more in range(count)]) for i in token_ids]


def plain(entries: list[Logprob] | None) -> list[tuple[int, float, list[int]]]:
    assert entries is not None
    for entry in entries:
        assert [other.logprob for other in entry.top] == [-o.token_id / 16 for o in entry.top]
    return [(e.token_id, e.logprob, [other.token_id for other in e.top]) for e in entries]


@pytest.mark.parametrize("per_step", [1, 3])
async def test_row_66_they_are_parallel_to_the_ids(
    services: FakeServices, client: AsyncClient, per_step: int
) -> None:
    """Beside a request that wants none; streamed pieces joined are the whole."""
    services.engine.tokens_per_step = lambda: per_step
    output, other, none = await client.generate(
        ["abcde", "xyz", "123"],
        [SamplingParams(logprobs=2), SamplingParams(logprobs=0), SamplingParams()],
    )
    assert plain(output.logprobs) == wanted(output.token_ids, 2)
    assert plain(other.logprobs) == wanted(other.token_ids, 0)
    assert none.logprobs is None and none.prompt_logprobs is None
    deltas = [delta async for delta in client.stream("abcde", SamplingParams(logprobs=2))]
    for delta in deltas:
        assert plain(delta.logprobs) == wanted(delta.token_ids, 2)
    joined = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert plain(joined) == plain(output.logprobs)


async def test_they_are_cut_with_the_text(services: FakeServices, client: AsyncClient) -> None:
    services.engine.tokens_per_step = lambda: 4
    params = SamplingParams(logprobs=1, stop="d")
    output = await client.generate("abcdefgh", params)
    assert output.token_ids == list(b"abcd")
    assert plain(output.logprobs) == wanted(output.token_ids, 1)


async def test_of_the_prompt(services: FakeServices, client: AsyncClient) -> None:
    prompt = b"some prompt"
    params = SamplingParams(prompt_logprobs=1, n=2)
    output = await client.generate(prompt.decode(), params)
    deltas = [delta async for delta in client.stream(prompt.decode(), params)]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    entries = [entry for entry in output.prompt_logprobs if entry is not None]
    assert plain(entries) == wanted(list(prompt[1:]), 1)
    assert output.other_samples[0].prompt_logprobs is None
    with_any = [delta for delta in deltas if delta.prompt_logprobs is not None]
    (first,) = with_any
    assert first is next(delta for delta in deltas if delta.sample == 0)
    assert len(first.prompt_logprobs or ()) == len(prompt)


async def test_texts_are_asked_for_once(services: FakeServices, client: AsyncClient) -> None:
    """Special tokens have theirs; ids that the tokenizer does not know have none."""
    services.engine.info.vocab_size = 300
    params = SamplingParams(logprobs=3)
    output = await client.generate("ab", params)
    assert output.logprobs is not None
    assert [entry.text for entry in output.logprobs] == ["a", "b", EOS_TEXT]
    assert [other.text for other in output.logprobs[0].top] == ["a", "b", "c"]
    assert [other.text is None for other in output.logprobs[2].top] == [False, False, True]
    decoded = services.tokenizer.decoded
    again = await client.generate("ab", params)
    assert again.logprobs == output.logprobs and services.tokenizer.decoded == decoded
    ids = await client.generate([97], params, detokenize=False)
    assert [entry.text for entry in ids.logprobs or ()] == [None, None]


def test_columns_of_nobody() -> None:
    columns = engine_pb2.Logprobs(token_logprobs=[-1.0, float("nan")])
    assert list(unpack(columns, [5, EOS])) == [Logprob(token_id=5, logprob=-1.0), None]


async def bad_words_of(services: FakeServices) -> list[list[int]]:
    (submission,) = services.engine.messages[-1].submit
    return [list(word.token_ids) for word in submission.sampling.bad_words]


async def test_bad_words_are_encoded_with_and_without_a_space(
    services: FakeServices, client: AsyncClient
) -> None:
    params = SamplingParams(bad_words=["no", " way", [7, 8]])
    output: Output = await client.generate("ab", params)
    words = [list(text.encode()) for text in ("no", " no", "way", " way")]
    assert await bad_words_of(services) == [[7, 8], *words]
    assert output.text == "ab"
    _ = [delta async for delta in client.stream([97], params, detokenize=False)]
    assert await bad_words_of(services) == [[7, 8], *words]
    services.tokenizer.encoded.clear()
    await client.generate(["a", "b", "c"], params)
    assert services.tokenizer.encoded.count(" no") == 1, "once for all that share them"
    for bad in ([""], [" "], ["ok", ""], "text", [5]):
        with pytest.raises(InvalidArgument, match="bad_words"):
            await client.generate("a", SamplingParams(bad_words=bad))  # type: ignore[arg-type]
