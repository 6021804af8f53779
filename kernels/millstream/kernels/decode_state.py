"""From the slots' state to the inputs of a decode step, and back: a launch each.

A slot is a row of tables on the device: computed tokens, last token, block table. The last slot
pads batches: it stays at token 0, position 0, whatever is sampled for it. Oracle: reference_state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from millstream.kernels import pdl
from millstream.kernels.pdl import launch_dependents, wait

_ROWS = 128  # of a program


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """What a step of n sequences reads."""

    token_ids: torch.Tensor  # [n] int64
    positions: torch.Tensor  # [n] int64
    kv_indices: torch.Tensor  # [n] int64: block id * block_size + offset
    context_lens: torch.Tensor  # [n] int32: positions + 1


@triton.jit  # type: ignore[untyped-decorator]
def _read_kernel(
    slots_ptr: tl.tensor,
    computed_ptr: tl.tensor,
    last_tokens_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    inputs_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    table_stride: tl.tensor,
    num_rows: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    wait(PDL)
    slot = tl.load(slots_ptr + row, mask=inside, other=0)
    position = tl.load(computed_ptr + slot, mask=inside, other=0)
    token_id = tl.load(last_tokens_ptr + slot, mask=inside, other=0)
    to_block = block_tables_ptr + slot * table_stride + position // BLOCK_SIZE
    block = tl.load(to_block, mask=inside, other=0).to(tl.int64)
    #  inputs hold [3, n]: token ids, positions, KV indices
    tl.store(inputs_ptr + row, token_id, mask=inside)
    tl.store(inputs_ptr + num_rows + row, position, mask=inside)
    index = block * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(inputs_ptr + 2 * num_rows + row, index, mask=inside)
    tl.store(context_lens_ptr + row, (position + 1).to(tl.int32), mask=inside)


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
    slot = tl.load(slots_ptr + row, mask=row < num_rows, other=0)
    real = (row < num_rows) & (slot != padding_slot)
    position = tl.load(computed_ptr + slot, mask=real, other=0)
    token_id = tl.load(token_ids_ptr + row, mask=real, other=0)
    tl.store(computed_ptr + slot, position + 1, mask=real)
    tl.store(last_tokens_ptr + slot, token_id, mask=real)


def read_slots(
    slots: torch.Tensor,
    computed: torch.Tensor,
    last_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> DecodeInputs:
    """The inputs of the step in which `slots` [n] int64 compute one token each.

    computed, last_tokens: [num_slots] int64; block_tables: [num_slots, width] int32; contiguous.
    Raises ValueError for others.
    """
    _check(slots, computed, last_tokens)
    if block_tables.dtype != torch.int32 or block_tables.shape[:1] != computed.shape:
        raise ValueError(f"block_tables: {block_tables.dtype}, {tuple(block_tables.shape)}")
    if block_tables.stride(1) != 1:
        raise ValueError("rows of block_tables must have unit stride")
    num_rows, device = len(slots), slots.device
    inputs = torch.empty((3, num_rows), dtype=torch.int64, device=device)
    context_lens = torch.empty(num_rows, dtype=torch.int32, device=device)
    if num_rows:
        _read_kernel[(triton.cdiv(num_rows, _ROWS),)](
            slots,
            computed,
            last_tokens,
            block_tables,
            inputs,
            context_lens,
            block_tables.stride(0),
            num_rows,
            BLOCK_SIZE=block_size,
            ROWS=_ROWS,
            num_warps=1,
            **pdl.options(device),
        )
    return DecodeInputs(
        token_ids=inputs[0], positions=inputs[1], kv_indices=inputs[2], context_lens=context_lens
    )


def advance_slots(
    slots: torch.Tensor,
    token_ids: torch.Tensor,
    computed: torch.Tensor,
    last_tokens: torch.Tensor,
) -> None:
    """Records in place that `slots` [n] int64 computed a token each and sampled `token_ids` [n]
    int64. Slots are distinct, but for the last of the tables, which stays as it is.
    Raises ValueError for other shapes, as read_slots does."""
    _check(slots, computed, last_tokens)
    if token_ids.shape != slots.shape or token_ids.dtype != torch.int64:
        raise ValueError(f"token_ids: {token_ids.dtype}, {tuple(token_ids.shape)}")
    if not len(slots):
        return
    _advance_kernel[(triton.cdiv(len(slots), _ROWS),)](
        slots,
        token_ids,
        computed,
        last_tokens,
        len(computed) - 1,
        len(slots),
        ROWS=_ROWS,
        num_warps=1,
        **pdl.options(slots.device),
    )


def _check(slots: torch.Tensor, computed: torch.Tensor, last_tokens: torch.Tensor) -> None:
    tensors = (slots, computed, last_tokens)
    if any(t.dim() != 1 or t.dtype != torch.int64 or t.stride(0) != 1 for t in tensors):
        raise ValueError("slots, computed and last_tokens must be contiguous vectors of int64")
    if computed.shape != last_tokens.shape:
        raise ValueError("computed and last_tokens must have one entry a slot")
