"""One row of x: x W^T without tensor cores, a few outputs per program; linear.py launches it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from millstream.kernels import pdl
from millstream.kernels.linear_configs import Gemv
from millstream.kernels.pdl import launch_dependents, wait

# The epilogues; kernels have them as literals.
PLAIN, RESIDUAL, SWIGLU = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """An RMSNorm before the product."""

    weight: torch.Tensor  # [K]
    eps: float


@triton.jit  # type: ignore[untyped-decorator]
def weight_rows(n: tl.tensor, N: tl.constexpr, EPILOGUE: tl.constexpr) -> tl.tensor:
    """The weight's rows that make columns n: gate and up of an output side by side for SwiGLU."""
    return n // 2 + n % 2 * (N // 2) if EPILOGUE == 2 else n


@triton.jit  # type: ignore[untyped-decorator]
def swiglu_of(pairs: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """silu(gate) * up of [..., 2], rounding to dtype where separate kernels would."""
    gate, up = tl.split(pairs.to(dtype).to(tl.float32))
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (activated * up).to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _x_chunk(
    x: tl.tensor, scale: tl.tensor, rstd: tl.tensor, NORM: tl.constexpr, dtype: tl.constexpr
) -> tl.tensor:
    """Loads [1, BLOCK_K] of x in float32; normed and scaled, it is rounded as rms_norm rounds."""
    chunk = tl.load(x).to(tl.float32)
    if NORM:
        normed = (chunk * rstd).to(dtype).to(tl.float32)
        chunk = (normed * scale.to(tl.float32)).to(dtype).to(tl.float32)
    return chunk[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _gemv_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    EPILOGUE: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """BLOCK_N outputs of one row of x; up to four chunks of their weights go to registers early.

    NORM: of RMSNorm(x) instead. Each program sums the row's squares for itself.
    """
    launch_dependents(PDL)
    CHUNKS: tl.constexpr = K // BLOCK_K
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x = x_ptr + k
    weights = weight_ptr + weight_rows(n, N, EPILOGUE)[:, None] * K + k[None, :]
    scales = norm_ptr + k if NORM else weight_ptr + k  # read for a norm only
    weight_0 = tl.load(weights)
    if CHUNKS > 1:
        weight_1 = tl.load(weights + BLOCK_K)
    if CHUNKS > 2:
        weight_2 = tl.load(weights + 2 * BLOCK_K)
    if CHUNKS > 3:
        weight_3 = tl.load(weights + 3 * BLOCK_K)
    scale = tl.load(scales)
    wait(PDL)
    if EPILOGUE == 1:
        residual = tl.load(residual_ptr + n)  # on its way while the products are summed
    rstd = 1.0
    if NORM:
        squares = tl.zeros([BLOCK_K], tl.float32)
        for start in range(0, K, BLOCK_K):
            chunk = tl.load(x + start).to(tl.float32)
            squares += chunk * chunk
        rstd = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    products = weight_0.to(tl.float32) * _x_chunk(x, scale, rstd, NORM, dtype)
    if CHUNKS > 1:
        scale = tl.load(scales + BLOCK_K)
        products += weight_1.to(tl.float32) * _x_chunk(x + BLOCK_K, scale, rstd, NORM, dtype)
    if CHUNKS > 2:
        scale = tl.load(scales + 2 * BLOCK_K)
        products += weight_2.to(tl.float32) * _x_chunk(x + 2 * BLOCK_K, scale, rstd, NORM, dtype)
    if CHUNKS > 3:
        scale = tl.load(scales + 3 * BLOCK_K)
        products += weight_3.to(tl.float32) * _x_chunk(x + 3 * BLOCK_K, scale, rstd, NORM, dtype)
    for start in range(4 * BLOCK_K, K, BLOCK_K):
        scale = tl.load(scales + start)
        chunk = _x_chunk(x + start, scale, rstd, NORM, dtype)
        products += tl.load(weights + start).to(tl.float32) * chunk
    sums = tl.sum(products, axis=1)
    if EPILOGUE == 2:
        column = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        tl.store(out_ptr + column, swiglu_of(tl.reshape(sums, (BLOCK_N // 2, 2)), dtype))
    else:
        out = sums.to(dtype)
        if EPILOGUE == 1:
            out = (out.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(out_ptr + n, out)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    config: Gemv,
    epilogue: int,
    residual: torch.Tensor | None,
    norm: Norm | None,
) -> None:
    """Writes out; linear.linear has checked everything."""
    size, depth = weight.shape
    _gemv_kernel[(size // config.block_n,)](
        x,
        weight,
        residual,
        None if norm is None else norm.weight,
        out,
        0.0 if norm is None else norm.eps,
        N=size,
        K=depth,
        EPILOGUE=epilogue,
        NORM=norm is not None,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        **pdl.options(x.device),
    )
