"""OpenAI's client through the gateway to one engine: what it asks for is what it gets."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from tests.engine_processes import EngineProcess, connect, eventually
from tests.gateway.conftest import MODEL
from tests.gateway.processes import Gateway

from millstream.v1 import engine_pb2

pytestmark = [pytest.mark.gateway, pytest.mark.timeout(300)]

CHAT: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
PROMPT = "The capital of France is"


def stats(server: EngineProcess) -> engine_pb2.GetStatsResponse:
    async def ask() -> engine_pb2.GetStatsResponse:
        async with connect(server.target) as stub:
            return await stub.GetStats(engine_pb2.GetStatsRequest(), timeout=30)

    return asyncio.run(ask())


def test_chat(one: Gateway) -> None:
    done = one.client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_tokens=20
    )
    assert done.choices[0].message.content == ANSWER
    assert done.choices[0].finish_reason == "stop"
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (37, 8)


def test_chat_streamed(one: Gateway) -> None:
    stream = one.client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_tokens=20, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    deltas = [choice.delta.content for choice in choices if choice.delta.content]
    assert "".join(deltas) == ANSWER
    assert len(deltas) == 7, "a delta for each token but EOS"
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
    assert (usage.prompt_tokens, usage.completion_tokens) == (37, 8)


def test_completions(one: Gateway) -> None:
    done = one.client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=8)
    text = done.choices[0].text
    assert text.startswith(" Paris.")
    assert done.choices[0].finish_reason == "length"
    stream = one.client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, max_tokens=8, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == text


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ([" France"], "The capital of"),
        (["ance is Pa", "zzz"], "The capital of Fr"),  # begins and ends within tokens
        (["Paris."], "The capital of France is "),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(one: Gateway, stop: list[str], text: str, stream: bool) -> None:
    if stream:
        chunks = one.client.chat.completions.create(
            model=MODEL, messages=CHAT, temperature=0, max_tokens=20, stop=stop, stream=True
        )
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert "".join(choice.delta.content or "" for choice in choices) == text
        assert choices[-1].finish_reason == "stop"
        return
    done = one.client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_tokens=20, stop=stop
    )
    assert done.choices[0].message.content == text
    assert done.choices[0].finish_reason == "stop"


def test_the_engine_hears_of_a_stop_string(one: Gateway, engines: Sequence[EngineProcess]) -> None:
    """Row 1: it does not go on to max_tokens."""
    before = stats(engines[0])
    done = one.client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, max_tokens=2000, stop=["ris."]
    )
    after = stats(engines[0])
    assert done.choices[0].text == " Pa"
    assert done.usage is not None and done.usage.completion_tokens == 2
    assert after.generation_tokens - before.generation_tokens <= 4
    assert after.num_requests_running == 0


@pytest.mark.parametrize("stream", [False, True])
def test_chat_log_probabilities(one: Gateway, stream: bool) -> None:
    """(This gateway gives none for the completions API, whatever the engine sends.)"""
    parts: list[Any] = []
    if stream:
        chunks = one.client.chat.completions.create(
            model=MODEL, messages=CHAT, temperature=0, max_tokens=5, logprobs=True,
            top_logprobs=3, stream=True,
        )  # fmt: skip
        parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
    else:
        done = one.client.chat.completions.create(
            model=MODEL, messages=CHAT, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
        )
        parts = [done.choices[0].logprobs]
    tokens = [token for part in parts if part for token in part.content]
    assert "".join(token.token for token in tokens) == "The capital of France is"
    for token in tokens:
        assert len(token.top_logprobs) == 3
        values = [top.logprob for top in token.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert token.top_logprobs[0].token == token.token, "greedy"
        assert token.logprob == pytest.approx(values[0])
        assert sum(map(math.exp, values)) <= 1.0001


def test_samples(one: Gateway) -> None:
    done = one.client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=1.5, max_tokens=12, n=3
    )
    assert [choice.index for choice in done.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in done.choices}) == 3
    assert done.usage is not None and done.usage.prompt_tokens == 37
    stream = one.client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_tokens=12, n=2, stream=True
    )
    texts = {0: "", 1: ""}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: ANSWER, 1: ANSWER}


def test_seeds(one: Gateway) -> None:
    def text(seed: int) -> str | None:
        done = one.client.chat.completions.create(
            model=MODEL, messages=CHAT, temperature=1.5, max_tokens=12, seed=seed
        )
        return done.choices[0].message.content

    assert text(7) == text(7)
    assert text(7) != text(8)


def test_penalties_change_the_answer(one: Gateway) -> None:
    """(This gateway does not pass on logit_bias.)"""

    def text(**params: Any) -> str:
        done = one.client.completions.create(
            model=MODEL, prompt="a a a a a a a a", temperature=0, max_tokens=8, **params
        )
        return done.choices[0].text

    assert text() != text(frequency_penalty=2.0)
    assert text() != text(presence_penalty=2.0)


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "country": {"enum": ["France", "Germany"]},
        "people": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "country", "people"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_json_schema(one: Gateway, temperature: float) -> None:
    done = one.client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=temperature, max_tokens=80, seed=1,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
        },
    )  # fmt: skip
    assert done.choices[0].finish_reason == "stop"
    answer = json.loads(done.choices[0].message.content or "")
    assert set(answer) == {"city", "country", "people"}
    assert len(answer["city"]) <= 12
    assert answer["country"] in ("France", "Germany")
    assert 0 <= answer["people"] <= 99


def test_a_regular_expression(one: Gateway) -> None:
    done = one.client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=1.5, max_tokens=20,
        extra_body={"regex": "(Paris|Lyon), [0-9]{2}"},
    )  # fmt: skip
    assert re.fullmatch("(Paris|Lyon), [0-9]{2}", done.choices[0].message.content or "")


def test_a_bad_schema_is_the_callers_fault(one: Gateway) -> None:
    schema = {"type": "no such type"}
    with pytest.raises(openai.BadRequestError, match="json_schema"):
        one.client.chat.completions.create(
            model=MODEL, messages=CHAT, max_tokens=5,
            response_format={
                "type": "json_schema", "json_schema": {"name": "answer", "schema": schema},
            },
        )  # fmt: skip


def test_a_long_prompt(one: Gateway) -> None:
    sentence = "The capital of France is Paris. "
    done = one.client.completions.create(
        model=MODEL, prompt=sentence * 150 + "The capital of", temperature=0, max_tokens=3
    )
    assert done.choices[0].text == " France is Paris"
    assert done.usage is not None and done.usage.prompt_tokens > 1000
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        one.client.completions.create(model=MODEL, prompt=sentence * 2000, max_tokens=3)


def test_a_client_that_hangs_up(one: Gateway, engines: Sequence[EngineProcess]) -> None:
    stream = one.client.completions.create(
        model=MODEL, prompt="Once upon a time", temperature=1, max_tokens=4000, stream=True
    )
    for _ in range(3):
        next(iter(stream))
    stream.close()

    async def freed() -> bool:
        async with connect(engines[0].target) as stub:
            now = await stub.GetStats(engine_pb2.GetStatsRequest(), timeout=30)
            return not (now.num_requests_running or now.kv_blocks_used)

    started = time.monotonic()
    assert asyncio.run(eventually(freed, 10))
    assert time.monotonic() - started < 10


def test_a_refusal_names_the_field(one: Gateway) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        one.client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=1, extra_body={"min_p": 7.0}
        )
    assert "min_p" in refused.value.message


def test_many_at_once(one: Gateway) -> None:
    """Each of several streams and plain calls gets its own answer."""
    client = openai.AsyncOpenAI(base_url=one.client.base_url, api_key="unused", max_retries=0)

    async def ask(number: int) -> str:
        text = f"Repeat after me: {number}{number}"
        if number % 2:
            done = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": text}], temperature=0,
                max_tokens=10,
            )  # fmt: skip
            return done.choices[0].message.content or ""
        parts = []
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], temperature=0,
            max_tokens=10, stream=True,
        ):  # fmt: skip
            parts += [choice.delta.content or "" for choice in chunk.choices]
        return "".join(parts)

    async def all_of_them() -> list[str]:
        together = await asyncio.gather(*(ask(number) for number in range(8)))
        alone = [await ask(number) for number in (0, 1)]
        assert together[:2] == alone
        return together

    assert all(asyncio.run(all_of_them()))
