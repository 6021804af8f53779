"""Decode attention over the paged KV cache: one query token for each sequence, grouped heads.

    begin_step, once a step:  context_lens ->  work list: items (sequence, tokens [start, end))
    each layer:               one program for each item and KV head

A sequence is cut into several items only when the sequences do not fill the GPU: an item gets at
most an even share of the step's tokens. Items of one sequence leave partial results, and the last
of them to finish combines these. Lengths are read on the device, so a CUDA graph of one batch size
serves any lengths. Oracle: reference_attention.paged_attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from millstream.kernels import pdl
from millstream.kernels.pdl import launch_dependents, wait

MAX_GROUP = 16  # query heads of one KV head: the rows of one tensor core tile

# An item of the work list, int32 each. A row of -1 says that there is no item.
_ROW, _SLOT, _START, _END, _FIRST, _COUNT, _FIELDS = (
    tl.constexpr(i) for i in (0, 1, 2, 3, 4, 5, 8)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """How the attention kernel works through an item."""

    tile: int  # tokens that a program takes at once
    num_warps: int
    num_stages: int  # tiles in flight
    tokens_are_rows: bool  # scores are K.Q^T (tile x 16), not Q.K^T (16 x tile)
    max_registers: int | None = None
    items_per_multiprocessor: int = 4  # when sequences alone do not fill the GPU
    longest_first: bool = True


def choose_config(batch: int, group: int, head_dim: int, dtype: torch.dtype) -> DecodeConfig:
    """The configuration for a batch of so many sequences (measured: docs/performance.md)."""
    if dtype.itemsize > 2:
        return DecodeConfig(tile=32, num_warps=4, num_stages=2, tokens_are_rows=False)
    if group <= 2 and head_dim == 128:
        return DecodeConfig(
            tile=64, num_warps=4, num_stages=3, tokens_are_rows=True, max_registers=128
        )
    return DecodeConfig(tile=64, num_warps=4, num_stages=2, tokens_are_rows=False)


@triton.jit  # type: ignore[untyped-decorator]
def _build_work_list_kernel(
    context_lens_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    items_ptr: tl.tensor,
    batch: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    LONGEST_FIRST: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    ITEM_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program for each sequence: each counts all sequences' items, and writes its own."""
    launch_dependents(PDL)
    wait(PDL)
    row = tl.program_id(0)
    rows = tl.arange(0, BATCH_BLOCK)
    lens = tl.load(context_lens_ptr + rows, mask=rows < batch, other=0)
    # An even share of all tokens, in whole tiles; then even parts of each sequence.
    share = tl.cdiv(tl.sum(lens, axis=0) * NUM_KV_HEADS, NUM_PROGRAMS)
    share = tl.maximum(tl.cdiv(share, TILE), 1) * TILE
    parts = tl.maximum(tl.cdiv(lens, share), 1)
    sizes = tl.maximum(tl.cdiv(tl.cdiv(lens, parts), TILE), 1) * TILE
    # A sequence of no tokens (padding) is one empty item, which writes zeros.
    counts = tl.where(rows < batch, tl.maximum(tl.cdiv(lens, sizes), 1), 0)

    mine = rows == row
    length = tl.sum(tl.where(mine, lens, 0), axis=0)
    size = tl.sum(tl.where(mine, sizes, 0), axis=0)
    count = tl.sum(tl.where(mine, counts, 0), axis=0)
    if LONGEST_FIRST:
        longest = tl.minimum(sizes, lens)
        my_longest = tl.minimum(size, length)
        before = (longest > my_longest) | ((longest == my_longest) & (rows < row))
    else:
        before = rows < row
    first = tl.sum(tl.where(before, counts, 0), axis=0)
    slot = tl.load(slots_ptr + row).to(tl.int32)
    for begin in range(0, count, ITEM_BLOCK):
        part = begin + tl.arange(0, ITEM_BLOCK)
        item = items_ptr + (first + part) * _FIELDS
        inside = part < count
        tl.store(item + _ROW, part * 0 + row, mask=inside)
        tl.store(item + _SLOT, part * 0 + slot, mask=inside)
        tl.store(item + _START, part * size, mask=inside)
        tl.store(item + _END, tl.minimum((part + 1) * size, length), mask=inside)
        tl.store(item + _FIRST, part * 0 + first, mask=inside)
        tl.store(item + _COUNT, part * 0 + count, mask=inside)
    if row == 0:
        for begin in range(tl.sum(counts, axis=0), CAPACITY, ITEM_BLOCK):
            unused = begin + tl.arange(0, ITEM_BLOCK)
            tl.store(items_ptr + unused * _FIELDS + _ROW, unused * 0 - 1, mask=unused < CAPACITY)


