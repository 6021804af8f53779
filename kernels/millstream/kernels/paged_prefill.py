"""Prefill attention over the paged KV cache: causal, chunks of several sequences with their prefix.

    context of a sequence:  [ prefix: computed before )[ queries: the chunk's tokens )

A program takes a tile of one sequence's queries and some query heads of one KV head, and goes
through the context's tiles up to the diagonal, with an online softmax in float32. Its rows are
those queries, the heads of a token side by side. Tiles of queries are numbered so that a program
finds its own from query_starts alone:

    sequence s has the numbers from  query_starts[s] // TILE + s  to that of s + 1

There are never fewer than it has tiles; programs of the others end at once. So the grid is known
from the number of tokens and sequences. Oracle: reference_attention.paged_attention.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from millstream.kernels import pdl
from millstream.kernels.boxes import padded
from millstream.kernels.decode_configs import supports
from millstream.kernels.kv_tiles import block_ids, tile_offsets
from millstream.kernels.pdl import launch_dependents, wait
from millstream.kernels.prefill_configs import PrefillConfig, choose_config

_SEQUENCES_BLOCK = 256  # looked through at once


@triton.jit  # type: ignore[untyped-decorator]
def _attend_tile(
    query: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    ids: tl.tensor,
    token: tl.tensor,
    last_seen: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    acc: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One step of the online softmax, over tokens [token, token + TILE) that a row sees."""
    offset = tl.arange(0, TILE)
    at = tile_offsets(ids, token, HEAD_DIM, BLOCK, TOKEN_STRIDE, TILE)
    if MASKED:
        # What lies behind a context may be NaN, which a weight of 0 would not silence.
        inside = (token + offset < end)[:, None]
        key = tl.load(key_ptr + at, mask=inside, other=0.0)
        value = tl.load(value_ptr + at, mask=inside, other=0.0)
    else:
        key = tl.load(key_ptr + at)
        value = tl.load(value_ptr + at)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if MASKED:
        seen = (token + offset)[None, :] <= last_seen[:, None]
        scores = tl.where(seen, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - new_maximum[:, None])
    alpha = tl.exp2(maximum - new_maximum)
    total = total * alpha + tl.sum(weights, axis=1)
    acc = acc * alpha[:, None]
    acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
    return acc, new_maximum, total


