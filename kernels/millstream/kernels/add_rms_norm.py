"""RMSNorm, with the residual added in the same pass or without: a row per program, in registers.

The unfused pair reads and writes the hidden states four times; add_rms_norm reads both inputs once
and writes both outputs once. Oracles and rounding: reference.add_rms_norm, reference.rms_norm. The
layout of a row depends on its length only, so a row's result does not depend on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from millstream.kernels import pdl
from millstream.kernels.boxes import padded
from millstream.kernels.pdl import launch_dependents, wait

MAX_HIDDEN = 32768  # a row must fit one program's registers
# 8 per thread: one 16-byte load of 16-bit values, all of a decode's short rows in flight at once.
_ELEMENTS_PER_WARP = 256
_MAX_WARPS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    out_stride: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    # 64-bit, since row * stride passes 2^31 at 262,144 tokens of 8192.
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    dtype = out_ptr.dtype.element_ty

    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    wait(PDL)
    wide = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        residual = residual_ptr + row * residual_stride + column
        total = (wide + tl.load(residual, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(residual, total, mask=inside)
        wide = total.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=0) / HIDDEN
    normed = (wide * tl.rsqrt(mean_square + eps)).to(dtype)
    out = (weight.to(tl.float32) * normed.to(tl.float32)).to(dtype)
    tl.store(out_ptr + row * out_stride + column, out, mask=inside)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Adds x to residual in place and returns RMSNorm(residual) * weight as a new tensor.

    x, residual: [num_tokens, hidden], rows of unit stride and any distance; weight: [hidden],
    contiguous; all of one floating-point dtype on one device. Raises ValueError otherwise.
    """
    _check(x, residual, weight)
    return _launch(x, residual, weight, eps, add=True)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns RMSNorm(x) * weight as a new tensor; as add_rms_norm, but nothing is added."""
    _check(x, x, weight)
    return _launch(x, x, weight, eps, add=False)


def _launch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, add: bool
) -> torch.Tensor:
    num_tokens, hidden = x.shape
    out = padded(num_tokens, hidden, like=x)
    if num_tokens:
        block = triton.next_power_of_2(hidden)
        _rms_norm_kernel[(num_tokens,)](
            x,
            residual,
            weight,
            out,
            x.stride(0),
            residual.stride(0),
            out.stride(0),
            eps,
            HIDDEN=hidden,
            BLOCK=block,
            ADD=add,
            num_warps=min(max(block // _ELEMENTS_PER_WARP, 1), _MAX_WARPS),
            **pdl.options(x.device),
        )
    return out


def _check(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    if x.dim() != 2 or x.shape != residual.shape or weight.shape != x.shape[1:]:
        shapes = [tuple(tensor.shape) for tensor in (x, residual, weight)]
        raise ValueError(f"x, residual, weight have shapes {shapes}, not [n, h], [n, h], [h]")
    if not 0 < x.shape[1] <= MAX_HIDDEN:
        raise ValueError(f"hidden is {x.shape[1]}, must be in 1..{MAX_HIDDEN}")
    if not x.is_floating_point() or not x.dtype == residual.dtype == weight.dtype:
        raise ValueError(f"dtypes differ: {x.dtype}, {residual.dtype}, {weight.dtype}")
    if not x.device == residual.device == weight.device:
        raise ValueError(f"devices differ: {x.device}, {residual.device}, {weight.device}")
    if any(tensor.stride(-1) != 1 for tensor in (x, residual, weight)):
        raise ValueError("x, residual and weight must have unit stride along hidden")
