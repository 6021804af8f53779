"""The engine's fast path on a GPU: CUDA graphs against eager steps, and both against transformers.

float32: token for token. bfloat16: up to ties, which is: every token's logit, of a float32 model of
the same weights given the tokens before it, is within TIE of the largest.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM

from millstream.engine import LLM, SamplingParams

pytestmark = pytest.mark.gpu

BLOCK_SIZE = 16
TIE = 0.25  # of the logits' standard deviation
SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def make_prompts(count: int) -> list[list[int]]:
    """Mixed lengths; every third one shares a prefix of 40 tokens."""
    rng = random.Random(3)
    shared = [rng.randrange(3, 256) for _ in range(40)]
    return [
        (shared if i % 3 == 0 else []) + [rng.randrange(3, 256) for _ in range(rng.randint(1, 90))]
        for i in range(count)
    ]


def load(folder: Path, **options: Any) -> LLM:
    options = {
        "device": "cuda",
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "attention_backend": "triton",
        "kv_cache_bytes": 1 << 28,
        "max_num_seqs": 64,
        **options,
    }
    return LLM(folder, **options)


def generate(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


@torch.inference_mode()
def reference(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = {"max_new_tokens": GREEDY.max_tokens, "eos_token_id": None, "pad_token_id": 0}
    outputs = []
    for prompt in prompts:
        output = model.generate(torch.tensor([prompt]), do_sample=False, **options)
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = request.param
    return make_tiny_model(tmp_path_factory.mktemp(family), family, seed=5, **SHAPE)


@pytest.mark.parametrize("budget", [50, None])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_float32_equals_transformers(folder: Path, enforce_eager: bool, budget: int | None) -> None:
    """Chunks, mixed steps, prefix hits; the second time nearly all is in the cache."""
    prompts = make_prompts(20)
    expected = reference(folder, prompts)
    with load(folder, enforce_eager=enforce_eager, max_num_batched_tokens=budget) as llm:
        for _ in range(2):
            assert generate(llm, prompts, GREEDY) == expected
        assert llm.stats().prefix_cache_hits > 0


def test_chunks_in_graphs(folder: Path) -> None:
    """Steps with chunks are graphs, and with the cache full of NaN they give the same tokens and
    write where a CPU's steps write, to no other token's place."""
    prompts = make_prompts(20)
    expected = reference(folder, prompts)
    options: dict[str, Any] = {"max_num_batched_tokens": 150, "prefix_caching": False}
    with load(folder, device="cpu", attention_backend="auto", **options) as llm:
        runs = [written(llm, prompts, expected) for _ in range(3)]  # each takes other blocks
    assert all(int(places.sum()) > sum(map(len, prompts)) for places in runs)
    with load(folder, **options) as llm:
        for places in runs:
            assert torch.equal(written(llm, prompts, expected), places)
        runner: Any = llm._core._runner
        assert runner._steps.chunk_graphs._graphs


def written(llm: LLM, prompts: list[list[int]], expected: list[list[int]]) -> torch.Tensor:
    """The tokens' places [blocks, block_size] that a run fills, the scratch block apart, of a cache
    full of NaN before."""
    runner: Any = llm._core._runner
    data = runner._steps.kv_cache.data
    with torch.inference_mode():
        data.fill_(float("nan"))
    if data.is_cuda:
        torch.cuda.synchronize()
    assert generate(llm, prompts, GREEDY) == expected
    return data.isfinite().flatten(4).all(-1).all(0).all(0)[1:].cpu()


def test_preemption(folder: Path) -> None:
    prompts = make_prompts(20)
    block_bytes = 2 * 2 * BLOCK_SIZE * 2 * 64 * 4
    with load(folder, kv_cache_bytes=24 * block_bytes) as llm:
        assert generate(llm, prompts, GREEDY) == reference(folder, prompts)
        assert llm.stats().num_preemptions > 0


@pytest.mark.parametrize("cap", [1, 3, 17, 20, 33])
def test_row_40_every_batch_size(folder: Path, cap: int) -> None:
    """From the cap down to one: one sequence less every step, all in graphs."""
    prompts = make_prompts(cap)
    params = [SamplingParams(temperature=0, max_tokens=2 + i, ignore_eos=True) for i in range(cap)]
    outputs = []
    for enforce_eager in (False, True):
        with load(folder, max_num_seqs=cap, enforce_eager=enforce_eager) as llm:
            outputs.append(generate(llm, prompts, params))
    assert outputs[0] == outputs[1]


def test_row_42_padding_rows_write_to_scratch_alone(folder: Path) -> None:
    """A batch of 3 in a graph of 4, the cache full of NaN: 50 steps."""
    prompts = make_prompts(3)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    with load(folder, max_num_seqs=8, prefix_caching=False) as llm:
        expected = generate(llm, prompts, params)
        runner: Any = llm._core._runner
        data = runner._steps.kv_cache.data
        with torch.inference_mode():
            data.fill_(float("nan"))
        torch.cuda.synchronize()
        assert generate(llm, prompts, params) == expected
        per_block = data.isfinite().flatten(4).all(-1).all(0).all(0).sum(1)
        assert int(per_block[1:].sum()) == sum(len(prompt) + 49 for prompt in prompts)
        assert int(per_block[0]) <= 1


def test_seeded_sampling_alone_and_in_a_crowd(folder: Path) -> None:
    """With and without filters and min_tokens, graphs and eager: a request's tokens are its own."""
    kinds: list[dict[str, Any]] = [{}, {"top_k": 20}, {"top_p": 0.8}, {"temperature": 0}]
    prompts = make_prompts(16)
    params = [
        SamplingParams(seed=i, max_tokens=16, ignore_eos=True, **kinds[i % len(kinds)])
        for i in range(len(prompts))
    ]
    params[5] = SamplingParams(seed=5, max_tokens=16, min_tokens=8, stop_token_ids=[7, 9])
    with load(folder, enforce_eager=True) as eager:
        expected = generate(eager, prompts, params)
    with load(folder) as llm:
        assert generate(llm, prompts, params) == expected
        for prompt, each, output in zip(prompts, params, expected, strict=True):
            assert generate(llm, [prompt], each) == [output]
    with load(folder, attention_backend="torch") as plain:
        assert generate(plain, prompts, params) == expected


