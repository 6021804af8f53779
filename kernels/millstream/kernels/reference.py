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
    return rms_norm(total, weight, eps), total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As add_rms_norm, of x alone."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [n, 2 * size]; silu in float32, rounded before up multiplies it."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    return (wide / (1 + torch.exp(-wide))).to(gate.dtype) * up


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    swiglu: bool = False,
) -> torch.Tensor:
    """x W^T [M, N], summed in float64 and rounded to x's dtype; then + residual, or silu_mul."""
    product = (x.double() @ weight.double().T).to(x.dtype)
    if swiglu:
        return silu_mul(product)
    return product if residual is None else product + residual
