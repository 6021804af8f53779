"""The default model through both services, compared with transformers in fp32."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import transformers

from millstream.client import Client, FinishReason, Output, SamplingParams
from millstream.v1 import engine_pb2, engine_pb2_grpc

NUM_TOKENS = 64
PROMPTS = [
    "What is the capital of France?",
    "Once upon a time",
    "def fibonacci(n):",
    "The three primary colours are",
    "Dear Sir or Madam,",
    "import numpy as np\n",
    "Water boils at",
    "In 1969, the first",
    "List of planets: Mercury, Venus,",
    "Q: What is 2 + 2?\nA:",
    "The quick brown fox",
    "To be, or not to be,",
    "1, 1, 2, 3, 5, 8,",
    "Photosynthesis is the process by which",
    "She opened the door and",
    "SELECT name FROM users WHERE",
    "Die Hauptstadt von Deutschland ist",
    "Roses are red,",
    "The recipe needs flour, sugar and",
    "An algorithm is" + " very" * 40,
]


def test_the_capital_of_france(default_client: Client) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    output = default_client.chat(question, SamplingParams(temperature=0, max_tokens=32))
    assert output.text == "The capital of France is Paris."
    assert output.finish_reason is FinishReason.STOP


def test_row_1_a_stop_string_frees_the_engine(default_client: Client) -> None:
    params = SamplingParams(temperature=0, max_tokens=4000, stop=" Paris", ignore_eos=True)
    output = default_client.generate("The capital of France is", params)
    assert (output.text, output.finish_reason, output.stop_reason) == ("", "stop", " Paris")
    assert output.usage.output_tokens == len(output.token_ids) == 1
    with grpc.insecure_channel(default_client.engine_target or "") as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        deadline = time.monotonic() + 2  # 0.2 s, and this machine's other work
        while (stats := stub.GetStats(engine_pb2.GetStatsRequest())).num_requests_running:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert stats.kv_blocks_used == 0


def test_streams_join_to_the_text_whatever_is_sampled(default_client: Client) -> None:
    """Rows 9, 28, 74: hot sampling gives broken UTF-8 and special tokens; some end inside them."""
    for seed, prompt in enumerate(["世界 🙂", "Once upon a time", "🙂🙂🙂", "naïve café"]):
        params = SamplingParams(temperature=2, seed=seed, max_tokens=24, ignore_eos=True)
        deltas = list(default_client.stream(prompt, params))
        output = default_client.generate(prompt, params)
        assert "".join(delta.text for delta in deltas) == output.text
        assert [i for delta in deltas for i in delta.token_ids] == output.token_ids
        assert default_client.decode(output.token_ids) == output.text


@pytest.mark.parametrize(
    ("skip", "include", "end"),
    [(True, False, ""), (True, True, ""), (False, False, ""), (False, True, "<|im_end|>")],
)
def test_row_74_special_tokens_and_stop_tokens(
    default_client: Client, skip: bool, include: bool, end: str
) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]

    def ask(**params: Any) -> Output:
        return default_client.chat(
            question,
            SamplingParams(temperature=0, skip_special_tokens=skip, include_stop=include, **params),
        )

    answer = ask(max_tokens=32)
    eos_id = answer.token_ids[-1]
    assert (answer.text, answer.stop_reason) == (f"The capital of France is Paris.{end}", eos_id)
    # A stop token that is text, not special, is left out unless it is included.
    *_, paris_id, _, _ = answer.token_ids
    stopped = ask(max_tokens=32, stop_token_ids=[paris_id])
    assert stopped.text == "The capital of France is" + (" Paris" if include else "")
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", paris_id)
    # Past EOS it is a token like any other, and shown unless special ones are skipped.
    count = len(answer.token_ids) + 2
    past = ask(max_tokens=count, ignore_eos=True)
    assert past.token_ids[: count - 2] == answer.token_ids
    assert past.finish_reason is FinishReason.LENGTH
    assert ("<|im_end|>" in past.text) is not skip
    for output in (answer, stopped, past):
        resolved = output.sampling
        assert (resolved.skip_special_tokens, resolved.include_stop) == (skip, include)
    assert (stopped.sampling.stop_token_ids, past.sampling.ignore_eos) == ([paris_id], True)


def test_samples_share_the_prompt_and_can_be_had_alone(default_client: Client) -> None:
    prompt = " ".join(PROMPTS[:8])
    params = SamplingParams(n=4, seed=2**64 - 2, max_tokens=8, ignore_eos=True)
    output = default_client.generate(prompt, params, cache_salt="samples")
    assert [sample.seed for sample in output.samples] == [2**64 - 2, 2**64 - 1, 0, 1]
    assert len({tuple(sample.token_ids) for sample in output.samples}) == 4
    prompt_tokens = output.usage.prompt_tokens
    assert prompt_tokens > 32
    assert [sample.usage.cached_tokens for sample in output.samples] == [
        0,
        *[(prompt_tokens - 1) // 16 * 16] * 3,
    ]
    for sample in output.samples[1:3]:
        alone = replace(params, n=1, seed=sample.seed)
        assert default_client.generate(prompt, alone).token_ids == sample.token_ids


def test_bad_words_are_texts(default_client: Client) -> None:
    """With a space before them and without; a word of several tokens; the rest goes on."""
    params = SamplingParams(temperature=0, max_tokens=12)
    prompt = "The capital of France is"
    plain = default_client.generate(prompt, params).text
    assert plain.startswith(" Paris")
    for words in (["Paris"], ["Paris", "a", "the", "located"], ["photosynthetically"]):
        text = default_client.generate(prompt, replace(params, bad_words=words)).text
        assert not any(f" {word} " in f"{text} " for word in words)
        assert (text == plain) == (words == ["photosynthetically"])


@pytest.mark.slow
def test_row_65_log_probabilities_equal_transformers(
    default_client: Client, default_model_dir: Path
) -> None:
    """Of prompt and output, within 1e-3, sampled at a random temperature; with their texts."""
    params = SamplingParams(
        temperature=1.5, seed=3, max_tokens=16, ignore_eos=True, logprobs=5, prompt_logprobs=5
    )
    outputs = default_client.generate(PROMPTS[:3], params)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        default_model_dir, dtype=torch.float32
    )
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        assert output.logprobs is not None
        assert output.prompt_logprobs is not None
        token_ids = output.prompt_token_ids + output.token_ids
        with torch.inference_mode():
            rows = model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(dim=-1)
        entries = [*output.prompt_logprobs[1:], *output.logprobs]
        for entry, row, token_id in zip(entries, rows, token_ids[1:], strict=True):
            assert entry is not None
            assert entry.token_id == token_id
            assert entry.logprob == pytest.approx(row[token_id].item(), abs=1e-3)
            top = row.topk(5).values.tolist()
            assert [other.logprob for other in entry.top] == pytest.approx(top, abs=1e-3)
        shown = [entry.text or "" for entry in output.prompt_logprobs[1:] if entry is not None]
        assert prompt.endswith("".join(shown))


@pytest.mark.slow
def test_greedy_equals_transformers_generate(
    default_client: Client, default_model_dir: Path
) -> None:
    """20 prompts, 64 tokens each: the checkpoint's bf16 weights, computed in fp32."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = default_client.generate(PROMPTS, params)
    assert len(PROMPTS) == 20
    expected = _transformers_greedy(default_model_dir, [o.prompt_token_ids for o in outputs])
    for prompt, output, token_ids in zip(PROMPTS, outputs, expected, strict=True):
        assert output.token_ids == token_ids, prompt


def _transformers_greedy(model_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    width = max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    model.generation_config.eos_token_id = None
    generated = model.generate(
        padded,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        pad_token_id=0,
    )
    return [row[width:].tolist() for row in generated]
