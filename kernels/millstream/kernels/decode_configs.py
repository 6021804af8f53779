"""Which shapes the attention kernels have, and how decode goes about each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

MAX_GROUP = 16  # query heads of one KV head: they fill one side of a tensor core's tile
HEAD_DIMS = (16, 32, 64, 128)
BLOCK_SIZES = (16, 32, 64, 128, 256)
_FEW_SEQUENCES = 8
# As many shares as run at once, however short: what is left costs more than combining does.
_CUT_FINELY: dict[str, Any] = {"programs_per_multiprocessor": 2, "least_share": 64}


def supports(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> bool:
    """Whether the attention kernels, of decode and prefill, have this shape."""
    group, rest = divmod(num_heads, num_kv_heads)
    shapes = head_dim in HEAD_DIMS and block_size in BLOCK_SIZES
    return rest == 0 and group <= MAX_GROUP and shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """How a program works through its item, and how finely sequences are cut (work_list.py)."""

    tile: int  # tokens taken at once
    num_warps: int
    num_stages: int  # tiles under way
    tokens_are_rows: bool  # scores are K.Q^T (tile x 16), not Q.K^T (16 x tile)
    tail_apart: bool  # the last tile has a loop of its own, so that the others need no masks
    max_registers: int | None = None
    programs_per_multiprocessor: float = 1.4  # none to have more left than its part at the end
    least_share: int = 256  # tokens that are not cut


def choose_config(
    batch: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> DecodeConfig:
    """The configuration for up to `batch` sequences (measured: tests/bench/attention.py)."""
    if dtype.itemsize > 2:
        return DecodeConfig(
            tile=32,
            num_warps=4,
            num_stages=2,
            tokens_are_rows=False,
            tail_apart=False,
            least_share=64,
        )
    if head_dim == 128 and num_heads <= 2 * num_kv_heads:
        return _few_queries_a_head(batch)
    few = _CUT_FINELY if batch <= _FEW_SEQUENCES else {}
    return DecodeConfig(
        tile=64,
        num_warps=4,
        num_stages=2,
        tokens_are_rows=False,
        tail_apart=False,
        max_registers=128 if head_dim == 128 else None,
        **few,
    )


def invariant_config(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> DecodeConfig:
    """One configuration for all batches: that of large ones, for a program that repeats."""
    config = choose_config(_FEW_SEQUENCES + 1, num_heads, num_kv_heads, head_dim, dtype)
    return replace(config, max_registers=None)  # 128 would spill


def _few_queries_a_head(batch: int) -> DecodeConfig:
    if batch > _FEW_SEQUENCES:
        return DecodeConfig(
            tile=64, num_warps=2, num_stages=3, tokens_are_rows=False, tail_apart=True
        )
    return DecodeConfig(
        tile=64,
        num_warps=4,
        num_stages=3,
        tokens_are_rows=True,
        tail_apart=False,
        max_registers=128,
        **_CUT_FINELY,
    )
