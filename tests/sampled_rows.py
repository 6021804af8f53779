"""What the sampling kernels take, for tests and benches."""

from __future__ import annotations

import torch

from millstream.kernels.sample import Rows

BLOCK = 256


def kernel_rows(*tensors: torch.Tensor, block_size: int = BLOCK) -> Rows:
    """Of logits, slots, positions, temperatures and seeds."""
    logits, slots, positions, temperatures, seeds = tensors
    by_row = {"logits": logits, "slots": slots, "positions": positions}
    return Rows(**by_row, temperatures=temperatures, seeds=seeds, block_size=block_size)
