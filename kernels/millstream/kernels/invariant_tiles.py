"""Tiles of linear.py's kernel that give a row of x the same bits whatever the other rows are.

An element of the output is one chain of multiply-adds over K in ascending order, in the accumulator
of a Hopper wgmma whose K is 16: no K split over programs, no other instruction (tiles of 64 rows
and more, 4 or 8 warps), no matrix-vector product. How many rows and columns a tile has changes
which elements are computed side by side, not the chain of one;
tests/kernels/test_batch_invariance.py compares the bits on a GPU. Every shape whose dimensions are
multiples of 16 has its tiles.
"""

from __future__ import annotations

from millstream.kernels.linear_configs import Tile, fits

_FEW_ROWS, _SOME_ROWS = 128, 512
_MAX_ELEMENTS = 1 << 31  # of x and of the output: 32-bit offsets


def invariant_tile(num_rows: int, out_features: int, in_features: int) -> Tile | None:
    """The tile for x [num_rows, in_features], weight [out_features, in_features]; None: it has
    none. For SwiGLU out_features counts gate and up."""
    wide, deep = _divisor(out_features), _divisor(in_features)
    if num_rows <= _FEW_ROWS:
        block_n = min(wide, _columns_for_few_rows(out_features))
        tile = Tile(block_m=64, block_n=block_n, block_k=deep, stages=4)
    elif num_rows <= _SOME_ROWS:
        block_n = min(wide, 64 if out_features >= 4096 else 32)
        tile = Tile(block_m=128, block_n=block_n, block_k=deep, stages=4)
    else:
        tile = Tile(block_m=128, block_n=wide, block_k=min(deep, 64), num_warps=8, stages=4)
    fitting = min(wide, deep) >= 16 and fits(tile, num_rows, out_features, in_features)
    return tile if fitting and num_rows * max(out_features, in_features) < _MAX_ELEMENTS else None


def _columns_for_few_rows(out_features: int) -> int:
    """Programs enough for a GPU's multiprocessors, but no more reading of x than that takes."""
    for at_least, columns in ((16384, 128), (6144, 64), (2048, 32)):
        if out_features >= at_least:
            return columns
    return 16


def _divisor(size: int) -> int:
    """The largest power of two in a dimension, up to 128."""
    return min(size & -size, 128)
