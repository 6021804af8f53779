"""Logits equal transformers' on the same checkpoint, whatever the chunks, batch and blocks."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.paged import CPU, PagedBatches, PagedSequence, load_model, paged_logits
from tests.tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM

from millstream.engine.attention import allocate_kv_cache, bytes_per_block
from millstream.engine.model_files.model_config import load_model_config

# transformers 5.24 calls it `cache`; 5.17 does not know that name.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")


@torch.inference_mode()
def reference_logits(
    model_dir: Path, prompt: Sequence[int], continuation: Sequence[int]
) -> torch.Tensor:
    """[tokens, vocab] of a fresh transformers model: the prompt at once, then token by token."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    output = model(torch.tensor([list(prompt)]), use_cache=True)
    rows = [output.logits[0]]
    for token_id in continuation:
        output = model(
            torch.tensor([[token_id]]), past_key_values=output.past_key_values, use_cache=True
        )
        rows.append(output.logits[0])
    return torch.cat(rows)


def random_ids(count: int, seed: int, vocab_size: int = 256) -> list[int]:
    return random.Random(seed).choices(range(vocab_size), k=count)


def assert_parity(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-4) -> None:
    assert not actual.isnan().any()
    torch.testing.assert_close(actual, expected, atol=atol, rtol=1e-4)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


def check(model_dir: Path, lengths: Sequence[tuple[int, int]], **options: Any) -> None:
    """Runs sequences of (prompt, continuation) lengths, whole and in chunks, against reference."""
    config = load_model_config(model_dir)
    sequences = [
        (
            random_ids(prompt, seed, config.vocab_size),
            random_ids(more, seed + 100, config.vocab_size),
        )
        for seed, (prompt, more) in enumerate(lengths)
    ]
    expected = [reference_logits(model_dir, *sequence) for sequence in sequences]
    model = load_model(model_dir, **options)
    for chunk_tokens in (1, 3, 8, 1000):
        actual = paged_logits(model, sequences, chunk_tokens=chunk_tokens, seed=chunk_tokens)
        for ours, theirs in zip(actual, expected, strict=True):
            assert_parity(ours, theirs)


MIXED = [(1, 3), (4, 2), (9, 6), (30, 5)]

SHAPES: dict[str, dict[str, Any]] = {
    "gqa1": {"num_key_value_heads": 4},
    "gqa2": {"num_key_value_heads": 2},
    "gqa3": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2},
    "gqa4": {"num_key_value_heads": 1},
    "row_59_head_dim_32": {"head_dim": 32},
    "tied": {"tie_word_embeddings": True},
    "attention_bias": {"attention_bias": True},
    "one_layer_eps": {"num_hidden_layers": 1, "rms_norm_eps": 1e-2},
}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers(family: str, shape: str, tmp_path: Path) -> None:
    check(make_tiny_model(tmp_path, family, seed=3, **SHAPES[shape]), MIXED)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers_on_cuda(family: str, shape: str, tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, family, seed=3, **SHAPES[shape])
    check(model_dir, MIXED, device=torch.device("cuda"))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("rows", [[], [3], [0, 5, 11, 12]])
