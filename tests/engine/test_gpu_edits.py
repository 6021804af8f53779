"""Edited and scored logits on a GPU: graphs that end with the logits, masks that follow the tokens
with a step in flight, tables and copies on a stream; against eager steps, torch's operations and a
CPU."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_models import make_tiny_model

from millstream.engine import LLM, SamplingParams

pytestmark = pytest.mark.gpu

SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64}
BLOCK_BYTES = 2 * 2 * 16 * 2 * 64 * 4  # of 16 tokens
KINDS: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "logprobs": 5},
    {"repetition_penalty": 1.4, "top_p": 0.9},
    {"logit_bias": dict.fromkeys(range(40), 3.0), "logprobs": 0},
    {"top_k": 50},
    {"allowed_token_ids": range(100, 120), "bad_words": [[105], [110, 111], [111, 110, 112]]},
    {"bad_words": [[i, j] for i in range(256) for j in (3, 99, 200)]},
    {"min_tokens": 9, "stop_token_ids": list(range(3, 60))},
    {"prompt_logprobs": 2, "frequency_penalty": 2.0},
]


def make_prompts(count: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 256) for _ in range(rng.randint(1, 70))] for _ in range(count)]


def make_params(count: int, temperature: float) -> list[SamplingParams]:
    common: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "temperature": temperature}
    return [SamplingParams(seed=i, **{**common, **KINDS[i % len(KINDS)]}) for i in range(count)]


def load(folder: Path, **options: Any) -> LLM:
    options = {
        "device": "cuda",
        "dtype": "float32",
        "block_size": 16,
        "attention_backend": "triton",
        "kv_cache_bytes": 1 << 28,
        "max_num_seqs": 64,
        **options,
    }
    return LLM(folder, **options)


def generate(llm: LLM, prompts: list[list[int]], params: Any) -> list[dict[str, Any]]:
    return llm.generate(prompts, params, use_tqdm=False)


def same(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert one["token_ids"] == other["token_ids"]
        assert one.keys() == other.keys()
        for field in ("logprobs", "prompt_logprobs"):
            for entry, want in zip(one.get(field, []), other.get(field, []), strict=True):
                assert (entry is None) == (want is None)
                if entry is not None:
                    assert entry.logprob == pytest.approx(want.logprob, abs=1e-3)
                    assert entry.top_logprobs == pytest.approx(want.top_logprobs, abs=1e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("qwen3"), seed=5, **SHAPE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_graphs_eager_steps_and_a_cpu_agree(folder: Path, temperature: float) -> None:
    """In a crowd of all kinds, one step ahead, twice; then each alone, and preempted."""
    prompts, params = make_prompts(27), make_params(27, temperature)
    with load(folder, device="cpu", attention_backend="torch") as cpu:
        expected = generate(cpu, prompts, params)
    for options in ({"enforce_eager": True}, {"attention_backend": "torch"}, {}):
        with load(folder, **options) as llm:
            for _ in range(2):
                same(generate(llm, prompts, params), expected)
    with load(folder) as llm:
        for i in range(len(KINDS)):
            same(generate(llm, [prompts[i]], params[i]), [expected[i]])
    with load(folder, kv_cache_bytes=30 * BLOCK_BYTES, max_num_batched_tokens=100) as llm:
        same(generate(llm, prompts, params), expected)
        assert llm.stats().num_preemptions > 0


def test_rows_without_edits_do_not_notice(folder: Path) -> None:
    """bfloat16: the logits that a plain row samples from are the same, only wider."""
    prompts = make_prompts(16)
    plain = [SamplingParams(max_tokens=24, seed=i, ignore_eos=True) for i in range(16)]
    mixed = [
        SamplingParams(max_tokens=24, seed=i, ignore_eos=True, presence_penalty=0.5 * (i % 2))
        for i in range(16)
    ]
    with load(folder, dtype="bfloat16") as llm:
        expected = generate(llm, prompts, plain)
        outputs = generate(llm, prompts, mixed)
    assert [each["token_ids"] for each in outputs[::2]] == [
        each["token_ids"] for each in expected[::2]
    ]


def test_a_mask_knows_the_token_of_the_step_in_flight(folder: Path) -> None:
    """No pair of ids comes twice: what follows each token is banned as soon as it came, which with
    a step in flight is known only once that one is done."""
    bad_words = [[i, j] for i in range(40, 44) for j in range(40, 44) if i != j]
    params = SamplingParams(
        max_tokens=200, allowed_token_ids=range(40, 44), bad_words=bad_words, ignore_eos=True
    )
    with load(folder) as llm:
        assert llm.info.max_in_flight == 2
        for output in generate(llm, make_prompts(5), params):
            assert len(set(output["token_ids"])) == 1, "only the same id may follow an id"


def test_a_launch_does_not_wait_for_the_device(folder: Path) -> None:
    """Whatever is edited or scored; the first round records graphs and compiles kernels. (A mask
    that follows the tokens waits for an event, which this does not see.)"""
    prompts, params = make_prompts(27), make_params(27, 1.0)
    with load(folder, prefix_caching=False) as llm:
        expected = generate(llm, prompts, params)
        runner: Any = llm._core._runner
        launch = runner.launch

        def strictly(plan: Any) -> None:
            torch.cuda.set_sync_debug_mode("error")
            try:
                launch(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        runner.launch = strictly
        same(generate(llm, prompts, params), expected)


def test_edits_of_every_slot_fit_in_what_was_reserved() -> None:
    """A vocabulary of 152k, 256 sequences that use every table, the KV cache as large as can be."""
    params = SamplingParams(
        max_tokens=8,
        ignore_eos=True,
        presence_penalty=0.5,
        logit_bias={5: 1.0},
        bad_words=[[5, 6]],
        logprobs=20,
        prompt_logprobs=20,
    )
    prompts = [[7 + i % 1000] * 600 for i in range(256)]
    with LLM("qwen3-0.6b", load_format="dummy", max_num_seqs=256) as llm:
        outputs = generate(llm, prompts, params)
    assert all(len(output["prompt_logprobs"]) == 600 for output in outputs)
    assert all(len(output["logprobs"]) == 8 for output in outputs)
