"""The mass of each block of a row of logits, which sampling (sample.py) chooses a block by.

The logits are read once. A program is one warp and takes one tile of a row: on an H200 it was 7 to
28 times slower with more warps, and up to twice as slow with more tiles one after the other.
Oracle: the engine's sampling.block_masses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from millstream.kernels import pdl
from millstream.kernels.pdl import launch_dependents, wait

LARGEST_BLOCK = 2048  # and what a program takes
_BYTES_PER_WARP = 32 * 16  # of one load


@triton.jit  # type: ignore[untyped-decorator]
def _masses_kernel(
    logits_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    thresholds_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    log_sum_ptr: tl.tensor,
    logits_stride: tl.tensor,
    temperatures_stride: tl.tensor,
    width: tl.tensor,
    num_blocks: tl.tensor,
    HAS_THRESHOLDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Per block of a row: its largest logit and, of a random row, the logarithm of its sum of
    exp((logit - largest) / temperature). Of a block of -inf: -inf, 0."""
    launch_dependents(PDL)
    row = tl.program_id(1).to(tl.int64)
    #  [piece of a block, block, logit of a piece]: a piece is the warp's load
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    piece = tl.arange(0, BLOCK // PIECE) * PIECE
    first = block[None, :, None] * BLOCK + piece[:, None, None]
    column = first + tl.arange(0, PIECE)[None, None, :]
    wait(PDL)
    temperature = tl.load(
        temperatures_ptr + tl.load(slots_ptr + row).to(tl.int64) * temperatures_stride
    )
    logits = tl.load(
        logits_ptr + row * logits_stride + column, mask=column < width, other=float("-inf")
    ).to(tl.float32)
    if HAS_THRESHOLDS:
        logits = tl.where(logits >= tl.load(thresholds_ptr + row), logits, float("-inf"))
    largest = tl.max(tl.max(logits, axis=0), axis=1)
    at = row * num_blocks + block
    tl.store(largest_ptr + at, largest, mask=block < num_blocks)
    if temperature > 0:
        below = logits - finite(largest)[None, :, None]
        powers = tl.exp2(below * (1.4426950408889634 / temperature))
        log_sum = tl.log(tl.maximum(tl.sum(tl.sum(powers, axis=0), axis=1), 1.0))
        tl.store(log_sum_ptr + at, log_sum, mask=block < num_blocks)


@triton.jit  # type: ignore[untyped-decorator]
def finite(largest: tl.tensor) -> tl.tensor:
    """What a block's logits can be taken relative to: not -inf, since -inf - -inf is no number."""
    return tl.maximum(largest, -3.4028234663852886e38)


def block_masses(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperatures: torch.Tensor,
    thresholds: torch.Tensor | None,
    block_size: int,
) -> torch.Tensor:
    """[2, R, blocks] float32 of logits [R, V], at least one row: each block's largest logit, and of
    a random row the logarithm of its sum of exp((logit - largest) / temperature).

    Arguments as in sample.sample, which has checked them; block_size: at most LARGEST_BLOCK.
    """
    num_rows, width = logits.shape
    num_blocks = triton.cdiv(width, block_size)
    masses = torch.empty(2, num_rows, num_blocks, device=logits.device)
    blocks = LARGEST_BLOCK // block_size
    _masses_kernel[(triton.cdiv(num_blocks, blocks), num_rows)](
        logits,
        slots,
        temperatures,
        thresholds,
        masses[0],
        masses[1],
        logits.stride(0),
        temperatures.stride(0),
        width,
        num_blocks,
        HAS_THRESHOLDS=thresholds is not None,
        BLOCKS=blocks,
        BLOCK=block_size,
        PIECE=min(block_size, _BYTES_PER_WARP // logits.itemsize),
        num_warps=1,
        **pdl.options(logits.device),
    )
    return masses
