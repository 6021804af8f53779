"""LLM against transformers' own generate, token for token in float32, however the work is cut up;
and seeded sampling against itself."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from tests.tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM

from millstream.engine import LLM, SamplingParams

BLOCK_SIZE = 4
BLOCK_BYTES = 2 * 2 * BLOCK_SIZE * 2 * 16 * 4  # layers, K and V, tokens, KV heads, head_dim, float
OUTPUT_TOKENS = 20

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3", "tie_word_embeddings": True},
    "llama": {
        "family": "llama",
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "dynamic": {
        "family": "llama",
        "max_position_embeddings": 32,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    },
}


def make_prompts() -> list[list[int]]:
    """Mixed lengths, some with a common prefix, some a multiple of the block size."""
    generator = random.Random(7)
    prompts = [
        [generator.randrange(3, 256) for _ in range(length)]
        for length in (1, 2, 3, 4, 5, 8, 16, 17, 33, 90)
    ]
    shared = prompts[-1]
    return [*prompts, shared[:40], shared[:64], [*shared[:50], 9, 9, 9]]


PROMPTS = make_prompts()
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)


@dataclass(frozen=True)
class Case:
    """A model folder and what transformers generates from each prompt, EOS ids ignored."""

    folder: Path
    shares_prefixes: bool
    expected: list[list[int]]


def reference(folder: Path, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[list[int]]:
    """transformers' greedy continuation of each prompt, each by a fresh model: dynamic RoPE of one
    that has seen a longer prompt is another."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = {"eos_token_id": None, "max_new_tokens": OUTPUT_TOKENS, **options}
    outputs = []
    for prompt in prompts:
        model = copy.deepcopy(loaded)
        output = model.generate(torch.tensor([prompt]), do_sample=False, pad_token_id=0, **options)
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    make_tiny_model(folder, **MODELS[request.param])
    return Case(folder, request.param != "dynamic", reference(folder))


def rope(rope_type: str, **parameters: float) -> dict[str, Any]:
    parameters = {"rope_theta": 10000.0, **parameters}
    return {"rope_parameters": {"rope_type": rope_type, **parameters}}