def test_the_last_layer_goes_on_with_the_wanted_rows(
    family: str, rows: list[int], tmp_path: Path
) -> None:
    """Chunks with and without a prefix and a decode: the wanted rows' logits are those of a step
    that wants all, what it stores is the same, and no other row reaches the last MLP."""
    model = load_model(make_tiny_model(tmp_path, family, mlp_bias=family == "llama"))
    last_rows: list[int] = []
    model.model.layers[-1].mlp.register_forward_pre_hook(
        lambda _, inputs: last_rows.append(len(inputs[0].residual))
    )
    results = []
    for wanted in (list(range(13)), rows):
        batches, sequences = PagedBatches(model.config), [PagedSequence(9), PagedSequence(9)]
        with torch.inference_mode():
            model(batches.batch([(each, range(4, 8)) for each in sequences]), batches.kv_cache)
            chunks = [(PagedSequence(7), range(20, 27)), (sequences[0], range(30, 35))]
            batch = batches.batch(chunks, [(sequences[1], 40)])
            batch = replace(batch, sample_rows=torch.tensor(wanted, dtype=torch.int64))
            results.append((model(batch, batches.kv_cache), batches.kv_cache.data))
    (every, every_stored), (some, stored) = results
    torch.testing.assert_close(some, every[rows], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(stored, every_stored, rtol=0, atol=0, equal_nan=True)
    assert last_rows == [8, 13, 8, len(rows)]


def test_row_60_llama_with_every_bias(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    check(model_dir, MIXED)


def test_smollm2_proportions(tmp_path: Path) -> None:
    shape = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
    check(make_tiny_model(tmp_path, "llama", head_dim=None, **shape), MIXED)


def test_row_59_kv_cache_is_sized_by_head_dim(tmp_path: Path) -> None:
    """With 2 KV heads of 24 no other size of the model gives the same product."""
    config = load_model_config(make_tiny_model(tmp_path, head_dim=24))
    assert bytes_per_block(config, 4, torch.bfloat16) == 2 * 2 * 4 * 2 * 24 * 2
    cache = allocate_kv_cache(config, num_blocks=5, block_size=4, dtype=torch.bfloat16, device=CPU)
    assert cache.data.nbytes == 6 * bytes_per_block(config, 4, torch.bfloat16)
    assert (cache.num_blocks, cache.block_size) == (5, 4)


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn_attention_factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.3,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def rewrite_rope(model_dir: Path, rope: dict[str, Any], theta: float, layout: str) -> None:
    """Puts a rope into config.json in one of the layouts that are found in the wild."""
    path = model_dir / "config.json"
    raw = json.loads(path.read_text())
    for key in ("rope_parameters", "rope_scaling", "rope_theta"):
        raw.pop(key, None)
    if layout == "new":
        raw["rope_parameters"] = {**rope, "rope_theta": theta}
    else:
        raw["rope_theta"] = theta
        scaling = {("type" if key == "rope_type" else key): value for key, value in rope.items()}
        raw["rope_scaling"] = scaling if layout == "old_type" else rope
        if rope["rope_type"] == "default":
            raw["rope_scaling"] = None
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize("layout", ["new", "old", "old_type"])
@pytest.mark.parametrize("rope", ROPES)
def test_row_39_rope_scaling_in_each_layout(rope: str, layout: str, tmp_path: Path) -> None:
    """Prompts within the limit, decodes beyond it, and (dynamic) prompts beyond it."""
    model_dir = make_tiny_model(tmp_path, "llama", max_position_embeddings=128, seed=7)
    if rope == "dynamic":
        raw = json.loads((model_dir / "config.json").read_text())
        raw["max_position_embeddings"] = 32
        (model_dir / "config.json").write_text(json.dumps(raw))
    rewrite_rope(model_dir, ROPES[rope], 10000.0, layout)
    check(model_dir, [(3, 4), (30, 10), (32, 3), (45, 6)], max_model_len=64)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_row_39_far_positions(family: str, rope: str, tmp_path: Path) -> None:
    """Logits at positions 0, 100 and 5000."""
    model_dir = make_tiny_model(
        tmp_path, family, max_position_embeddings=8192, num_hidden_layers=1, seed=7
    )
    parameters = {**ROPES[rope]}
    if "original_max_position_embeddings" in parameters:
        parameters["original_max_position_embeddings"] = 2048
    rewrite_rope(model_dir, parameters, 10000.0, "new")
    prompt = random_ids(5001, 1)
    expected = reference_logits(model_dir, prompt, [])
    model = load_model(model_dir, max_model_len=5001)
    (actual,) = paged_logits(model, [(prompt, [])], chunk_tokens=3000, num_blocks=80, block_size=64)
    rows = [0, 100, 5000]
    assert_parity(actual[rows], expected[rows])


@pytest.mark.parametrize("layout", ["new", "old"])
def test_row_38_theta_in_both_layouts(layout: str, tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, "qwen3", max_position_embeddings=1024)
    rewrite_rope(model_dir, ROPES["default"], 100000.0, layout)
    assert load_model_config(model_dir).rope.theta == 100000.0
    prompt = random_ids(501, 2)
    expected = reference_logits(model_dir, prompt, [])
    model = load_model(model_dir, max_model_len=501)
    (actual,) = paged_logits(model, [(prompt, [])], chunk_tokens=200, num_blocks=130)
    assert_parity(actual[500:], expected[500:])


def test_row_38_missing_theta_is_the_class_default(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, "llama")
    path = model_dir / "config.json"
    raw = json.loads(path.read_text())
    raw.pop("rope_parameters")
    path.write_text(json.dumps(raw))
    check(model_dir, [(40, 3)])


def test_row_78_dynamic_scaling_past_the_limit(tmp_path: Path) -> None:
    """max_position 32, limit 64, prompt 30, 10 tokens more."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model_dir = make_tiny_model(tmp_path, "llama", max_position_embeddings=32, rope_parameters=rope)
    assert load_model_config(model_dir).max_position == 64
    check(model_dir, [(30, 10)], max_model_len=64)


def test_row_42_nothing_but_the_batch_rows_is_written_or_read(tmp_path: Path) -> None:
    """Untouched slots keep their sentinel, block 0 may hold NaN, and no logit is NaN."""
    model = load_model(make_tiny_model(tmp_path))
    batches = PagedBatches(model.config)
    first, second = PagedSequence(prompt_len=6), PagedSequence(prompt_len=3)
    batch = batches.batch([(first, random_ids(6, 1)), (second, random_ids(3, 2))])
    with torch.inference_mode():
        logits = [model(batch, batches.kv_cache)]
        for step in range(50):
            batch = batches.batch([], [(first, step), (second, step + 1)])
            logits.append(model(batch, batches.kv_cache))
    assert not torch.cat(logits).isnan().any()
    size = batches.kv_cache.block_size
    used = {
        sequence.blocks[position // size] * size + position % size
        for sequence in (first, second)
        for position in range(sequence.num_computed)
    }
    written = ~batches.kv_cache.data.flatten(2, 3).isnan()
    slots = written.all(-1).all(-1).all(0).all(0).nonzero().flatten().tolist()
    assert set(slots) == used
    assert int(written.sum()) == len(used) * written[:, :, 0].numel()


def test_neighbours_change_nothing(tmp_path: Path) -> None:
    """A sequence's logits beside others of very different lengths are those it has alone."""
    model = load_model(make_tiny_model(tmp_path), max_model_len=512)
    sequences = [(random_ids(n, n), random_ids(4, n + 1)) for n in (3, 290, 5, 120, 64)]
    options: dict[str, Any] = {"chunk_tokens": 50, "num_blocks": 150}
    together = paged_logits(model, sequences, **options)
    for sequence, logits in zip(sequences, together, strict=True):
        (alone,) = paged_logits(model, [sequence], **options)
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)


def test_bfloat16_is_near_transformers(tmp_path: Path) -> None:
    """bf16 rounds in another order inside attention: near, not equal."""
    model_dir = make_tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16)
    prompt = random_ids(40, 5)
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0].float()
    model = load_model(model_dir, dtype=torch.bfloat16)
    (actual,) = paged_logits(model, [(prompt[:36], prompt[36:])], chunk_tokens=16)
    assert (actual - expected).abs().mean() < 0.05 * expected.std()
