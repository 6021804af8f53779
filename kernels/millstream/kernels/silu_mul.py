"""SwiGLU: silu(gate) * up over the packed output of the gate_up projection.

Reads each input once and writes the output once. Oracle and rounding: reference.silu_mul.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from millstream.kernels import pdl
from millstream.kernels.pdl import launch_dependents, wait

# Columns per program and warps: a 16-byte load of gate and one of up per thread.
_BLOCK = 1024
_NUM_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    gate_up_stride: tl.tensor,
    out_stride: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    dtype = out_ptr.dtype.element_ty
    gate_ptr = gate_up_ptr + row * gate_up_stride + column

    wait(PDL)
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + SIZE, mask=inside, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype)
    out = (activated.to(tl.float32) * up).to(dtype)
    tl.store(out_ptr + row * out_stride + column, out, mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up as a new tensor [num_tokens, size].

    gate_up: [num_tokens, 2 * size] floating-point, gate first, then up; rows of unit stride and any
    distance. Raises ValueError otherwise.
    """
    _check(gate_up)
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        _silu_mul_kernel[(num_tokens, triton.cdiv(size, _BLOCK))](
            gate_up,
            out,
            gate_up.stride(0),
            out.stride(0),
            SIZE=size,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
            **pdl.options(gate_up.device),
        )
    return out


def _check(gate_up: torch.Tensor) -> None:
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or not gate_up.shape[1]:
        raise ValueError(f"gate_up has shape {tuple(gate_up.shape)}, not [n, 2 * size]")
    if not gate_up.is_floating_point():
        raise ValueError(f"gate_up is {gate_up.dtype}, not floating-point")
    if gate_up.stride(1) != 1:
        raise ValueError("gate_up must have unit stride along its columns")
