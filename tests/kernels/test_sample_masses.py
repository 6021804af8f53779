"""block_masses against the engine's: on the CPU in Triton's interpreter, natively with -m gpu."""

from __future__ import annotations

import pytest
import torch

from millstream.engine import sampling
from millstream.kernels.sample_masses import block_masses

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TEMPERATURES = [0.0, 0.6, 1e-5, 1.7]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("vocab", "block_size"), [(40, 16), (1000, 128), (9000, 1024), (5000, 2048)]
)
def test_equals_the_engines(device: str, dtype: torch.dtype, vocab: int, block_size: int) -> None:
    """Also where a threshold empties blocks."""
    generator = torch.Generator().manual_seed(vocab)
    rows = len(TEMPERATURES)
    logits = (torch.randn(rows, vocab, generator=generator) * 4).to(device, dtype)
    slots = torch.tensor([2, 0, 3, 1], device=device)
    temperatures = torch.tensor(TEMPERATURES, device=device)
    for thresholds in (None, logits.float().amax(dim=1) - 2):
        masses = block_masses(logits, slots, temperatures, thresholds, block_size)
        cut = logits.float()
        if thresholds is not None:
            cut = cut.masked_fill(cut < thresholds[:, None], -torch.inf)
        own = temperatures[slots]
        random = own > 0
        blocks = sampling._in_blocks(cut, block_size)
        largest, log_sums = sampling.block_masses(blocks, torch.where(random, own, 1.0))
        assert torch.equal(masses[0], largest)
        torch.testing.assert_close(masses[1][random], log_sums[random], atol=1e-5, rtol=1e-5)