@triton.jit  # type: ignore[untyped-decorator]
def _block_ids(
    table_ptr: tl.tensor, token: tl.tensor, end: tl.tensor, BLOCK: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """The block of a tile that starts at `token`; of each of its tokens if it spans several."""
    last = tl.maximum(end - 1, 0)
    if TILE > BLOCK:
        ids = tl.load(table_ptr + tl.minimum(token + tl.arange(0, TILE), last) // BLOCK)
    else:
        ids = tl.load(table_ptr + tl.minimum(token, last) // BLOCK)
    return ids.to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    table_ptr: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    TOKENS_ARE_ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Online softmax over tokens [start, end): output before its division, maximum, sum."""
    offset = tl.arange(0, TILE)
    column = tl.arange(0, HEAD_DIM)
    head = tl.arange(0, GROUP_BLOCK)
    maximum = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    if TOKENS_ARE_ROWS:
        at = head[None, :] * HEAD_DIM + column[:, None]
        query = tl.load(query_ptr + at, mask=(head < GROUP)[None, :], other=0.0)
        acc = tl.zeros([HEAD_DIM, GROUP_BLOCK], tl.float32)
    else:
        at = head[:, None] * HEAD_DIM + column[None, :]
        query = tl.load(query_ptr + at, mask=(head < GROUP)[:, None], other=0.0)
        acc = tl.zeros([GROUP_BLOCK, HEAD_DIM], tl.float32)

    # The block id of the next tile is loaded one tile ahead.
    next_ids = _block_ids(table_ptr, start, end, BLOCK, TILE)
    for token in tl.range(start, end, TILE, num_stages=NUM_STAGES):
        ids = next_ids
        next_ids = _block_ids(table_ptr, token + TILE, end, BLOCK, TILE)
        if TILE > BLOCK:
            place = ids * (BLOCK * TOKEN_STRIDE) + (token + offset) % BLOCK * TOKEN_STRIDE
            rows = place[:, None] + column[None, :]
        else:
            place = ids * (BLOCK * TOKEN_STRIDE) + token % BLOCK * TOKEN_STRIDE
            rows = place + (offset[:, None] * TOKEN_STRIDE + column[None, :])
        seen = token + offset < end
        # Masked, since what lies behind a context may be NaN, which a weight of 0 does not silence.
        key = tl.load(key_ptr + rows, mask=seen[:, None], other=0.0)
        value = tl.load(value_ptr + rows, mask=seen[:, None], other=0.0)
        if TOKENS_ARE_ROWS:
            scores = tl.dot(key, query, input_precision="ieee") * scale
            scores = tl.where(seen[:, None], scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, axis=0))
            weights = tl.exp2(scores - new_maximum[None, :])
            alpha = tl.exp2(maximum - new_maximum)
            total = total * alpha + tl.sum(weights, axis=0)
            acc = acc * alpha[None, :]
            acc = tl.dot(tl.trans(value), weights.to(value.dtype), acc, input_precision="ieee")
        else:
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            scores = tl.where(seen[None, :], scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
            weights = tl.exp2(scores - new_maximum[:, None])
            alpha = tl.exp2(maximum - new_maximum)
            total = total * alpha + tl.sum(weights, axis=1)
            acc = acc * alpha[:, None]
            acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
        maximum = new_maximum
    if TOKENS_ARE_ROWS:
        acc = tl.trans(acc)
    return acc, maximum, total


@triton.jit  # type: ignore[untyped-decorator]
def _combine(
    partial_ptr: tl.tensor,
    maximum_ptr: tl.tensor,
    total_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    heads: tl.tensor,
    head: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Combines the partial results of one query head, and writes its output."""
    part = tl.arange(0, PARTS)
    column = tl.arange(0, HEAD_DIM)
    maximum = -1.0e30
    total = 0.0
    acc = tl.zeros([HEAD_DIM], tl.float32)
    for begin in range(0, count, PARTS):
        inside = begin + part < count
        at = (first + begin + part) * heads + head
        # .cg: other multiprocessors wrote these; this one's L1 may hold old lines.
        maxima = tl.load(maximum_ptr + at, mask=inside, other=-1.0e30, cache_modifier=".cg")
        totals = tl.load(total_ptr + at, mask=inside, other=0.0, cache_modifier=".cg")
        rows = at[:, None] * HEAD_DIM + column[None, :]
        partial = tl.load(partial_ptr + rows, mask=inside[:, None], other=0.0, cache_modifier=".cg")
        new_maximum = tl.maximum(maximum, tl.max(maxima, axis=0))
        alpha = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(maxima - new_maximum)
        acc = acc * alpha + tl.sum(partial * weights[:, None], axis=0)
        total = total * alpha + tl.sum(totals * weights, axis=0)
        maximum = new_maximum
    tl.store(out_ptr + head * HEAD_DIM + column, (acc / total).to(out_ptr.dtype.element_ty))


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
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    TOKENS_ARE_ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program for each (item, KV head); `scale` turns scores into powers of two."""
    launch_dependents(PDL)
    wait(PDL)
    item = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    fields = items_ptr + item * _FIELDS
    row = tl.load(fields + _ROW)
    slot = tl.load(fields + _SLOT)
    start = tl.load(fields + _START)
    end = tl.load(fields + _END)
    first = tl.load(fields + _FIRST)
    count = tl.load(fields + _COUNT)
    if row >= 0:
        NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
        # query and out hold [rows, Hq, D]: the group's heads lie side by side
        at = (row * NUM_HEADS + kv_head * GROUP) * HEAD_DIM
        acc, maximum, total = _attend(
            query_ptr + at,
            key_cache_ptr + kv_head * HEAD_DIM,
            value_cache_ptr + kv_head * HEAD_DIM,
            block_tables_ptr + slot.to(tl.int64) * table_stride,
            start,
            end,
            scale,
            GROUP,
            GROUP_BLOCK,
            HEAD_DIM,
            BLOCK,
            NUM_KV_HEADS * HEAD_DIM,
            TILE,
            NUM_STAGES,
            TOKENS_ARE_ROWS,
        )
        head = tl.arange(0, GROUP_BLOCK)
        column = tl.arange(0, HEAD_DIM)
        inside = head < GROUP
        if count == 1:
            out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            to_out = out_ptr + at + head[:, None] * HEAD_DIM + column[None, :]
            tl.store(to_out, out.to(out_ptr.dtype.element_ty), mask=inside[:, None])
        else:
            part = item * NUM_HEADS + kv_head * GROUP + head
            to_partial = partial_ptr + part[:, None] * HEAD_DIM + column[None, :]
            tl.store(to_partial, acc, mask=inside[:, None])
            tl.store(maximum_ptr + part, maximum, mask=inside)
            tl.store(total_ptr + part, total, mask=inside)
            tl.debug_barrier()  # all threads' stores come before the one thread's atomic
            arrivals = arrivals_ptr + row * NUM_KV_HEADS + kv_head
            if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == count - 1:
                tl.store(arrivals, 0)  # for the next layer
                for group_head in range(GROUP):
                    _combine(
                        partial_ptr,
                        maximum_ptr,
                        total_ptr,
                        out_ptr + row * (NUM_HEADS * HEAD_DIM),
                        first,
                        count,
                        NUM_HEADS,
                        kv_head * GROUP + group_head,
                        HEAD_DIM,
                        16,
                    )


class PagedDecode:
    """Decode attention of up to max_batch sequences: workspaces, grid and configuration.

    Made once for each batch size that a CUDA graph is captured for; one step at a time may use it.
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
        group = num_heads // num_kv_heads
        if not supports(num_heads, num_kv_heads, head_dim, block_size):
            raise ValueError(
                f"no decode kernel for {num_heads} heads on {num_kv_heads}, head_dim {head_dim}, "
                f"blocks of {block_size}"
            )
        self.max_batch = max_batch
        self._shape = (num_heads, head_dim)
        self._cache_shape = (block_size, num_kv_heads, head_dim)
        self._dtype = dtype
        self._device = device
        self.config = config or choose_config(max_batch, group, head_dim, dtype)
        self._num_programs = multiprocessors(device) * self.config.items_per_multiprocessor
        longest_parts = triton.cdiv(max_context, self.config.tile)
        # Each sequence has at most one item more than its share of the programs.
        spare = min(triton.cdiv(self._num_programs, num_kv_heads), max_batch * (longest_parts - 1))
        self.capacity = max_batch + spare

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def floats(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        self._items = ints(self.capacity, _FIELDS.value)
        self._arrivals = ints(max_batch, num_kv_heads)
        self._partial = floats(self.capacity, num_heads, head_dim)
        self._maximum = floats(self.capacity, num_heads)
        self._total = floats(self.capacity, num_heads)
        self._block_tables: torch.Tensor | None = None
        self._batch = 0

    def begin_step(
        self, block_tables: torch.Tensor, slots: torch.Tensor, context_lens: torch.Tensor
    ) -> None:
        """Builds the work list that all layers of a step share.

        Args:
            block_tables: [num_slots, width] int32, a slot's block ids in order; rows of unit
                stride. It is read again by each layer; entries past a context are not.
            slots: [B] int32 or int64, the row of block_tables of each sequence.
            context_lens: [B] int32, tokens of each sequence with the new one; 0: a padding row,
                whose output is zeros.
        """
        batch = context_lens.shape[0]
        if not 0 < batch <= self.max_batch or slots.shape != (batch,):
            raise ValueError(f"{batch} sequences and {slots.shape[0]} slots of {self.max_batch}")
        if context_lens.dtype != torch.int32 or block_tables.dtype != torch.int32:
            raise ValueError("context_lens and block_tables must be int32")
        if block_tables.dim() != 2 or block_tables.stride(1) != 1:
            raise ValueError("block_tables must be [num_slots, width] with rows of unit stride")
        if not slots.is_contiguous() or not context_lens.is_contiguous():
            raise ValueError("slots and context_lens must be contiguous")
        self._block_tables = block_tables
        self._batch = batch
        _build_work_list_kernel[(batch,)](
            context_lens,
            slots,
            self._items,
            batch,
            NUM_KV_HEADS=self._cache_shape[1],
            NUM_PROGRAMS=self._num_programs,
            CAPACITY=self.capacity,
            TILE=self.config.tile,
            LONGEST_FIRST=self.config.longest_first,
            BATCH_BLOCK=max(16, triton.next_power_of_2(self.max_batch)),
            ITEM_BLOCK=32,
            num_warps=4,
            **pdl.options(self._device),
        )

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
        num_heads, head_dim = self._shape
        num_kv_heads = self._cache_shape[1]
        if self._block_tables is None or query.shape != (self._batch, num_heads, head_dim):
            raise ValueError(f"query has shape {tuple(query.shape)}, the step {self._batch} rows")
        if key_cache.shape[1:] != self._cache_shape or key_cache.shape != value_cache.shape:
            raise ValueError(f"caches have shapes {key_cache.shape}, {value_cache.shape}")
        out = torch.empty_like(query) if out is None else out
        tensors = (query, key_cache, value_cache, out)
        if out.shape != query.shape or any(t.dtype != self._dtype for t in tensors):
            raise ValueError(f"query, caches and out must be {self._dtype}, out like query")
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError("query, caches and out must be contiguous")
        config = self.config
        options = {} if config.max_registers is None else {"maxnreg": config.max_registers}
        _paged_decode_kernel[(self.capacity * num_kv_heads,)](
            query,
            key_cache,
            value_cache,
            out,
            self._block_tables,
            self._items,
            self._arrivals,
            self._partial,
            self._maximum,
            self._total,
            self._block_tables.stride(0),
            head_dim**-0.5 * math.log2(math.e),
            NUM_KV_HEADS=num_kv_heads,
            GROUP=num_heads // num_kv_heads,
            GROUP_BLOCK=MAX_GROUP,
            HEAD_DIM=head_dim,
            BLOCK=self._cache_shape[0],
            TILE=config.tile,
            NUM_STAGES=config.num_stages,
            TOKENS_ARE_ROWS=config.tokens_are_rows,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **options,
            **pdl.options(self._device),
        )
        return out


def supports(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> bool:
    """Whether the attention kernels have this shape."""
    group, rest = divmod(num_heads, num_kv_heads)
    return (
        rest == 0
        and group <= MAX_GROUP
        and head_dim in (16, 32, 64, 128, 256)
        and block_size in (16, 32, 64, 128, 256)
    )


def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter: any small number, so that tests split
    return torch.cuda.get_device_properties(device).multi_processor_count
