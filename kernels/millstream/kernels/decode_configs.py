"""Which shapes the attention kernels have, and how decode goes about each of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

MAX_GROUP = 16  # query heads of one KV head: they fill one side of a tensor core's tile
HEAD_DIMS = (16, 32, 64, 128)
BLOCK_SIZES = (16, 32, 64, 128, 256)
_FEW_SEQUENCES, _MANY_SEQUENCES = 4, 1 << 20


def supports(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> bool:
    """Whether the attention kernels, of decode and prefill, have this shape."""
    group, rest = divmod(num_heads, num_kv_heads)
    shapes = head_dim in HEAD_DIMS and block_size in BLOCK_SIZES
    return rest == 0 and group <= MAX_GROUP and shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """How a program works through its item, and how many items there are to be."""

    tile: int  # tokens taken at once
    num_warps: int
    num_stages: int  # tiles under way
    tokens_are_rows: bool  # scores are K.Q^T (tile x 16), not Q.K^T (16 x tile)
    tail_apart: bool  # the last tile has a loop of its own, so that the others need no masks
    max_registers: int | None = None
    items_per_multiprocessor: int = 4  # and one more for each sequence and KV head
    least_share: int = 1  # tokens of an item that is not worth a cut; a tile is none in any case


# Of these programs a multiprocessor holds two, four and three: which is best follows from how well
# a step's items fill up their last round.
_WIDE = DecodeConfig(
    tile=64,
    num_warps=4,
    num_stages=3,
    tokens_are_rows=True,
    tail_apart=False,
    max_registers=128,
    items_per_multiprocessor=2,
    least_share=256,
)
_TWO_STAGES = DecodeConfig(
    tile=64, num_warps=2, num_stages=2, tokens_are_rows=False, tail_apart=True, least_share=256
)
_THREE_STAGES = replace(_TWO_STAGES, num_stages=3, items_per_multiprocessor=3)
# (up to so many pairs of a sequence and a KV head, configuration), for heads of 128; measured with
# 8 KV heads and two query heads for each, in whole runs (decisions/0017).
_BY_PAIRS = (
    (8 * 48, _THREE_STAGES),
    (8 * 64, _WIDE),
    (8 * 80, _THREE_STAGES),
    (8 * 96, _WIDE),
    (8 * 128, _TWO_STAGES),
    (8 * 160, _THREE_STAGES),
    (8 * 200, _TWO_STAGES),
    (math.inf, _THREE_STAGES),
)
# So few pairs are worth all the cuts that keep programs busy.
_FEW_PAIRS = 8 * 4
_FEW_OF_TWO = replace(_WIDE, least_share=1)  # two query heads a KV head or one
_MASKED = DecodeConfig(  # more; and heads of other sizes, with as many registers as they like
    tile=64,
    num_warps=4,
    num_stages=2,
    tokens_are_rows=False,
    tail_apart=False,
    max_registers=128,
    items_per_multiprocessor=2,
)


def choose_config(
    batch: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> DecodeConfig:
    """The configuration for up to `batch` sequences (measured: tests/bench/attention.py; heads of
    128 by tests/bench/whole_runs.py)."""
    if dtype.itemsize > 2:
        return DecodeConfig(
            tile=32, num_warps=4, num_stages=2, tokens_are_rows=False, tail_apart=False
        )
    if head_dim == 128:
        pairs = batch * num_kv_heads
        if pairs <= _FEW_PAIRS:
            return _FEW_OF_TWO if num_heads <= 2 * num_kv_heads else _MASKED
        return next(config for most, config in _BY_PAIRS if pairs <= most)
    # A few sequences are cut into as many items as run at once: more cost but combining.
    items = 2 if batch <= _FEW_SEQUENCES else 4
    return replace(_MASKED, max_registers=None, items_per_multiprocessor=items)


def invariant_config(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> DecodeConfig:
    """One configuration for all batches: that of large ones, for a program that repeats."""
    return choose_config(_MANY_SEQUENCES, num_heads, num_kv_heads, head_dim, dtype)
