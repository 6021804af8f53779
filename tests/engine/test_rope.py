"""Frequencies, cos and sin equal transformers' for each type of scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from millstream.engine.batch import ForwardBatch
from millstream.engine.model_files.model_config import parse_model_config
from millstream.engine.rope import RotaryEmbedding, inverse_frequencies, rotate

HEAD_DIM = 16
CPU = torch.device("cpu")

ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 1.7},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "factor": 0.5},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.2},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 3.0, "beta_slow": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 256,
    },
]


def raw_config(rope: dict[str, Any], theta: float) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "rope_parameters": {**rope, "rope_theta": theta},
    }


def batch_at(positions: list[int], rope_lens: list[int] | None = None) -> ForwardBatch:
    empty = torch.empty(0, dtype=torch.int64)
    return ForwardBatch(
        token_ids=empty,
        positions=torch.tensor(positions),
        kv_indices=empty,
        query_starts=empty,
        context_lens=empty,
        block_tables=empty,
        slots=empty,
        sample_rows=empty,
        num_decodes=0,
        query_lens=(),
        contexts=(),
        rope_lens=None if rope_lens is None else torch.tensor(rope_lens),
    )


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_row_39_frequencies_equal_transformers(rope: dict[str, Any], theta: float) -> None:
    raw = raw_config(rope, theta)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**raw))
    inv_freq, factor = inverse_frequencies(parse_model_config(raw).rope, HEAD_DIM)
    torch.testing.assert_close(inv_freq, theirs.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_row_39_rotation_equals_transformers(rope: dict[str, Any], dtype: torch.dtype) -> None:
    raw = raw_config(rope, 10000.0)
    positions = [0, 1, 100, 2047, 5000]
    heads = torch.randn(5, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0)).to(dtype)

    embedding = RotaryEmbedding(
        parse_model_config(raw).rope, HEAD_DIM, max_model_len=5001, dtype=dtype, device=CPU
    )
    ours = rotate(
        heads, *embedding.cos_sin(batch_at(positions, [5001] * 5))
    )  # one forward of 5001 tokens

    cos, sin = LlamaRotaryEmbedding(LlamaConfig(**raw))(heads, torch.tensor([positions]))
    batched = heads.transpose(0, 1)[None]
    theirs, _ = apply_rotary_pos_emb(batched, batched, cos, sin)
    # float32 angles around 5000 are 5e-4 apart, so a last-bit difference of a frequency shows
    tolerance = 2e-3 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(ours, theirs[0].transpose(0, 1), atol=tolerance, rtol=tolerance)
    if rope["rope_type"] != "dynamic":
        assert torch.equal(ours[:3], theirs[0].transpose(0, 1)[:3])


def test_row_78_table_has_the_effective_limit_and_not_the_config_one() -> None:
    rope = parse_model_config(raw_config({"rope_type": "default"}, 10000.0)).rope
    embedding = RotaryEmbedding(rope, HEAD_DIM, max_model_len=3000, dtype=torch.float32, device=CPU)
    cos, sin = embedding.cos_sin(batch_at([2999]))
    assert cos.shape == sin.shape == (1, 1, HEAD_DIM)
    with pytest.raises(IndexError):
        embedding.cos_sin(batch_at([3000]))


def test_dynamic_rotation_depends_on_a_tokens_own_length_only() -> None:
    rope = parse_model_config(raw_config({"rope_type": "dynamic", "factor": 2.0}, 10000.0)).rope
    embedding = RotaryEmbedding(rope, HEAD_DIM, max_model_len=4096, dtype=torch.float32, device=CPU)
    alone = embedding.cos_sin(batch_at([7], [3000]))
    together = embedding.cos_sin(batch_at([7, 7, 4000], [3000, 8, 4001]))
    for one, many in zip(alone, together, strict=True):
        assert torch.equal(one[0], many[0])
        assert not torch.equal(many[0], many[1])
    # Within the original limit no length changes anything, and a missing one is position + 1.
    for lengths in ([8], [2048], None):
        torch.testing.assert_close(embedding.cos_sin(batch_at([7], lengths))[0][0], together[0][1])