# One configuration each, next to MODELS, of what a checkpoint may vary.
SHAPES: dict[str, dict[str, Any]] = {
    "no_gqa": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "gqa_3": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2},
    "head_dim_32": {"head_dim": 32},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True},
    "linear": rope("linear", factor=2.0),
    "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=32),
    "theta": rope("default", rope_theta=500000.0),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def generate(
    folder: Path,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
    **options: Any,
) -> tuple[list[list[int]], Any]:
    """The outputs' token ids and the engine's counters."""
    with LLM(folder, **{"block_size": BLOCK_SIZE, "device": "cpu", **options}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats()
    assert stats.kv_blocks_used == stats.num_requests_running == stats.num_requests_waiting == 0
    return [output["token_ids"] for output in outputs], stats


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("budget", [1, 2, 7, None])
def test_greedy_equals_transformers(case: Case, budget: int | None, prefix_caching: bool) -> None:
    outputs, stats = generate(
        case.folder,
        PROMPTS,
        GREEDY,
        max_num_batched_tokens=budget,
        prefix_caching=prefix_caching,
    )
    assert outputs == case.expected
    assert (stats.prefix_cache_hits > 0) == (prefix_caching and case.shares_prefixes)


def test_short_prompts_that_pass_a_long_one(case: Case) -> None:
    """Its slot takes no part in steps between its chunks; a more urgent one takes whole steps."""
    long = 9  # its number among the prompts
    with LLM(case.folder, block_size=BLOCK_SIZE, device="cpu", max_num_batched_tokens=32) as llm:
        llm.add_request(PROMPTS[long], GREEDY)
        llm.step()
        urgent = llm._samples(PROMPTS[8], GREEDY)
        llm._submit([structs.replace(request, priority=-1) for request in urgent])
        for prompt in PROMPTS[:5]:
            llm.add_request(prompt, GREEDY)
        outputs: dict[int, list[int]] = {}
        while not llm.is_finished():
            outputs.update(dict(llm.step()[0]))
    ended = list(outputs)
    assert ended.index(0) == len(ended) - 1, "the long one is passed by all"
    assert [outputs[key] for key in range(7)] == [
        case.expected[number] for number in (long, 8, 0, 1, 2, 3, 4)
    ]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_equals_transformers_for_every_shape(
    family: str, shape: str, tmp_path: Path
) -> None:
    """In one batch of mixed lengths, chunked, with prefixes shared."""
    make_tiny_model(tmp_path, family, seed=3, **SHAPES[shape])
    prompts = PROMPTS[3:]
    outputs, stats = generate(tmp_path, prompts, GREEDY, max_num_batched_tokens=40)
    assert outputs == reference(tmp_path, prompts)
    assert stats.prefix_cache_hits > 0


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_block_sizes(case: Case, block_size: int) -> None:
    assert generate(case.folder, PROMPTS, GREEDY, block_size=block_size)[0] == case.expected


def test_one_after_the_other_and_again_from_the_cache(case: Case) -> None:
    """Row 7: the second time all blocks of a prompt hit, and its last token is computed again."""
    with LLM(case.folder, block_size=BLOCK_SIZE, device="cpu") as llm:
        for _ in range(2):
            for prompt, expected in zip(PROMPTS, case.expected, strict=True):
                output = llm.generate(prompt, GREEDY, use_tqdm=False)
                assert [each["token_ids"] for each in output] == [expected]
        hits = llm.stats().prefix_cache_hits
        assert hits > sum(map(len, PROMPTS)) // 2 if case.shares_prefixes else hits == 0


@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_rows_43_and_45_preemption(case: Case, budget: int, prefix_caching: bool) -> None:
    """A pool that holds the longest request and little more: the others are recomputed."""
    outputs, stats = generate(
        case.folder,
        PROMPTS,
        GREEDY,
        max_num_batched_tokens=budget,
        prefix_caching=prefix_caching,
        kv_cache_bytes=30 * BLOCK_BYTES,
    )
    assert stats.num_preemptions > 0
    assert outputs == case.expected


def test_row_15_several_eos_ids_and_min_tokens(folder: Path) -> None:
    """EOS ids chosen from what the model says; transformers stops at the same place."""
    free = reference(folder)
    eos = sorted({output[5] for output in free} | {output[12] for output in free})[:6]
    params = {"temperature": 0, "max_tokens": OUTPUT_TOKENS, "stop_token_ids": eos}
    stopped, _ = generate(folder, PROMPTS, SamplingParams(**params, ignore_eos=True))
    assert stopped == reference(folder, eos_token_id=eos)
    assert any(len(output) < OUTPUT_TOKENS for output in stopped)
    late, _ = generate(folder, PROMPTS, SamplingParams(**params, ignore_eos=True, min_tokens=9))
    assert late == reference(folder, eos_token_id=eos, min_new_tokens=9)
    assert late != stopped and min(map(len, late)) >= 9


def sampled_params() -> list[SamplingParams]:
    filters: list[dict[str, Any]] = [
        {},
        {"top_p": 0.8},
        {"top_k": 20},
        {"min_p": 0.1},
        {"temperature": 0},
        {"top_k": 40, "top_p": 0.9, "temperature": 0.7},
    ]
    return [
        SamplingParams(
            **filters[i % len(filters)], seed=1000 + i, max_tokens=OUTPUT_TOKENS, ignore_eos=True
        )
        for i in range(len(PROMPTS))
    ]


def test_seeded_sampling_depends_on_nothing_else(folder: Path) -> None:
    """Alone, in a crowd of another order, with any chunk budget, from the cache, preempted."""
    params = sampled_params()
    together, _ = generate(folder, PROMPTS, params)
    assert len({tuple(output) for output in together}) == len(PROMPTS)
    for prompt, each, expected in zip(PROMPTS, params, together, strict=True):
        assert generate(folder, [prompt], each)[0] == [expected]
    backwards, _ = generate(folder, PROMPTS[::-1], params[::-1], max_num_batched_tokens=3)
    assert backwards == together[::-1]
    preempted, stats = generate(folder, PROMPTS, params, kv_cache_bytes=30 * BLOCK_BYTES)
    assert stats.num_preemptions > 0 and preempted == together


def test_different_seeds_differ_and_unset_ones_too(folder: Path) -> None:
    prompt = PROMPTS[8]
    for seeds in ([1, 2, 3], [None, None, None]):
        params = [
            SamplingParams(seed=seed, max_tokens=OUTPUT_TOKENS, ignore_eos=True) for seed in seeds
        ]
        outputs, _ = generate(folder, [prompt] * 3, params)
        assert len({tuple(output) for output in outputs}) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [7, None])
@pytest.mark.parametrize("pool_blocks", [30, None])
def test_greedy_equals_transformers_on_cuda(
    case: Case, budget: int | None, pool_blocks: int | None
) -> None:
    """The same tokens as on the CPU; two steps are in flight."""
    outputs, stats = generate(
        case.folder,
        PROMPTS,
        GREEDY,
        device="cuda",
        dtype="float32",
        max_num_batched_tokens=budget,
        kv_cache_bytes=None if pool_blocks is None else pool_blocks * BLOCK_BYTES,
    )
    assert outputs == case.expected
    assert (stats.num_preemptions > 0) == (pool_blocks is not None)


@pytest.mark.gpu
def test_seeded_sampling_on_cuda(folder: Path) -> None:
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32"}
    params = sampled_params()
    together, _ = generate(folder, PROMPTS, params, **options)
    for prompt, each, expected in zip(PROMPTS, params, together, strict=True):
        assert generate(folder, [prompt], each, **options)[0] == [expected]
    chunked, _ = generate(folder, PROMPTS, params, max_num_batched_tokens=3, **options)
    assert chunked == together
