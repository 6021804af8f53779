"""QKV's product, and behind it what qk_norm_rope_store does with the heads, in one kernel.

A tile is one head of some tokens. Where the product has many rows that spares a launch and a way
through the L2; with few there are not enough heads to keep all multiprocessors busy (linear_configs
says where). Oracle: reference.linear, then reference_attention.qk_norm_rope_store.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from millstream.kernels import pdl
from millstream.kernels.heads import Heads
from millstream.kernels.linear import ScaledRows, check_product, check_squares, operands
from millstream.kernels.linear_configs import Tile
from millstream.kernels.pdl import launch_dependents, wait
from millstream.kernels.qk_norm_rope_store import KEEP_ROUNDING, normed, rotated
from millstream.kernels.tile_kernel import row_squares, tile_of


# Indices may be slices: the kernel is not to be compiled again for an odd offset.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["positions_ptr", "kv_indices_ptr"],
)
def _qkv_heads_kernel(
    x_from: tl.tensor,
    weight_from: tl.tensor,
    scale_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    kv_indices_ptr: tl.tensor,
    query_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    eps: tl.tensor,
    head_eps: tl.tensor,
    num_rows: tl.tensor,
    rope_stride: tl.tensor,
    K: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACROSS: tl.constexpr,
    STAGES: tl.constexpr,
    SCALES: tl.constexpr,
    NORM: tl.constexpr,
    TABLE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A head of BLOCK_M tokens. ACROSS, SCALES: as in tile_kernel.py; TABLE: positions index cos
    and sin."""
    launch_dependents(PDL)
    HALF: tl.constexpr = HEAD_DIM // 2
    tile_m, head, _ = tile_of(num_rows, BLOCK_M, NUM_HEADS + 2 * NUM_KV_HEADS, ACROSS)
    token = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (token < num_rows)[:, None]
    m = token % num_rows
    column = tl.arange(0, HALF)[None, :]
    kv_index = tl.load(kv_indices_ptr + m).to(tl.int64)
    rope_row = tl.load(positions_ptr + m).to(tl.int64) if TABLE else m
    cos = tl.load(cos_ptr + rope_row[:, None] * rope_stride + column)
    sin = tl.load(sin_ptr + rope_row[:, None] * rope_stride + column)
    wait(PDL)
    squares = 0.0
    if SCALES > 0:
        squares = row_squares(scale_ptr, m, SCALES)
    sums = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        weight = weight_from.load([head * HEAD_DIM, start])
        x = x_from.load([tile_m * BLOCK_M, start])
        sums = tl.dot(x, tl.trans(weight), sums)
    if SCALES > 0:
        sums *= tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[:, None]
    halves = tl.reshape(sums.to(query_ptr.dtype.element_ty), (BLOCK_M, 2, HALF))
    first, second = tl.split(tl.permute(halves, (0, 2, 1)))
    if head < NUM_HEADS + NUM_KV_HEADS:
        if NORM:
            norm_ptr = q_weight_ptr if head < NUM_HEADS else k_weight_ptr
            first_weight = tl.load(norm_ptr + column)
            second_weight = tl.load(norm_ptr + HALF + column)
            first, second = normed(first, second, first_weight, second_weight, head_eps, HEAD_DIM)
        first, second = rotated(first, second, cos, sin)
    if head < NUM_HEADS:
        to = query_ptr + (m * NUM_HEADS + head)[:, None] * HEAD_DIM + column
        tl.store(to, first, mask=inside)
        tl.store(to + HALF, second, mask=inside)
    else:
        # A padding row has a negative index: nothing may be stored for it.
        stored = inside & (kv_index >= 0)[:, None]
        kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
        cache_ptr = key_cache_ptr if head < NUM_HEADS + NUM_KV_HEADS else value_cache_ptr
        to = cache_ptr + (kv_index * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + column
        tl.store(to, first, mask=stored)
        tl.store(to + HALF, second, mask=stored)


def qkv_heads(
    x: torch.Tensor,
    weight: torch.Tensor,
    tile: Tile,
    heads: Heads,
    *,
    scale: ScaledRows | None = None,
) -> torch.Tensor:
    """qk_norm_rope_store, whose result this is, of qkv = x weight^T.

    x: [T, K], at least one row; weight: [(Hq + 2 Hkv) * D, K]; as in linear.linear. tile: with
    stages, a head (D) wide, K not split. scale: RMSNorm without weight of x, as in linear.linear.
    Raises ValueError for others.
    """
    (num_rows, depth), size = x.shape, weight.shape[0]
    heads.check(x, size)
    if tile.block_n != heads.head_dim or not tile.stages or tile.split_k != 1:
        raise ValueError(f"{tile} is not for heads of {heads.head_dim}")
    check_product(x, weight, tile)
    check_squares(x, weight, tile, False, scale, None)
    query = heads.new_query(x)
    _qkv_heads_kernel[(triton.cdiv(num_rows, tile.block_m) * (size // tile.block_n),)](
        *operands(x, weight, tile, swiglu=False),
        None if scale is None else scale.squares,
        *heads.pointers(query),
        0.0 if scale is None else scale.eps,
        heads.eps,
        num_rows,
        heads.cos.stride(0),
        K=depth,
        BLOCK_M=tile.block_m,
        BLOCK_K=tile.block_k,
        ACROSS=tile.across,
        STAGES=tile.stages,
        SCALES=0 if scale is None else scale.squares.shape[1],
        **heads.constants,
        num_warps=tile.num_warps,
        **KEEP_ROUNDING,
        **pdl.options(x.device),
    )
    return query
