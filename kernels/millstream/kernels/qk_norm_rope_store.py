"""From a packed QKV projection to attention's inputs, in one pass: RMSNorm over the heads of q and
k, rotary embedding, q out, k and v into the paged cache.

    one row of qkv:  [ query 0 .. Hq )[ key 0 .. Hkv )[ value 0 .. Hkv )   each head D wide

A program takes a few heads of one token. A head is kept as its two halves, which are the two
coordinates of each rotated frequency, so that the rotation needs no shuffle. What says where a
token lies and how it is rotated is the step's input (pdl.py), and read before the wait. Oracle and
rounding: reference_attention.qk_norm_rope_store.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from millstream.kernels import pdl
from millstream.kernels.heads import Heads
from millstream.kernels.pdl import launch_dependents, wait

_HEADS = 16  # of a program
_ELEMENTS_PER_WARP, _MAX_WARPS = 256, 4  # of a half: 8 a thread
# Or the compiler makes fused multiply-adds of the rotation, which leave out the products' rounding.
KEEP_ROUNDING = {"enable_fp_fusion": False}


@triton.jit  # type: ignore[untyped-decorator]
def normed(
    first: tl.tensor,
    second: tl.tensor,
    first_weight: tl.tensor,
    second_weight: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """RMSNorm of heads [n, D], given and returned as their halves."""
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(wide_first * wide_first + wide_second * wide_second, axis=1)
    scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
    dtype: tl.constexpr = first.dtype
    first = _product((wide_first * scale).to(dtype), first_weight)
    return first, _product((wide_second * scale).to(dtype), second_weight)


@triton.jit  # type: ignore[untyped-decorator]
def rotated(
    first: tl.tensor, second: tl.tensor, cos: tl.tensor, sin: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Heads after RoPE, as halves. Each product is rounded before the sum, as torch rounds it."""
    dtype: tl.constexpr = first.dtype
    out_first = _product(first, cos).to(tl.float32) - _product(second, sin).to(tl.float32)
    out_second = _product(second, cos).to(tl.float32) + _product(first, sin).to(tl.float32)
    return out_first.to(dtype), out_second.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _product(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """a * b, rounded to a's type."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype)


# Indices may be slices: the kernel is not to be compiled again for an odd offset.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize_on_alignment=["positions_ptr", "kv_indices_ptr"]
)
def _qk_norm_rope_store_kernel(
    qkv_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    kv_indices_ptr: tl.tensor,
    query_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    qkv_stride: tl.tensor,
    rope_stride: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    TABLE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    HALF: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, HALF_BLOCK)
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (column < HALF)[None, :]
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    if NORM:
        weight_inside = column < HALF
        q_first = tl.load(q_weight_ptr + column, mask=weight_inside, other=0.0)
        q_second = tl.load(q_weight_ptr + HALF + column, mask=weight_inside, other=0.0)
        k_first = tl.load(k_weight_ptr + column, mask=weight_inside, other=0.0)
        k_second = tl.load(k_weight_ptr + HALF + column, mask=weight_inside, other=0.0)
    kv_index = tl.load(kv_indices_ptr + token)
    rope_row = tl.load(positions_ptr + token).to(tl.int64) if TABLE else token
    cos = tl.load(cos_ptr + rope_row * rope_stride + column, mask=column < HALF, other=0.0)
    sin = tl.load(sin_ptr + rope_row * rope_stride + column, mask=column < HALF, other=0.0)
    wait(PDL)

    source = qkv_ptr + token * qkv_stride + head[:, None] * HEAD_DIM + column[None, :]
    raw_first = tl.load(source, mask=inside, other=0.0)
    raw_second = tl.load(source + HALF, mask=inside, other=0.0)
    first, second = raw_first, raw_second

    if NORM:
        first, second = normed(
            first,
            second,
            tl.where(is_query[:, None], q_first[None, :], k_first[None, :]),
            tl.where(is_query[:, None], q_second[None, :], k_second[None, :]),
            eps,
            HEAD_DIM,
        )
    out_first, out_second = rotated(first, second, cos[None, :], sin[None, :])

    to_query = query_ptr + (token * NUM_HEADS + head[:, None]) * HEAD_DIM + column[None, :]
    query_inside = inside & is_query[:, None]
    tl.store(to_query, out_first, mask=query_inside)
    tl.store(to_query + HALF, out_second, mask=query_inside)
    # A padding row has a negative index: nothing may be stored for it.
    stored = inside & (kv_index >= 0)
    base = kv_index.to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM)
    to_key = key_cache_ptr + base + (head - NUM_HEADS)[:, None] * HEAD_DIM + column[None, :]
    tl.store(to_key, out_first, mask=stored & is_key[:, None])
    tl.store(to_key + HALF, out_second, mask=stored & is_key[:, None])
    value_head = head - NUM_HEADS - NUM_KV_HEADS
    to_value = value_cache_ptr + base + value_head[:, None] * HEAD_DIM + column[None, :]
    tl.store(to_value, raw_first, mask=stored & is_value[:, None])
    tl.store(to_value + HALF, raw_second, mask=stored & is_value[:, None])


def qk_norm_rope_store(qkv: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Returns the rotated query [T, Hq, D] and stores the rotated key and the value.

    qkv: [T, (Hq + 2 Hkv) * D], rows of unit stride and any distance. Raises ValueError if it does
    not fit `heads`, whose two caches are mutated.
    """
    heads.check(qkv, qkv.shape[1])
    query = heads.new_query(qkv)
    if not len(qkv):
        return query
    half_block = triton.next_power_of_2(heads.head_dim // 2)
    all_heads = heads.num_heads + 2 * heads.num_kv_heads
    _qk_norm_rope_store_kernel[(len(qkv), triton.cdiv(all_heads, _HEADS))](
        qkv,
        *heads.pointers(query),
        qkv.stride(0),
        heads.cos.stride(0),
        heads.eps,
        HALF_BLOCK=half_block,
        HEADS=_HEADS,
        **heads.constants,
        num_warps=num_warps_for(half_block),
        **KEEP_ROUNDING,
        **pdl.options(qkv.device),
    )
    return query


def num_warps_for(half_block: int) -> int:
    return max(1, min(_MAX_WARPS, _HEADS * half_block // _ELEMENTS_PER_WARP))
