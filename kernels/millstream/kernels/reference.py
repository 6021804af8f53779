"""Torch oracles: what each kernel computes, and where it rounds, said as plainly as can be."""

from __future__ import annotations

import torch


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMSNorm(x + residual) * weight, x + residual), rounded where Hugging Face's Llama rounds.

    The sum is rounded to the model's dtype, since it is the residual stream; the norm is computed
    in float32 from the rounded sum and rounded before the weight multiplies it.
    """
    total = x + residual
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(total.dtype), total
