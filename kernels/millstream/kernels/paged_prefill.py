"""Prefill attention over the paged KV cache: causal, chunks of several sequences with their prefix.

    context of a sequence:  [ prefix, computed before )[ queries: the chunk's tokens )

A program takes a tile of one sequence's queries and one query head, and goes through the context's
tiles up to the diagonal, online softmax in float32. The grid is an upper bound that the host knows;
programs without a tile end at once. Oracle: reference_attention.paged_attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from millstream.kernels import pdl
from millstream.kernels.pdl import launch_dependents, wait


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    query_tile: int
    key_tile: int
    num_warps: int
    num_stages: int


def choose_config(max_query_len: int, head_dim: int, dtype: torch.dtype) -> PrefillConfig:
    if dtype.itemsize > 2:
        return PrefillConfig(query_tile=32, key_tile=32, num_warps=4, num_stages=2)
    if max_query_len <= 64:
        return PrefillConfig(query_tile=64, key_tile=64, num_warps=4, num_stages=3)
    return PrefillConfig(query_tile=128, key_tile=64, num_warps=8, num_stages=3)


@triton.jit  # type: ignore[untyped-decorator]
def _paged_prefill_kernel(
    query_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    out_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (query heads, sequences, query tiles); the last tiles, which see most, come first."""
    launch_dependents(PDL)
    wait(PDL)
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    query_start = tl.load(query_starts_ptr + sequence)
    num_queries = tl.load(query_starts_ptr + sequence + 1) - query_start
    context = tl.load(context_lens_ptr + sequence)
    tiles = tl.num_programs(2)
    tile_start = (tiles - 1 - tl.program_id(2)) * QUERY_TILE
    if tile_start >= num_queries:
        return
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    table_ptr = block_tables_ptr + slot * table_stride
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    TOKEN_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM

    row = tile_start + tl.arange(0, QUERY_TILE)
    column = tl.arange(0, HEAD_DIM)
    offset = tl.arange(0, KEY_TILE)
    at = (query_start + row).to(tl.int64)[:, None] * (NUM_HEADS * HEAD_DIM)
    at = at + head * HEAD_DIM + column[None, :]
    query = tl.load(query_ptr + at, mask=(row < num_queries)[:, None], other=0.0)
    # The last token that each row sees; rows past the end of the queries see the whole context.
    seen_to = context - num_queries + tl.minimum(row, num_queries - 1)
    end = tl.minimum(context - num_queries + tile_start + QUERY_TILE, context)

    maximum = tl.full([QUERY_TILE], float("-inf"), tl.float32)
    total = tl.zeros([QUERY_TILE], tl.float32)
    acc = tl.zeros([QUERY_TILE, HEAD_DIM], tl.float32)
    for token in tl.range(0, end, KEY_TILE, num_stages=NUM_STAGES):
        at_token = token + offset
        inside = at_token < end
        block = tl.load(table_ptr + tl.minimum(at_token, end - 1) // BLOCK).to(tl.int64)
        place = (block * BLOCK + at_token % BLOCK) * TOKEN_STRIDE + kv_head * HEAD_DIM
        rows = place[:, None] + column[None, :]
        key = tl.load(key_cache_ptr + rows, mask=inside[:, None], other=0.0)
        value = tl.load(value_cache_ptr + rows, mask=inside[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(at_token[None, :] <= seen_to[:, None], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_maximum[:, None])
        alpha = tl.exp2(maximum - new_maximum)
        total = total * alpha + tl.sum(weights, axis=1)
        acc = acc * alpha[:, None]
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
        maximum = new_maximum
    out = acc / total[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=(row < num_queries)[:, None])


def paged_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    max_query_len: int,
    max_context: int,
    config: PrefillConfig | None = None,
) -> torch.Tensor:
    """Causal attention [T, Hq, D] of S sequences' chunks; a chunk is the end of its context.

    Args:
        query: [T, Hq, D], the chunks one after the other.
        key_cache, value_cache: [blocks, block_size, Hkv, D] of one layer, in which the chunks'
            own keys and values are already.
        block_tables: [num_slots, width] int32, rows of unit stride.
        slots: [S] int32 or int64, the row of block_tables of each sequence.
        query_starts: [S + 1] int32; context_lens: [S] int32, prefix and chunk.
        max_query_len, max_context: what no chunk and no context exceeds; the former sets the grid.

    Rows of query outside all chunks are not written. Raises ValueError for other shapes.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, num_sequences = key_cache.shape[2], slots.shape[0]
    if key_cache.shape != value_cache.shape or key_cache.shape[3] != head_dim:
        raise ValueError(f"caches have shapes {key_cache.shape}, {value_cache.shape}")
    if num_heads % num_kv_heads or head_dim not in (16, 32, 64, 128, 256):
        raise ValueError(f"no prefill kernel for {num_heads} heads on {num_kv_heads} of {head_dim}")
    if query_starts.shape != (num_sequences + 1,) or context_lens.shape != (num_sequences,):
        raise ValueError("query_starts must be [S + 1], context_lens and slots [S]")
    if any(t.dtype != torch.int32 for t in (query_starts, context_lens, block_tables)):
        raise ValueError("query_starts, context_lens and block_tables must be int32")
    if not query.dtype == key_cache.dtype == value_cache.dtype:
        raise ValueError(f"dtypes differ: {query.dtype}, {key_cache.dtype}, {value_cache.dtype}")
    if not all(t.is_contiguous() for t in (query, key_cache, value_cache)):
        raise ValueError("query and caches must be contiguous")
    out = torch.empty_like(query)
    if not num_sequences or not num_tokens:
        return out
    config = config or choose_config(max_query_len, head_dim, query.dtype)
    grid = (num_heads, num_sequences, triton.cdiv(max_query_len, config.query_tile))
    _paged_prefill_kernel[grid](
        query,
        key_cache,
        value_cache,
        out,
        block_tables,
        slots,
        query_starts,
        context_lens,
        block_tables.stride(0),
        head_dim**-0.5 * math.log2(math.e),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK=key_cache.shape[1],
        QUERY_TILE=config.query_tile,
        KEY_TILE=config.key_tile,
        NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **pdl.options(query.device),
    )
    return out
