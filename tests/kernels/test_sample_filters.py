"""thresholds against the engine's sampler: in Triton's interpreter, natively with -m gpu."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.sampled_rows import kernel_rows

from millstream.engine import sampling
from millstream.kernels.sample import sample
from millstream.kernels.sample_filters import thresholds

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

pytestmark = pytest.mark.parametrize("device", DEVICES)


def logits_of(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def found(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> torch.Tensor:
    """The thresholds of rows that all sample alike."""
    device = logits.device
    return thresholds(
        logits,
        torch.zeros(len(logits), dtype=torch.int64, device=device),
        torch.tensor([temperature], device=device),
        torch.tensor([top_k], device=device),
        torch.tensor([top_p], device=device),
        torch.tensor([min_p], device=device),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("top_k", [1, 2, 50, 999, 1000])
def test_top_k_keeps_the_kth_largest_and_its_ties(
    device: str, dtype: torch.dtype, top_k: int
) -> None:
    logits = logits_of(3, 1000).to(device, dtype)
    kept = logits >= found(logits, top_k=top_k)[:, None]
    expected = logits.float().topk(top_k, dim=1).values[:, -1:]
    assert torch.equal(kept, logits >= expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_top_p_is_the_engines(
    device: str, dtype: torch.dtype, top_p: float, temperature: float
) -> None:
    logits = logits_of(3, 700).to(device, dtype)
    kept = logits >= found(logits, temperature=temperature, top_p=top_p)[:, None]
    scaled = logits.float() / temperature
    limit = sampling.top_p_threshold(scaled, torch.full((3,), top_p, device=device))
    assert torch.equal(kept, scaled >= limit[:, None])


def test_top_p_keeps_the_token_that_crosses(device: str) -> None:
    logits = torch.tensor([[0.15, 0.5, 0.05, 0.3]], device=device).log()
    for top_p, kept in ((0.01, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.96, 4)):
        assert int((logits >= found(logits, top_p=top_p)[:, None]).sum()) == kept


def test_min_p(device: str) -> None:
    logits = logits_of(2, 500).to(device)
    limit = found(logits, temperature=0.8, min_p=0.05)
    expected = logits.amax(1) + 0.8 * torch.tensor(0.05, device=device).log()
    torch.testing.assert_close(limit, expected)


def test_all_filters_in_a_mixed_batch_sample_as_the_engine_does(device: str) -> None:
    """And rows without a filter, or greedy ones, have no threshold."""
    rows = 8
    logits = logits_of(rows, 900, seed=4).to(device)
    temperatures = torch.tensor([0.6, 1.0, 1.5, 0.9, 2.0, 0.7, 1.0, 0.0], device=device)
    top_k = torch.tensor([0, 3, 50, 0, 900, 1, 0, 5], device=device)
    top_p = torch.tensor([1.0, 1.0, 0.9, 0.5, 0.95, 1.0, 1.0, 0.5], device=device)
    min_p = torch.tensor([0.0, 0.0, 0.05, 0.0, 0.02, 0.0, 0.3, 0.5], device=device)
    seeds = torch.arange(rows, device=device) + 2**40
    slots = torch.arange(rows, device=device)
    limits = thresholds(logits, slots, temperatures, top_k, top_p, min_p)
    assert limits.isinf().tolist() == [True, *[False] * 6, True]
    random = slots[:7]
    with_k, with_p = (top_k[:7] > 0).nonzero()[:, 0], (top_p[:7] < 1).nonzero()[:, 0]
    engine_rows = sampling.SamplingRows(
        random=random,
        temperatures=temperatures[:7],
        seeds=seeds[:7],
        top_k_rows=with_k,
        top_k=top_k[with_k],
        max_top_k=900,
        top_p_rows=with_p,
        top_p=top_p[with_p],
        min_p=min_p[:7],
    )
    block_size = sampling.vocab_block(900)
    for step in range(5):
        positions = slots * 9 + step
        rows = kernel_rows(logits, slots, positions, temperatures, seeds, block_size=block_size)
        got = sample(replace(rows, thresholds=limits))
        assert torch.equal(got, sampling.sample(logits.clone(), positions, engine_rows))


def test_rows_of_equal_or_impossible_logits(device: str) -> None:
    logits = torch.zeros(4, 300, device=device)
    logits[1] = float("-inf")
    logits[1, 7] = 1.0
    logits[2] = float("-inf")
    logits[3] = float("nan")
    limits = found(logits, top_k=5, top_p=0.5, min_p=0.5)
    assert (logits[0] >= limits[0]).all()  # all are tied
    assert (logits[1] >= limits[1]).nonzero()[:, 0].tolist() == [7]


@pytest.mark.parametrize("temperature", [1e-5, 1e-2])
def test_row_52_tiny_temperatures(device: str, temperature: float) -> None:
    logits = logits_of(1, 64, scale=1e3).to(device)
    logits[0, 17] = logits.max() + 2
    limits = found(logits, temperature=temperature, top_p=0.5, top_k=3, min_p=0.1)
    assert (logits[0] >= limits[0]).nonzero()[:, 0].tolist() == [17]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sizes_of_real_models(device: str, dtype: torch.dtype) -> None:
    if device == "cpu":
        pytest.skip("too much for the interpreter")
    logits = logits_of(64, 151_936).to(device, dtype)
    wide = logits.float()
    for top_k in (1, 50, 100_000):
        kept = wide >= found(logits, top_k=top_k)[:, None]
        assert torch.equal(kept, wide >= wide.topk(top_k, dim=1).values[:, -1:])
    for top_p in (0.1, 0.9, 0.99):
        # In bfloat16 many tokens tie at the edge, all of them in or out: what counts is the mass.
        limits = found(logits, temperature=0.6, top_p=top_p)[:, None]
        masses = (wide.double() / 0.6).softmax(1)
        assert (masses.where(wide >= limits, 0).sum(1) >= top_p - 1e-5).all()
        edge = wide.where(wide >= limits, torch.inf).amin(1, keepdim=True)
        assert (masses.where(wide > edge, 0).sum(1) <= top_p + 1e-5).all()


def test_bad_inputs_are_refused(device: str) -> None:
    logits = torch.zeros(2, 8, device=device)
    slots = torch.zeros(2, dtype=torch.int64, device=device)
    table, top_k = torch.ones(3, device=device), torch.ones(3, dtype=torch.int64, device=device)
    assert thresholds(logits[:0], slots[:0], table, top_k, table, table).shape == (0,)
    cases = [
        ((logits[0], slots, table, top_k, table, table), "logits"),
        ((logits.double(), slots, table, top_k, table, table), "float64"),
        ((logits, slots[:1], table, top_k, table, table), "one per row"),
        ((logits, slots, table, table, table, table), "not integers"),
        ((logits, slots, table, top_k, table.double(), table), "float32"),
        ((logits, slots, table, top_k, table[:1], table), r"\[slots\]"),
    ]
    for arguments, says in cases:
        with pytest.raises(ValueError, match=says):
            thresholds(*arguments)
