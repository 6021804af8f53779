"""Sampling from parts of the vocabulary against sampling from all of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.sampled_rows import BLOCK, kernel_rows

from millstream.engine import sampling
from millstream.engine.parallel import vocab_spans
from millstream.engine.ranks.shard_sampling import best_of_shard, best_of_shards
from millstream.engine.sampling import SamplingRows, vocab_block
from millstream.kernels import sample_shards
from millstream.kernels.sample import sample

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TEMPERATURES = torch.tensor([0.0, 0.6, 1.0, 0.0, 1.9, 0.01, 1.3, 0.8])
SEEDS = torch.tensor([1, 2, -3, 4, 5, 2**62, 7, 8])
POSITIONS = torch.tensor([0, 5, 77, 40_000, 9, 131_071, 3, 4])


def logits_of(vocab: int, seed: int, scale: float = 3) -> torch.Tensor:
    return scale * torch.randn(8, vocab, generator=torch.Generator().manual_seed(seed))


def rows_of(temperatures: torch.Tensor) -> SamplingRows:
    random = (temperatures > 0).nonzero()[:, 0]
    return SamplingRows(random=random, temperatures=temperatures[random], seeds=SEEDS[random])


@pytest.mark.parametrize("vocab", [64, 251, 5003])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scale", [0.1, 3, 30])  # many tokens can win, or few
def test_equals_whole_rows(vocab: int, ranks: int, seed: int, scale: float) -> None:
    logits, rows = logits_of(vocab, seed, scale), rows_of(TEMPERATURES)
    shards = [
        best_of_shard(
            logits[:, span.start : span.stop], POSITIONS, rows, span.start, vocab_block(vocab)
        )
        for span in vocab_spans(vocab, ranks)
    ]
    got = best_of_shards(torch.stack(shards), TEMPERATURES)
    assert torch.equal(got, sampling.sample(logits.clone(), POSITIONS, rows))


def test_equal_logits_go_to_the_lowest_id() -> None:
    logits = torch.zeros(1, 96)
    greedy = sampling.ALL_GREEDY
    for id_pair in ((3, 90), (50, 60), (40, 41)):
        row = logits.clone()
        row[:, list(id_pair)] = 1.0
        shards = [
            best_of_shard(row[:, span.start : span.stop], POSITIONS[:1], greedy, span.start, 16)
            for span in vocab_spans(96, 3)
        ]
        assert best_of_shards(torch.stack(shards), torch.zeros(1)).tolist() == [id_pair[0]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("vocab", "ranks"), [(64, 2), (5003, 2), (9001, 3)])
def test_kernels_equal_the_oracle(device: str, dtype: torch.dtype, vocab: int, ranks: int) -> None:
    """Rows in another order than slots; one vocabulary has parts of several blocks each."""
    logits = logits_of(vocab, 1).to(device, dtype)
    slots = torch.tensor([3, 0, 7, 1, 6, 2, 5, 4], device=device)
    temperatures, seeds = TEMPERATURES.to(device), SEEDS.to(device)
    positions = POSITIONS.to(device)
    shards, expected = [], []
    random = (TEMPERATURES[slots.cpu()] > 0).nonzero()[:, 0]
    rows = SamplingRows(
        random=random,
        temperatures=TEMPERATURES[slots.cpu()][random],
        seeds=SEEDS[slots.cpu()][random],
    )
    block_size = vocab_block(vocab)
    whole = kernel_rows(logits, slots, positions, temperatures, seeds, block_size=block_size)
    for span in vocab_spans(vocab, ranks):
        shard = logits[:, span.start : span.stop]
        best = sample_shards.best_of_shard(replace(whole, logits=shard), first_id=span.start)
        oracle = best_of_shard(shard.float().cpu(), POSITIONS, rows, span.start, block_size)
        torch.testing.assert_close(best.cpu(), oracle, rtol=1e-5, atol=1e-4)
        shards.append(best)
        expected.append(oracle)
    got = sample_shards.best_of_shards(torch.stack(shards), slots, temperatures, vocab_size=vocab)
    assert torch.equal(got.cpu(), best_of_shards(torch.stack(expected), TEMPERATURES[slots.cpu()]))
    assert torch.equal(got, sample(whole))


def test_bad_parts_are_refused() -> None:
    rows = kernel_rows(logits_of(64, 1), POSITIONS, POSITIONS, TEMPERATURES, SEEDS)
    for first_id in (BLOCK - 1, 2**24):
        with pytest.raises(ValueError, match=f"ids from {first_id} to {first_id + 64}"):
            sample_shards.best_of_shard(rows, first_id=first_id)
    with pytest.raises(ValueError, match="thresholds"):
        sample_shards.best_of_shard(replace(rows, thresholds=TEMPERATURES), first_id=BLOCK)