@triton.jit  # type: ignore[untyped-decorator]
def _sequence_of(
    number: tl.tensor,
    query_starts_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    num_sequences: tl.tensor,
    QUERY_TILE: tl.constexpr,
    SEQUENCES_BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Of which sequence a tile is, by its number: the sequence, its first query, number of queries,
    context and slot. All 0 if of none."""
    sequence = 0
    query_start = 0
    num_queries = 0
    context = 0
    slot = 0
    # One load of many sequences' data, not one to find the sequence and then others for its data.
    for first in range(0, num_sequences, SEQUENCES_BLOCK):
        sequences = first + tl.arange(0, SEQUENCES_BLOCK)
        valid = sequences < num_sequences
        starts = tl.load(query_starts_ptr + sequences, mask=valid, other=0)
        stops = tl.load(query_starts_ptr + sequences + 1, mask=valid, other=0)
        contexts = tl.load(context_lens_ptr + sequences, mask=valid, other=0)
        slots = tl.load(slots_ptr + sequences, mask=valid, other=0).to(tl.int32)
        # A sequence has a tile for each that it may begin in, and one more.
        begun = starts // QUERY_TILE + sequences <= number
        mine = valid & begun & (number <= stops // QUERY_TILE + sequences)
        sequence += tl.sum(tl.where(mine, sequences, 0), axis=0)
        query_start += tl.sum(tl.where(mine, starts, 0), axis=0)
        num_queries += tl.sum(tl.where(mine, stops - starts, 0), axis=0)
        context += tl.sum(tl.where(mine, contexts, 0), axis=0)
        slot += tl.sum(tl.where(mine, slots, 0), axis=0)
    return sequence, query_start, num_queries, context, slot


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_sequences"],
    # They may be slices: the kernel is not to be compiled again for an odd offset.
    do_not_specialize_on_alignment=["slots_ptr", "query_starts_ptr", "context_lens_ptr"],
)
def _paged_prefill_kernel(
    query_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    out_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    num_sequences: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    TAIL_APART: tl.constexpr,
    SEQUENCES_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (HEADS query heads each, numbers of tiles), the highest first: the last tile sees the
    most.

    Programs that share a KV head run side by side; the last of these may have fewer heads than
    HEADS. `scale` turns scores into powers of two.
    """
    launch_dependents(PDL)
    wait(PDL)
    number = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence, query_start, num_queries, context, slot = _sequence_of(
        number, query_starts_ptr, context_lens_ptr, slots_ptr, num_sequences,
        QUERY_TILE, SEQUENCES_BLOCK,
    )  # fmt: skip
    tile_start = (number - query_start // QUERY_TILE - sequence) * QUERY_TILE
    if tile_start >= num_queries:
        return

    table_ptr = block_tables_ptr + slot.to(tl.int64) * table_stride
    prefix = context - num_queries
    #  tokens:  [ seen by all rows of the tile )[ around the diagonal )
    #           0                              full_end               end
    full_end = (prefix + tile_start + 1) // KEY_TILE * KEY_TILE if TAIL_APART else 0
    end = tl.minimum(prefix + tile_start + QUERY_TILE, context)
    next_ids = block_ids(table_ptr, 0, end, BLOCK, KEY_TILE)

    TOKEN_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    PROGRAMS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    ROWS: tl.constexpr = QUERY_TILE * HEADS
    kv_head = tl.program_id(0) // PROGRAMS
    key_ptr = key_cache_ptr + kv_head * HEAD_DIM
    value_ptr = value_cache_ptr + kv_head * HEAD_DIM
    row = tl.arange(0, ROWS)
    query_token = tile_start + row // HEADS
    head = tl.program_id(0) % PROGRAMS * HEADS + row % HEADS  # of the group
    column = tl.arange(0, HEAD_DIM)
    query_at = (query_start + query_token).to(tl.int64)[:, None] * (NUM_HEADS * HEAD_DIM)
    query_at += (kv_head * GROUP + head)[:, None] * HEAD_DIM + column[None, :]
    inside = ((query_token < num_queries) & (head < GROUP))[:, None]
    query = tl.load(query_ptr + query_at, mask=inside, other=0.0)
    last_seen = prefix + query_token

    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    if TAIL_APART:
        for token in tl.range(0, full_end, KEY_TILE, num_stages=NUM_STAGES):
            ids = next_ids
            next_ids = block_ids(table_ptr, token + KEY_TILE, end, BLOCK, KEY_TILE)
            acc, maximum, total = _attend_tile(
                query, key_ptr, value_ptr, ids, token, last_seen, end, scale, acc, maximum, total,
                HEAD_DIM, BLOCK, TOKEN_STRIDE, KEY_TILE, False,
            )  # fmt: skip
    for token in tl.range(full_end, end, KEY_TILE, num_stages=NUM_STAGES):
        ids = next_ids
        next_ids = block_ids(table_ptr, token + KEY_TILE, end, BLOCK, KEY_TILE)
        acc, maximum, total = _attend_tile(
            query, key_ptr, value_ptr, ids, token, last_seen, end, scale, acc, maximum, total,
            HEAD_DIM, BLOCK, TOKEN_STRIDE, KEY_TILE, True,
        )  # fmt: skip
    out = acc / total[:, None]
    tl.store(out_ptr + query_at, out.to(out_ptr.dtype.element_ty), mask=inside)


def paged_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    longest: int | None = None,
    config: PrefillConfig | None = None,
) -> torch.Tensor:
    """Causal attention [T, Hq, D] of S sequences' chunks; a chunk is the end of its context.

    Args:
        query: [T, Hq, D], the chunks one after the other.
        key_cache, value_cache: [blocks, block_size, Hkv, D] of one layer, in which the chunks'
            own keys and values are already.
        block_tables: [num_slots, width] int32, rows of unit stride.
        slots: [S] int32 or int64, the row of block_tables of each sequence.
        query_starts: [S + 1] int32, rising from 0 to at most T.
        context_lens: [S] int32, tokens of prefix and chunk.
        out: where the result goes, contiguous and like query; None: into a new tensor.
        longest: the largest of context_lens, if it is known; for speed only.

    Rows of query that no chunk has are not written. Raises ValueError for other shapes.
    """
    _check(query, key_cache, value_cache, block_tables, slots, query_starts, context_lens)
    num_tokens, num_heads, head_dim = query.shape
    num_sequences = slots.shape[0]
    out = padded(*query.shape, like=query) if out is None else out
    if out.shape != query.shape or out.dtype != query.dtype or not out.is_contiguous():
        raise ValueError("out must be contiguous and like query")
    if not num_sequences or not num_tokens:
        return out
    num_kv_heads = key_cache.shape[2]
    group = num_heads // num_kv_heads
    if config is None:
        config = choose_config(query.dtype, group, head_dim, num_tokens=num_tokens, longest=longest)
    head_programs = num_kv_heads * triton.cdiv(group, config.heads)
    _paged_prefill_kernel[(head_programs, num_tokens // config.query_tile + num_sequences)](
        query,
        key_cache,
        value_cache,
        out,
        block_tables,
        slots,
        query_starts,
        context_lens,
        num_sequences,
        block_tables.stride(0),
        head_dim**-0.5 * math.log2(math.e),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK=key_cache.shape[1],
        QUERY_TILE=config.query_tile,
        HEADS=config.heads,
        KEY_TILE=config.key_tile,
        NUM_STAGES=config.num_stages,
        TAIL_APART=config.tail_apart,
        SEQUENCES_BLOCK=_SEQUENCES_BLOCK,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **pdl.options(query.device),
    )
    return out


def _check(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
) -> None:
    if query.dim() != 3 or key_cache.dim() != 4 or key_cache.shape != value_cache.shape:
        shapes = [tuple(t.shape) for t in (query, key_cache, value_cache)]
        raise ValueError(f"query and caches have shapes {shapes}")
    num_heads, head_dim = query.shape[1:]
    block_size, num_kv_heads = key_cache.shape[1:3]
    if key_cache.shape[3] != head_dim or not supports(
        num_heads, num_kv_heads, head_dim, block_size
    ):
        raise ValueError(f"{num_heads} heads of {head_dim}, a cache of {tuple(key_cache.shape)}")
    if query_starts.shape != (len(slots) + 1,) or context_lens.shape != (len(slots),):
        raise ValueError("query_starts must be [S + 1], context_lens and slots [S]")
    if any(t.dtype != torch.int32 for t in (query_starts, context_lens, block_tables)):
        raise ValueError("query_starts, context_lens and block_tables must be int32")
    if slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slots are {slots.dtype}")
    if not query.dtype == key_cache.dtype == value_cache.dtype:
        raise ValueError(f"dtypes differ: {query.dtype}, {key_cache.dtype}, {value_cache.dtype}")
    contiguous = (query, key_cache, value_cache, slots, query_starts, context_lens)
    if not all(t.is_contiguous() for t in contiguous) or block_tables.stride(1) != 1:
        raise ValueError("all must be contiguous, but for the distance of block_tables' rows")
