"""TorchAttention against attention written out over a plain list of keys and values."""

from __future__ import annotations

import random

import pytest
import torch
from tests.paged import PagedBatches, PagedSequence

from millstream.engine.attention import TorchAttention, _similar_lengths
from millstream.engine.model_files.model_config import ModelConfig, parse_model_config


def config(num_heads: int, num_kv_heads: int, head_dim: int = 8) -> ModelConfig:
    return parse_model_config(
        {
            "model_type": "llama",
            "vocab_size": 32,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": 1024,
        }
    )


def naive(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[n, Hq, D] of the last n tokens of a sequence with keys and values [context, Hkv, D]."""
    queries, num_heads, head_dim = query.shape
    output = torch.empty_like(query)
    group = num_heads // keys.shape[1]
    for row in range(queries):
        seen = len(keys) - queries + row + 1
        for head in range(num_heads):
            scores = keys[:seen, head // group] @ query[row, head] / head_dim**0.5
            output[row, head] = scores.softmax(0) @ values[:seen, head // group]
    return output


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 2), (4, 1), (9, 3)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_random_steps_equal_the_naive_ones(heads: tuple[int, int], seed: int) -> None:
    """Random chunks and decodes of up to five sequences, contexts 1 to 200, both layers."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    shape = config(*heads)
    batches = PagedBatches(shape, num_blocks=300, block_size=4, seed=seed)
    sequences = [PagedSequence(prompt_len=rng.randint(1, 200)) for _ in range(5)]
    history = {
        (id(sequence), layer): torch.empty(2, 0, heads[1], 8)
        for sequence in sequences
        for layer in range(2)
    }
    for _ in range(8):
        chunks, decodes = [], []
        for sequence in rng.sample(sequences, rng.randint(1, 5)):
            left = sequence.prompt_len - sequence.num_computed
            if left > 0:
                chunks.append((sequence, [0] * rng.choice([1, left, rng.randint(1, left)])))
            else:
                decodes.append((sequence, 0))
        batch = batches.batch(chunks, decodes)
        attend = TorchAttention(batch, batches.kv_cache)
        order = [sequence for sequence, _ in [*chunks, *decodes]]
        for layer in range(2):
            num_tokens = len(batch.token_ids)
            query = torch.randn(num_tokens, heads[0], 8, generator=generator)
            key_value = torch.randn(2, num_tokens, heads[1], 8, generator=generator)
            actual = attend(layer, query, key_value[0], key_value[1])
            assert actual.shape == query.shape
            start = 0
            for sequence, length in zip(order, batch.query_lens, strict=True):
                rows = slice(start, start + length)
                past = history[id(sequence), layer]
                past = torch.cat((past, key_value[:, rows]), dim=1)
                history[id(sequence), layer] = past
                torch.testing.assert_close(
                    actual[rows], naive(query[rows], past[0], past[1]), atol=1e-5, rtol=1e-4
                )
                start += length


def test_inputs_may_be_slices_of_the_fused_projection() -> None:
    shape = config(4, 2)
    batches = PagedBatches(shape)
    batch = batches.batch([(PagedSequence(prompt_len=3), [0] * 3)])
    heads = torch.randn(3, 8, 8)
    attend = TorchAttention(batch, batches.kv_cache)
    actual = attend(0, heads[:, :4], heads[:, 4:6], heads[:, 6:])
    torch.testing.assert_close(actual, naive(heads[:, :4], heads[:, 4:6], heads[:, 6:]))


def test_decodes_of_very_different_lengths_are_grouped() -> None:
    contexts = [1000, 3, 900, 70, 500, 499, 100, 250]
    groups = _similar_lengths(contexts)
    assert sorted(index for group in groups for index in group) == list(range(8))
    for group in groups:
        longest = max(contexts[index] for index in group)
        assert all(2 * contexts[index] >= longest or longest <= 128 for index in group)
    assert groups == [[0, 2, 4], [5, 7], [1, 3, 6]]
    assert _similar_lengths([]) == []
    assert _similar_lengths([5, 5, 5]) == [[0, 1, 2]]