@pytest.mark.parametrize("batch", [1, 4, 30, 64])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_bfloat16_up_to_ties(family: str, batch: int, tmp_path: Path) -> None:
    """Hidden size 1024, so that the decode GEMM kernels take part."""
    shape = {**SHAPE, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    make_tiny_model(tmp_path, family, seed=1, dtype=torch.bfloat16, **{**shape, **heads})
    prompts = make_prompts(batch)
    with load(tmp_path, dtype="bfloat16") as llm:
        outputs = generate(llm, prompts, GREEDY)
    ties = count_ties(tmp_path, prompts, outputs)
    print(f"{family}, batch {batch}: {ties} of {sum(map(len, outputs))} tokens were ties")


def count_ties(folder: Path, prompts: list[list[int]], outputs: list[list[int]]) -> int:
    """Tokens that were not the likeliest; raises AssertionError if one was not a tie."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().cuda()
    ties = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output], device="cuda")).logits[0]
        logits = logits[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output, device="cuda")[:, None])[:, 0]
        behind = logits.amax(1) - chosen
        assert behind.max() < TIE * logits.std()
        ties += int((behind > 0).sum())
    return ties


def test_two_engines_share_a_gpu() -> None:
    """Each takes 0.4 of it, whatever the other holds."""
    options = '"smollm2-135m", load_format="dummy", gpu_memory_utilization=0.4, max_num_seqs=64'
    program = (
        "from millstream.engine import LLM, SamplingParams\n"
        f"llm = LLM({options})\n"
        "print(len(llm.generate([1, 2, 3], SamplingParams(max_tokens=5), use_tqdm=False)))\n"
        "print('up', flush=True)\n"
        "input()\n"
    )
    engines = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for engine in engines:
            assert engine.stdout is not None
            assert "up" in [engine.stdout.readline().strip() for _ in range(2)]
    finally:
        for engine in engines:
            engine.communicate("\n", timeout=60)
