"""--batch-invariant: a request's tokens are its own, alone and in any crowd, in 16-bit types.

In the interpreter on a CPU with float16; on a GPU with bfloat16, at the shapes of real models.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.backends.test_triton_ops import add_fake_graphs, load, run
from tests.tiny_models import make_tiny_model

from millstream.engine import LLM, SamplingParams
from millstream.engine.request import Sampling

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
}
OPTIONS: dict[str, Any] = {
    "attention_backend": "triton",
    "dtype": "float16",
    "batch_invariant": True,
}
PROMPTS = [[5, 6, 7], list(range(3, 23)), [9] * 17]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_logits_are_the_same_bits(family: str, tmp_path: Path) -> None:
    """Of sequences that start together and of one by itself; with norms over heads, with biases."""
    biases = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    make_tiny_model(tmp_path, family, **SHAPE, **biases)
    runner = load(tmp_path, **OPTIONS)
    seen: list[torch.Tensor] = []
    runner._steps.model.register_forward_hook(lambda module, arguments, output: seen.append(output))
    greedy = Sampling(max_tokens=2, temperature=0.0, ignore_eos=True)
    run(runner, PROMPTS, greedy)
    run(runner, PROMPTS[1:2], greedy)
    first, second, first_alone, second_alone = seen
    assert torch.equal(first_alone[0], first[1])
    assert torch.equal(second_alone[0], second[1])


def test_chunks_and_graphs_give_the_same_tokens(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, **SHAPE)
    samplings = [
        Sampling(max_tokens=2 + i, temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    runner = load(tmp_path, **OPTIONS)
    assert runner.info.batch_invariant
    expected = run(runner, PROMPTS, samplings)
    runner = load(tmp_path, max_num_batched_tokens=16, max_num_seqs=3, **OPTIONS)
    add_fake_graphs(runner)
    assert run(runner, PROMPTS, samplings) == expected


# ---- on a GPU


def make_requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Lengths of 1 to 600, every fifth with a prefix of 300; greedy, random and filtered."""
    rng = random.Random(11)
    shared = [rng.randrange(10_000) for _ in range(300)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0},
    ]
    prompts, params = [], []
    for index in range(count):
        own = [rng.randrange(10_000) for _ in range(rng.randint(1, 600))]
        prompts.append(shared + own[:100] if index % 5 == 0 else own)
        options = {"max_tokens": rng.randint(8, 40), "ignore_eos": True, "seed": index}
        params.append(SamplingParams(**options, **kinds[index % len(kinds)]))
    return prompts, params


def load_gpu(model: str, **options: Any) -> LLM:
    options = {"kv_cache_bytes": 16 << 30, "max_num_seqs": 200, "seed": 3, **options}
    return LLM(model, load_format="dummy", device="cuda", batch_invariant=True, **options)


def generate(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["smollm2-135m", "qwen3-0.6b"])
def test_alone_and_in_crowds(model: str) -> None:
    """1 against 7, 64 and 200, graphs and eager, chunks of any size, prefixes found or not."""
    prompts, params = make_requests(200)
    with load_gpu(model) as llm:
        expected = generate(llm, prompts, params)
        assert generate(llm, prompts, params) == expected, "the second time, with prefixes cached"
        for size, starts in ((64, (0, 100)), (7, (0, 50, 193)), (1, range(0, 200, 23))):
            for start in starts:
                some = slice(start, start + size)
                got = generate(llm, prompts[some], params[some])
                assert got == expected[some], f"{size} from {start}"
        assert llm.stats().prefix_cache_hits > 0
    for options in (
        {"enforce_eager": True, "max_num_batched_tokens": 300, "prefix_caching": False},
        {"max_num_seqs": 5, "max_num_batched_tokens": 1000},
    ):
        few = 40
        with load_gpu(model, **options) as llm:
            assert generate(llm, prompts[:few], params[:few]) == expected[:few], options


@pytest.mark.gpu
def test_a_full_pool() -> None:
    """Requests wait instead of being preempted."""
    prompts, params = make_requests(40)
    with load_gpu("smollm2-135m") as llm:
        expected = generate(llm, prompts, params)
    with load_gpu("smollm2-135m", kv_cache_bytes=64 << 20) as llm:
        assert llm.info.num_blocks * llm.info.block_size < sum(map(len, prompts))
        assert generate(llm, prompts, params) == expected
        assert llm.stats().num_preemptions == 0
