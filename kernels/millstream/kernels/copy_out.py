"""A few numbers into the host's memory, written by a kernel.

A copy engine takes a stream's turn from the kernels and gives it back: between two steps that costs
more than the copy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from millstream.kernels import pdl
from millstream.kernels.pdl import launch_dependents, wait

_BLOCK = 256


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _copy_out_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait(PDL)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < count), mask=at < count)


def copy_out(x: torch.Tensor, out: torch.Tensor) -> None:
    """Queues a copy of x [n] into out [n], pinned memory of the host or x's own device's: there
    when an event behind it has come. Contiguous, of one dtype; raises ValueError otherwise."""
    if x.dim() != 1 or x.shape != out.shape or x.dtype != out.dtype:
        shapes = tuple(x.shape), tuple(out.shape)
        raise ValueError(f"x and out must be alike: {shapes[0]} {x.dtype}, {shapes[1]} {out.dtype}")
    if not x.is_contiguous() or not out.is_contiguous():
        raise ValueError("x and out must be contiguous")
    if x.is_cuda and not (out.is_cuda or out.is_pinned()):
        raise ValueError("out must be pinned")
    if len(x):
        _copy_out_kernel[(triton.cdiv(len(x), _BLOCK),)](
            x, out, len(x), BLOCK=_BLOCK, num_warps=4, **pdl.options(x.device)
        )
