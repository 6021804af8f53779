"""Decode attention over the paged KV cache: one query token for each sequence, grouped heads.

    begin_step, once a step:  context_lens -> work list (work_list.py)
    each layer:               one program for each item of the list and KV head

Items of one sequence leave partial results, and the last of them to finish combines these. It is
reading K and V at the memory's speed: what counts is that enough tiles are under way, and that the
next block id is there before its tile is asked for. Oracle: reference_attention.paged_attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from millstream.kernels import pdl
from millstream.kernels.pdl import launch_dependents, wait
from millstream.kernels.work_list import (
    COUNT,
    END,
    FIELDS,
    FIRST,
    ROW,
    SLOT,
    START,
    WorkList,
)

MAX_GROUP = 16  # query heads of one KV head: they fill one side of a tensor core's tile
HEAD_DIMS = (16, 32, 64, 128)
BLOCK_SIZES = (16, 32, 64, 128, 256)
_FEW_SEQUENCES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """How a program works through its item, and how many items there are to be."""

    tile: int  # tokens taken at once
    num_warps: int
    num_stages: int  # tiles under way
    tokens_are_rows: bool  # scores are K.Q^T (tile x 16), not Q.K^T (16 x tile)
    tail_apart: bool  # the last tile has a loop of its own, so that the others need no masks
    max_registers: int | None = None
    items_per_multiprocessor: int = 4  # unless there are more sequences
    longest_first: bool = True


def choose_config(
    batch: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> DecodeConfig:
    """The configuration for up to `batch` sequences (measured: tests/bench/attention.py)."""
    # A few sequences are cut into as many items as run at once: more would only cost combining.
    items = 2 if batch <= _FEW_SEQUENCES else 4
    if dtype.itemsize > 2:
        return DecodeConfig(
            tile=32, num_warps=4, num_stages=2, tokens_are_rows=False, tail_apart=False
        )
    if head_dim == 128 and num_heads <= 2 * num_kv_heads:
        return DecodeConfig(
            tile=64,
            num_warps=4,
            num_stages=3,
            tokens_are_rows=True,
            tail_apart=False,
            max_registers=128,
            items_per_multiprocessor=items,
        )
    return DecodeConfig(
        tile=64,
        num_warps=4,
        num_stages=2 if head_dim == 128 else 3,
        tokens_are_rows=False,
        tail_apart=False,
        max_registers=128 if head_dim == 128 else 168,
        items_per_multiprocessor=items,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _block_ids(
    table_ptr: tl.tensor, token: tl.tensor, end: tl.tensor, BLOCK: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """The block of a tile that starts at `token`; of each of its tokens if it spans several.

    To stay int32 until they are used: Triton does not pipeline a loop that carries them as int64.
    """
    last = tl.maximum(end - 1, 0)
    if TILE > BLOCK:
        token = token + tl.arange(0, TILE)
    return tl.load(table_ptr + tl.minimum(token, last) // BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_tile(
    query: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    ids: tl.tensor,
    token: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    acc: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS_ARE_ROWS: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One step of the online softmax, over tokens [token, token + TILE) that lie before `end`."""
    offset = tl.arange(0, TILE)
    column = tl.arange(0, HEAD_DIM)
    ids = ids.to(tl.int64)
    if TILE > BLOCK:
        rows = ids * (BLOCK * TOKEN_STRIDE) + (token + offset) % BLOCK * TOKEN_STRIDE
        at = rows[:, None] + column[None, :]
    else:
        first = ids * (BLOCK * TOKEN_STRIDE) + token % BLOCK * TOKEN_STRIDE
        at = first + (offset[:, None] * TOKEN_STRIDE + column[None, :])
    seen = token + offset < end
    if MASKED:
        # What lies behind a context may be NaN, which a weight of 0 would not silence.
        key = tl.load(key_ptr + at, mask=seen[:, None], other=0.0)
        value = tl.load(value_ptr + at, mask=seen[:, None], other=0.0)
    else:
        key = tl.load(key_ptr + at)
        value = tl.load(value_ptr + at)
    if TOKENS_ARE_ROWS:
        scores = tl.dot(key, query, input_precision="ieee") * scale
        if MASKED:
            scores = tl.where(seen[:, None], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=0))
        weights = tl.exp2(scores - new_maximum[None, :])
        alpha = tl.exp2(maximum - new_maximum)
        total = total * alpha + tl.sum(weights, axis=0)
        acc = acc * alpha[None, :]
        acc = tl.dot(tl.trans(value), weights.to(value.dtype), acc, input_precision="ieee")
    else:
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if MASKED:
            scores = tl.where(seen[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_maximum[:, None])
        alpha = tl.exp2(maximum - new_maximum)
        total = total * alpha + tl.sum(weights, axis=1)
        acc = acc * alpha[:, None]
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
    return acc, new_maximum, total


@triton.jit  # type: ignore[untyped-decorator]
def _combine(
    partial_ptr: tl.tensor,
    maximum_ptr: tl.tensor,
    total_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Combines `count` partial results of a KV head's group, PARTS at once, and writes the output.

    The pointers are at the group's first head.
    """
    part = tl.arange(0, PARTS)
    head = tl.arange(0, HEADS)
    column = tl.arange(0, HEAD_DIM)
    maximum = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, HEAD_DIM], tl.float32)
    for begin in range(0, count, PARTS):
        at = (first + begin + part)[:, None] * NUM_HEADS + head[None, :]
        inside = (begin + part < count)[:, None] & (head < GROUP)[None, :]
        # .cg: other multiprocessors wrote these; this one's L1 may hold old lines.
        maxima = tl.load(maximum_ptr + at, mask=inside, other=-1.0e30, cache_modifier=".cg")
        totals = tl.load(total_ptr + at, mask=inside, other=0.0, cache_modifier=".cg")
        rows = at[:, :, None] * HEAD_DIM + column[None, None, :]
        partial = tl.load(
            partial_ptr + rows, mask=inside[:, :, None], other=0.0, cache_modifier=".cg"
        )
        new_maximum = tl.maximum(maximum, tl.max(maxima, axis=0))
        alpha = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(maxima - new_maximum[None, :])
        acc = acc * alpha[:, None] + tl.sum(partial * weights[:, :, None], axis=0)
        total = total * alpha + tl.sum(totals * weights, axis=0)
        maximum = new_maximum
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    to = out_ptr + head[:, None] * HEAD_DIM + column[None, :]
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=(head < GROUP)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _paged_decode_kernel(
    query_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    out_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    items_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    maximum_ptr: tl.tensor,
    total_ptr: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    TOKENS_ARE_ROWS: tl.constexpr,
    TAIL_APART: tl.constexpr,
    COMBINE_HEADS: tl.constexpr,
    COMBINE_PARTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program for each (item, KV head); `scale` turns scores into powers of two."""
    launch_dependents(PDL)
    # Before the wait: the list and the block tables, complete since begin_step (see work_list).
    item = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    fields = items_ptr + item * FIELDS
    row = tl.load(fields + ROW, cache_modifier=".cg")
    slot = tl.load(fields + SLOT, cache_modifier=".cg")
    start = tl.load(fields + START, cache_modifier=".cg")
    end = tl.load(fields + END, cache_modifier=".cg")
    first_item = tl.load(fields + FIRST, cache_modifier=".cg")
    count = tl.load(fields + COUNT, cache_modifier=".cg")
    if row < 0:
        wait(PDL)
        return
    table_ptr = block_tables_ptr + slot.to(tl.int64) * table_stride
    next_ids = _block_ids(table_ptr, start, end, BLOCK, TILE)
    wait(PDL)

    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    HEADS: tl.constexpr = 16  # of which GROUP are the group's, the others 0
    TOKEN_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    key_ptr = key_cache_ptr + kv_head * HEAD_DIM
    value_ptr = value_cache_ptr + kv_head * HEAD_DIM
    head = tl.arange(0, HEADS)
    column = tl.arange(0, HEAD_DIM)
    group_at = row * NUM_HEADS + kv_head * GROUP  # the group's heads lie side by side
    query_ptr += group_at * HEAD_DIM
    out_ptr += group_at * HEAD_DIM
    maximum = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    if TOKENS_ARE_ROWS:
        at = head[None, :] * HEAD_DIM + column[:, None]
        query = tl.load(query_ptr + at, mask=(head < GROUP)[None, :], other=0.0)
        acc = tl.zeros([HEAD_DIM, HEADS], tl.float32)
    else:
        at = head[:, None] * HEAD_DIM + column[None, :]
        query = tl.load(query_ptr + at, mask=(head < GROUP)[:, None], other=0.0)
        acc = tl.zeros([HEADS, HEAD_DIM], tl.float32)

    full_end = start + (end - start) // TILE * TILE if TAIL_APART else end
    for token in tl.range(start, full_end, TILE, num_stages=NUM_STAGES):
        ids = next_ids
        next_ids = _block_ids(table_ptr, token + TILE, end, BLOCK, TILE)
        acc, maximum, total = _attend_tile(
            query, key_ptr, value_ptr, ids, token, end, scale, acc, maximum, total,
            HEAD_DIM, BLOCK, TOKEN_STRIDE, TILE, TOKENS_ARE_ROWS, not TAIL_APART,
        )  # fmt: skip
    if TAIL_APART:
        for token in tl.range(full_end, end, TILE, num_stages=2):
            acc, maximum, total = _attend_tile(
                query, key_ptr, value_ptr, next_ids, token, end, scale, acc, maximum, total,
                HEAD_DIM, BLOCK, TOKEN_STRIDE, TILE, TOKENS_ARE_ROWS, True,
            )  # fmt: skip
    if TOKENS_ARE_ROWS:
        acc = tl.trans(acc)

    inside = head < GROUP
    at_head = head[:, None] * HEAD_DIM + column[None, :]
    if count == 1:
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_ptr + at_head, out.to(out_ptr.dtype.element_ty), mask=inside[:, None])
    else:
        part_at = item * NUM_HEADS + kv_head * GROUP
        tl.store(partial_ptr + part_at * HEAD_DIM + at_head, acc, mask=inside[:, None])
        tl.store(maximum_ptr + part_at + head, maximum, mask=inside)
        tl.store(total_ptr + part_at + head, total, mask=inside)
        tl.debug_barrier()  # all threads' stores come before the one thread's atomic
        arrivals = arrivals_ptr + row * NUM_KV_HEADS + kv_head
        if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == count - 1:
            tl.store(arrivals, 0)  # for the next layer
            _combine(
                partial_ptr + kv_head * GROUP * HEAD_DIM,
                maximum_ptr + kv_head * GROUP,
                total_ptr + kv_head * GROUP,
                out_ptr, first_item, count,
                NUM_HEADS, GROUP, HEAD_DIM, COMBINE_HEADS, COMBINE_PARTS,
            )  # fmt: skip


class PagedDecode:
    """Decode attention of up to max_batch sequences: workspaces, grid and configuration.

    Made once for each batch size that a CUDA graph is captured for; one stream at a time uses it.
    """

    def __init__(
        self,
        max_batch: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        max_context: int,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.bfloat16,
        config: DecodeConfig | None = None,
    ) -> None:
        """Raises ValueError for shapes that the kernel does not have (see `supports`)."""
        if not supports(num_heads, num_kv_heads, head_dim, block_size):
            raise ValueError(
                f"no decode kernel for {num_heads} heads on {num_kv_heads}, head_dim {head_dim}, "
                f"blocks of {block_size}"
            )
        self.config = config or choose_config(max_batch, num_heads, num_kv_heads, head_dim, dtype)
        self.work = WorkList(
            max_batch=max_batch,
            num_kv_heads=num_kv_heads,
            num_programs=_multiprocessors(device) * self.config.items_per_multiprocessor,
            tile=self.config.tile,
            max_context=max_context,
            longest_first=self.config.longest_first,
            device=device,
        )
        self._query_shape = (num_heads, head_dim)
        self._cache_shape = (block_size, num_kv_heads, head_dim)
        self._dtype = dtype
        parts = (self.work.capacity, num_heads)
        self._partial = torch.empty(*parts, head_dim, dtype=torch.float32, device=device)
        self._maximum = torch.empty(parts, dtype=torch.float32, device=device)
        self._total = torch.empty(parts, dtype=torch.float32, device=device)
        # All zero between layers: the program that combines resets its counter.
        self._arrivals = torch.zeros(max_batch, num_kv_heads, dtype=torch.int32, device=device)
        self._block_tables: torch.Tensor | None = None
        self._batch = 0

    def begin_step(
        self, block_tables: torch.Tensor, slots: torch.Tensor, context_lens: torch.Tensor
    ) -> None:
        """Builds the work list that all layers of a step share.

        Args:
            block_tables: [num_slots, width] int32, a slot's block ids in order; rows of unit
                stride. Each layer reads it; entries past a context are not read.
            slots: [B] int32 or int64, the row of block_tables of each sequence.
            context_lens: [B] int32, tokens of each sequence with the new one; 0: a padding row,
                whose output is zeros and whose slot must be valid all the same.
        """
        if block_tables.dtype != torch.int32 or block_tables.dim() != 2:
            raise ValueError(f"block_tables must be [num_slots, width] int32, {block_tables.dtype}")
        if block_tables.stride(1) != 1:
            raise ValueError("block_tables must have rows of unit stride")
        self.work.build(slots, context_lens)
        self._block_tables, self._batch = block_tables, context_lens.shape[0]

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention [B, Hq, D] of query [B, Hq, D] over one layer's caches.

        key_cache, value_cache: [blocks, block_size, Hkv, D]. All contiguous, of one dtype.
        """
        out = torch.empty_like(query) if out is None else out
        tables = self._check(query, key_cache, value_cache, out)
        (num_heads, head_dim), num_kv_heads = self._query_shape, self._cache_shape[1]
        config = self.config
        group = num_heads // num_kv_heads
        combine_heads = triton.next_power_of_2(group)
        options = {} if config.max_registers is None else {"maxnreg": config.max_registers}
        _paged_decode_kernel[(self.work.capacity * num_kv_heads,)](
            query,
            key_cache,
            value_cache,
            out,
            tables,
            self.work.items,
            self._arrivals,
            self._partial,
            self._maximum,
            self._total,
            tables.stride(0),
            head_dim**-0.5 * math.log2(math.e),
            NUM_KV_HEADS=num_kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK=self._cache_shape[0],
            TILE=config.tile,
            NUM_STAGES=config.num_stages,
            TOKENS_ARE_ROWS=config.tokens_are_rows,
            TAIL_APART=config.tail_apart,
            COMBINE_HEADS=combine_heads,
            COMBINE_PARTS=combine_parts(config.num_warps, combine_heads),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **options,
            **pdl.options(query.device),
        )
        return out

    def _check(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Raises ValueError unless the kernel may run on these; returns the step's block tables."""
        if self._block_tables is None or query.shape != (self._batch, *self._query_shape):
            raise ValueError(f"query has shape {tuple(query.shape)}, the step {self._batch} rows")
        if key_cache.shape[1:] != self._cache_shape or key_cache.shape != value_cache.shape:
            shapes = tuple(key_cache.shape), tuple(value_cache.shape)
            raise ValueError(f"caches have shapes {shapes}, not [blocks, *{self._cache_shape}]")
        tensors = (query, key_cache, value_cache, out)
        if out.shape != query.shape or any(tensor.dtype != self._dtype for tensor in tensors):
            raise ValueError(f"query, caches and out must be {self._dtype}, out shaped like query")
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError("query, caches and out must be contiguous")
        return self._block_tables


def combine_parts(num_warps: int, heads: int) -> int:
    """Partial results combined at once: 32 registers a thread of head_dim 128."""
    return max(1, 8 * num_warps // heads)


def supports(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> bool:
    """Whether the attention kernels, this one and paged_prefill, have this shape."""
    group, rest = divmod(num_heads, num_kv_heads)
    shapes = head_dim in HEAD_DIMS and block_size in BLOCK_SIZES
    return rest == 0 and group <= MAX_GROUP and shapes


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter: few, so that some sequences are cut and some are not
    return torch.cuda.get_device_properties(device).multi_processor_count
