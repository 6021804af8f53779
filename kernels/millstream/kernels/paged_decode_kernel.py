"""The kernel of decode attention: one program for each item of the work list and KV head.

It reads K and V at the memory's speed: what counts is that enough tiles are under way, and that the
next block id is there before its tile is asked for. Launched by paged_decode.PagedDecode.
"""

from __future__ import annotations

import triton
import triton.language as tl

from millstream.kernels.kv_tiles import block_ids, tile_offsets
from millstream.kernels.pdl import launch_dependents, wait
from millstream.kernels.work_list import COUNT, END, FIELDS, FIRST, PART, ROW, SLOT, START


@triton.jit  # type: ignore[untyped-decorator]
def _attend_tile(
    query: tl.tensor,
    key_boxes: tl.tensor,
    value_boxes: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    kv_head: tl.tensor,
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
    BOXES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One step of the online softmax, over tokens [token, token + TILE) that lie before `end`."""
    offset = tl.arange(0, TILE)
    at = tile_offsets(ids, token, HEAD_DIM, BLOCK, TOKEN_STRIDE, TILE)
    seen = token + offset < end
    if MASKED:
        # What lies behind a context may be NaN, which a weight of 0 would not silence.
        key = tl.load(key_ptr + at, mask=seen[:, None], other=0.0)
        value = tl.load(value_ptr + at, mask=seen[:, None], other=0.0)
    elif BOXES:
        first = ids * BLOCK + token % BLOCK
        key = tl.reshape(key_boxes.load([first, kv_head, 0]), (TILE, HEAD_DIM))
        value = tl.reshape(value_boxes.load([first, kv_head, 0]), (TILE, HEAD_DIM))
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
def _load_item(
    items_ptr: tl.tensor, item: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Row, slot, start, end, count, first, part; see work_list."""
    fields = items_ptr + item * FIELDS
    row = tl.load(fields + ROW, cache_modifier=".cg")
    slot = tl.load(fields + SLOT, cache_modifier=".cg")
    start = tl.load(fields + START, cache_modifier=".cg")
    end = tl.load(fields + END, cache_modifier=".cg")
    count = tl.load(fields + COUNT, cache_modifier=".cg")
    first = tl.load(fields + FIRST, cache_modifier=".cg")
    part = tl.load(fields + PART, cache_modifier=".cg")
    return row, slot, start, end, count, first, part


@triton.jit  # type: ignore[untyped-decorator]
def _attend_item(
    query_ptr: tl.tensor,
    key_boxes: tl.tensor,
    value_boxes: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    out_ptr: tl.tensor,
    table_ptr: tl.tensor,
    next_ids: tl.tensor,
    arrivals_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    maximum_ptr: tl.tensor,
    total_ptr: tl.tensor,
    kv_head: tl.tensor,
    row: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    count: tl.tensor,
    first: tl.tensor,
    part: tl.tensor,
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
    BOXES: tl.constexpr,
) -> None:
    """An item for one KV head: writes the output, or a partial result. next_ids: of its start."""
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
        next_ids = block_ids(table_ptr, token + TILE, end, BLOCK, TILE)
        acc, maximum, total = _attend_tile(
            query, key_boxes, value_boxes, key_ptr, value_ptr, kv_head, ids, token, end, scale,
            acc, maximum, total,
            HEAD_DIM, BLOCK, TOKEN_STRIDE, TILE, TOKENS_ARE_ROWS, not TAIL_APART, BOXES,
        )  # fmt: skip
    if TAIL_APART:
        for token in tl.range(full_end, end, TILE, num_stages=2):
            acc, maximum, total = _attend_tile(
                query, key_boxes, value_boxes, key_ptr, value_ptr, kv_head, next_ids, token, end,
                scale, acc, maximum, total,
                HEAD_DIM, BLOCK, TOKEN_STRIDE, TILE, TOKENS_ARE_ROWS, True, False,
            )  # fmt: skip
    if TOKENS_ARE_ROWS:
        acc = tl.trans(acc)

    inside = head < GROUP
    at_head = head[:, None] * HEAD_DIM + column[None, :]
    if count == 1:
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_ptr + at_head, out.to(out_ptr.dtype.element_ty), mask=inside[:, None])
    else:
        part_at = part * NUM_HEADS + kv_head * GROUP
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
                out_ptr, first, count,
                NUM_HEADS, GROUP, HEAD_DIM, COMBINE_HEADS, COMBINE_PARTS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["capacity"])  # type: ignore[untyped-decorator]
def paged_decode_kernel(
    query_ptr: tl.tensor,
    key_boxes: tl.tensor,
    value_boxes: tl.tensor,
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
    capacity: tl.tensor,
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
    REPEAT: tl.constexpr,
    BOXES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program for each (item, KV head); `scale` turns scores into powers of two.

    REPEAT: fewer programs than items; those of a KV head take the items in turn. BOXES: tiles that
    no context ends in are loaded by the copy engine.
    """
    launch_dependents(PDL)
    item = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    if REPEAT:
        wait(PDL)
        step = tl.num_programs(0) // NUM_KV_HEADS
        while item < capacity:
            row, slot, start, end, count, first, part = _load_item(items_ptr, item)
            item = tl.where(row < 0, capacity, item + step)  # behind the list's end: no more
            if row >= 0:
                table_ptr = block_tables_ptr + slot.to(tl.int64) * table_stride
                next_ids = block_ids(table_ptr, start, end, BLOCK, TILE)
                _attend_item(
                    query_ptr, key_boxes, value_boxes, key_cache_ptr, value_cache_ptr, out_ptr,
                    table_ptr, next_ids, arrivals_ptr, partial_ptr, maximum_ptr, total_ptr,
                    kv_head, row, start, end, count, first, part, scale,
                    NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK, TILE, NUM_STAGES, TOKENS_ARE_ROWS,
                    TAIL_APART, COMBINE_HEADS, COMBINE_PARTS, BOXES,
                )  # fmt: skip
    else:
        # Before the wait: the list and the block tables, complete since begin_step (work_list).
        row, slot, start, end, count, first, part = _load_item(items_ptr, item)
        if row < 0:
            wait(PDL)
            return
        table_ptr = block_tables_ptr + slot.to(tl.int64) * table_stride
        next_ids = block_ids(table_ptr, start, end, BLOCK, TILE)
        wait(PDL)
        _attend_item(
            query_ptr, key_boxes, value_boxes, key_cache_ptr, value_cache_ptr, out_ptr, table_ptr,
            next_ids, arrivals_ptr, partial_ptr, maximum_ptr, total_ptr, kv_head, row, start, end,
            count, first, part, scale,
            NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK, TILE, NUM_STAGES, TOKENS_ARE_ROWS, TAIL_APART,
            COMBINE_HEADS, COMBINE_PARTS, BOXES,
        )  # fmt: skip
