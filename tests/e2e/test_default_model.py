"""The default model through both services, compared with transformers in fp32."""

from __future__ import annotations

import time
from pathlib import Path

import grpc
import pytest
import torch
import transformers

from millstream.client import Client, FinishReason, SamplingParams
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
