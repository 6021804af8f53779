"""From the slots' state to the inputs of a decode step, and back: a launch each.

A slot is a row of tables on the device: computed tokens, last token, block table. The last slot
pads batches: it stays at token 0, position 0, whatever is sampled for it. What leads into the model
starts with the embeddings, if all of them are here; what leads back may end sampling (sample.py).
Oracle: reference_state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from millstream.kernels import pdl
from millstream.kernels.pdl import launch_dependents, publish, wait

_ROWS = 128  # of a program that advances slots
_ELEMENTS_PER_WARP = 256  # of an embedding: one 16-byte load a thread of 16-bit values
_MAX_WARPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTables:
    """What steps change of each slot: contiguous vectors of int64, one entry a slot."""

    computed: torch.Tensor  # computed tokens
    last_tokens: torch.Tensor  # sampled last


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """What a step of n sequences reads."""

    token_ids: torch.Tensor  # [n] int64
    positions: torch.Tensor  # [n] int64
    kv_indices: torch.Tensor  # [n] int64: block id * block_size + offset
    context_lens: torch.Tensor  # [n] int32: positions + 1
    embedded: torch.Tensor | None  # [n, hidden], if an embedding was given


@triton.jit  # type: ignore[untyped-decorator]
def _read_kernel(
    slots_ptr: tl.tensor,
    computed_ptr: tl.tensor,
    last_tokens_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    embedding_ptr: tl.tensor,
    inputs_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    embedded_ptr: tl.tensor,
    table_stride: tl.tensor,
    num_rows: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A program a row. HIDDEN 0: without embeddings."""
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    slot = tl.load(slots_ptr + row)
    token_id = tl.load(last_tokens_ptr + slot)
    position = tl.load(computed_ptr + slot)
    block = tl.load(block_tables_ptr + slot * table_stride + position // BLOCK_SIZE).to(tl.int64)
    if HIDDEN > 0:
        column = tl.arange(0, WIDTH)
        inside = column < HIDDEN
        values = tl.load(embedding_ptr + token_id * HIDDEN + column, mask=inside)
        tl.store(embedded_ptr + row * HIDDEN + column, values, mask=inside)
    #  inputs hold [3, n]: token ids, positions, KV indices
    tl.store(inputs_ptr + row, token_id)
    tl.store(inputs_ptr + num_rows + row, position)
    tl.store(inputs_ptr + 2 * num_rows + row, block * BLOCK_SIZE + position % BLOCK_SIZE)
    tl.store(context_lens_ptr + row, (position + 1).to(tl.int32))
    publish(PDL)  # every layer's qk_norm_rope_store reads these before its wait


@triton.jit  # type: ignore[untyped-decorator]
def store_state(
    computed_ptr: tl.tensor,
    last_tokens_ptr: tl.tensor,
    padding_slot: tl.tensor,
    slot: tl.tensor,
    computed: tl.tensor,
    token_id: tl.tensor,
) -> None:
    """A slot's state after a step; that of the slot which pads batches stays."""
    real = slot != padding_slot
    tl.store(computed_ptr + slot, computed, mask=real)
    tl.store(last_tokens_ptr + slot, token_id, mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _advance_kernel(
    slots_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    computed_ptr: tl.tensor,
    last_tokens_ptr: tl.tensor,
    padding_slot: tl.tensor,
    num_rows: tl.tensor,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wait(PDL)
    inside = row < num_rows
    # What is past the last row pads as well.
    slot = tl.load(slots_ptr + row, mask=inside, other=padding_slot)
    position = tl.load(computed_ptr + slot, mask=inside, other=0)
    token_id = tl.load(token_ids_ptr + row, mask=inside, other=0)
    store_state(computed_ptr, last_tokens_ptr, padding_slot, slot, position + 1, token_id)


def read_slots(
    slots: torch.Tensor,
    tables: SlotTables,
    block_tables: torch.Tensor,
    block_size: int,
    embedding: torch.Tensor | None = None,
) -> DecodeInputs:
    """The inputs of the step in which `slots` [n] int64 compute one token each.

    block_tables: [num_slots, width] int32; embedding: [vocab_size, hidden], of any dtype, for the
    last tokens' rows of it as well; contiguous. Raises ValueError for others.
    """
    check_tables(slots, tables)
    if block_tables.dtype != torch.int32 or block_tables.shape[:1] != tables.computed.shape:
        raise ValueError(f"block_tables: {block_tables.dtype}, {tuple(block_tables.shape)}")
    if block_tables.stride(1) != 1:
        raise ValueError("rows of block_tables must have unit stride")
    if embedding is not None and (embedding.dim() != 2 or not embedding.is_contiguous()):
        raise ValueError("embedding must be contiguous, [vocab_size, hidden]")
    num_rows, device = len(slots), slots.device
    inputs = torch.empty((3, num_rows), dtype=torch.int64, device=device)
    context_lens = torch.empty(num_rows, dtype=torch.int32, device=device)
    hidden = 0 if embedding is None else embedding.shape[1]
    embedded = None if embedding is None else embedding.new_empty(num_rows, hidden)
    if num_rows:
        width = triton.next_power_of_2(max(hidden, 1))
        _read_kernel[(num_rows,)](
            slots,
            tables.computed,
            tables.last_tokens,
            block_tables,
            embedding,
            inputs,
            context_lens,
            embedded,
            block_tables.stride(0),
            num_rows,
            BLOCK_SIZE=block_size,
            HIDDEN=hidden,
            WIDTH=width,
            num_warps=min(max(width // _ELEMENTS_PER_WARP, 1), _MAX_WARPS),
            **pdl.options(device),
        )
    return DecodeInputs(
        token_ids=inputs[0],
        positions=inputs[1],
        kv_indices=inputs[2],
        context_lens=context_lens,
        embedded=embedded,
    )


def advance_slots(slots: torch.Tensor, token_ids: torch.Tensor, tables: SlotTables) -> None:
    """Records in place that `slots` [n] int64 computed a token each and sampled `token_ids` [n]
    int64. Slots are distinct, but for the last of the tables, which stays as it is.
    Raises ValueError for other shapes, as read_slots does."""
    check_tables(slots, tables)
    if token_ids.shape != slots.shape or token_ids.dtype != torch.int64:
        raise ValueError(f"token_ids: {token_ids.dtype}, {tuple(token_ids.shape)}")
    if not len(slots):
        return
    _advance_kernel[(triton.cdiv(len(slots), _ROWS),)](
        slots,
        token_ids,
        tables.computed,
        tables.last_tokens,
        len(tables.computed) - 1,
        len(slots),
        ROWS=_ROWS,
        num_warps=1,
        **pdl.options(slots.device),
    )


def check_tables(slots: torch.Tensor, tables: SlotTables) -> None:
    """Raises ValueError unless slots [n] int64 may be read or written in tables."""
    computed, last_tokens = tables.computed, tables.last_tokens
    tensors = (slots, computed, last_tokens)
    if any(t.dim() != 1 or t.dtype != torch.int64 or t.stride(0) != 1 for t in tensors):
        raise ValueError("slots, computed and last_tokens must be contiguous vectors of int64")
    if computed.shape != last_tokens.shape:
        raise ValueError("computed and last_tokens must have one entry a slot")
