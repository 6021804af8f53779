"""Boxes: tiles of a tensor that the GPU's copy engine loads (tensor descriptors, from Hopper on).

It loads a box that lies within its tensor at the memory's speed; a box that ends outside is filled
up with zeros, and on Hopper that costs a product of 72 rows a third more than one of 128
(docs/performance.md). So what products multiply has memory for whole tiles; what lies there is any
numbers, and goes to output rows that are not stored.
"""

from __future__ import annotations

import torch

from millstream.kernels import pdl

_ROWS = 128  # no product's tile has more


def are_copied(device: torch.device) -> bool:
    """Whether boxes are the copy engine's. Elsewhere a kernel computes the same, but its loop waits
    for each tile: only Triton's interpreter has nothing faster."""
    return device.type != "cuda" or pdl.is_supported(device)  # the same GPUs have both


def padded(num_rows: int, *row: int, like: torch.Tensor) -> torch.Tensor:
    """An uninitialized [num_rows, *row] with memory for a multiple of 128 rows."""
    return like.new_empty((-(-num_rows // _ROWS) * _ROWS, *row))[:num_rows]


def whole_tiles(x: torch.Tensor, block_m: int) -> torch.Tensor:
    """x [M, K] with the rows up to a multiple of block_m, as far as there is memory for them."""
    (num_rows, depth), stride = x.shape, x.stride(0)
    elements = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    there = (elements - depth) // stride + 1
    return x.as_strided((min(-(-num_rows // block_m) * block_m, there), depth), x.stride())
