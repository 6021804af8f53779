"""The work list of decode attention: which program attends to which tokens, made on the GPU.

    context_lens  70  9 150        an even share of all tokens for each program, in whole tiles
                  |   |  |
    items   0:[0 64) 2:[0 64) 2:[64 128) 2:[128 150) 1:[0 9) 0:[64 70)        longest first

A sequence is cut into whole shares and a rest. Multiprocessors take items in the list's order, so
with several shares for each program that runs at once, the rests fill the gaps at the end, whatever
the number of sequences. All layers of a step read the same list. Its size is bounded by the number
of sequences and programs, not by lengths, so that a CUDA graph's grid serves any lengths.

How a sequence is cut decides how its attention is rounded. With a FixedCut each is cut by its own
length alone, whatever the others are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from millstream.kernels import pdl
from millstream.kernels.pdl import publish, wait

# Fields of an item, int32: row of the batch (-1: no item), slot, tokens [START, END), the number of
# items of its sequence, the first of those in the partial results, and its own place there.
ROW, SLOT, START, END, COUNT, FIRST, PART, FIELDS = (tl.constexpr(i) for i in range(8))

_MIN_BATCH_BLOCK = 256  # smaller batches share its compiled kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedCut:
    """Shares of `share` tokens, of more where a sequence would have more than `most_parts`."""

    share: int = 512  # whole tiles
    most_parts: int = 32


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["batch", "num_programs", "least", "capacity", "num_marked"],
    # They may be slices: the kernel is not to be compiled again for an odd offset.
    do_not_specialize_on_alignment=["context_lens_ptr", "slots_ptr"],
)
def _build_work_list_kernel(
    context_lens_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    items_ptr: tl.tensor,
    batch: tl.tensor,
    num_programs: tl.tensor,
    least: tl.tensor,
    capacity: tl.tensor,
    num_marked: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    FIXED_SHARE: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    ITEM_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program for each sequence: each counts all sequences' items, and writes its own.

    FIXED_SHARE 0: shares of all sequences' tokens. So many unused entries behind the list are
    marked as attention may look at.
    """
    wait(PDL)
    row = tl.program_id(0)
    rows = tl.arange(0, BATCH_BLOCK)
    lens = tl.load(context_lens_ptr + rows, mask=rows < batch, other=0)
    if FIXED_SHARE > 0:
        shares = tl.maximum(tl.cdiv(tl.cdiv(lens, MOST_PARTS), TILE) * TILE, FIXED_SHARE)
    else:
        even = tl.cdiv(tl.sum(lens, axis=0) * NUM_KV_HEADS, num_programs)
        shares = lens * 0 + tl.cdiv(tl.maximum(even, least), TILE) * TILE
    wholes = tl.maximum(tl.cdiv(lens, shares) - 1, 0)
    rests = lens - wholes * shares  # 0 of a sequence of no tokens (padding): its output is zeros

    before, mine = rows < row, rows == row
    num_wholes = tl.sum(wholes, axis=0)
    my_wholes = tl.sum(tl.where(mine, wholes, 0), axis=0)
    my_rest = tl.sum(tl.where(mine, rests, 0), axis=0)
    share = tl.sum(tl.where(mine, shares, 0), axis=0)
    wholes_before = tl.sum(tl.where(before, wholes, 0), axis=0)
    longer = (rows < batch) & ((rests > my_rest) | ((rests == my_rest) & before))
    rest_at = num_wholes + tl.sum(longer.to(tl.int32), axis=0)
    first = wholes_before + row  # every sequence before has one rest
    slot = tl.load(slots_ptr + row).to(tl.int32)
    for begin in range(0, my_wholes + 1, ITEM_BLOCK):
        part = begin + tl.arange(0, ITEM_BLOCK)
        inside = part <= my_wholes
        is_rest = part == my_wholes
        item = items_ptr + tl.where(is_rest, rest_at, wholes_before + part) * FIELDS
        end = part * share + tl.where(is_rest, my_rest, share)
        tl.store(item + ROW, part * 0 + row, mask=inside)
        tl.store(item + SLOT, part * 0 + slot, mask=inside)
        tl.store(item + START, part * share, mask=inside)
        tl.store(item + END, end, mask=inside)
        tl.store(item + COUNT, part * 0 + my_wholes + 1, mask=inside)
        tl.store(item + FIRST, part * 0 + first, mask=inside)
        tl.store(item + PART, first + part, mask=inside)
    if row == 0:
        num_items = num_wholes + batch
        marked_end = tl.minimum(num_items + num_marked, capacity)
        for begin in range(num_items, marked_end, ITEM_BLOCK):
            unused = begin + tl.arange(0, ITEM_BLOCK)
            tl.store(items_ptr + unused * FIELDS + ROW, unused * 0 - 1, mask=unused < marked_end)
    publish(PDL)  # attention reads its item before its wait


class WorkList:
    """The items of up to max_batch sequences, for about num_programs programs."""

    def __init__(
        self,
        *,
        max_batch: int,
        num_kv_heads: int,
        num_programs: int,
        tile: int,
        max_context: int,
        device: torch.device,
        least: int = 1,
        fixed: FixedCut | None = None,
    ) -> None:
        """least: tokens of a share that is not cut, unless shares are fixed. Raises ValueError if
        these are not whole tiles."""
        if fixed is not None and fixed.share % tile:
            raise ValueError(f"shares of {fixed.share} tokens, tiles of {tile}")
        self.max_batch = max_batch
        self._num_kv_heads = num_kv_heads
        self._num_programs = num_programs
        self._tile = tile
        self._least = least
        self._fixed = fixed
        self.capacity = max_batch * self._most_parts(max_context)
        if fixed is None:
            # Whole shares are no more than the programs, counting heads: an item is as many
            # programs as there are KV heads. And each sequence has a rest.
            wholes = triton.cdiv(num_programs, num_kv_heads)
            self.capacity = min(self.capacity, max_batch + wholes)
        self.items = torch.full((self.capacity, FIELDS.value), -1, dtype=torch.int32, device=device)

    def _most_parts(self, max_context: int) -> int:
        """Of one sequence."""
        share = self._tile if self._fixed is None else self._fixed.share
        parts: int = max(triton.cdiv(max_context, share), 1)
        return parts if self._fixed is None else min(parts, self._fixed.most_parts)

    def programs_for(self, batch: int) -> int:
        """Programs a KV head that go through the items of `batch` sequences: as many as there can
        be items, but where fixed shares may be many, each takes every so manyth item."""
        if self._fixed is None:
            return self.capacity
        items = batch * (self.capacity // self.max_batch)
        enough: int = triton.cdiv(self._num_programs, self._num_kv_heads)
        return min(items, max(2 * batch, enough))

    def build(self, slots: torch.Tensor, context_lens: torch.Tensor) -> None:
        """slots: [B] int32 or int64; context_lens: [B] int32, contiguous. Raises ValueError."""
        (batch,) = context_lens.shape
        if not 0 < batch <= self.max_batch or slots.shape != (batch,):
            raise ValueError(f"{batch} lengths, {slots.shape[0]} slots; at most {self.max_batch}")
        if context_lens.dtype != torch.int32 or slots.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"lengths are {context_lens.dtype}, slots {slots.dtype}")
        if not slots.is_contiguous() or not context_lens.is_contiguous():
            raise ValueError("slots and context_lens must be contiguous")
        fixed = self._fixed
        _build_work_list_kernel[(batch,)](
            context_lens,
            slots,
            self.items,
            batch,
            self._num_programs,
            self._least,
            self.capacity,
            self.programs_for(batch),
            NUM_KV_HEADS=self._num_kv_heads,
            TILE=self._tile,
            FIXED_SHARE=0 if fixed is None else fixed.share,
            MOST_PARTS=1 if fixed is None else fixed.most_parts,
            BATCH_BLOCK=max(_MIN_BATCH_BLOCK, triton.next_power_of_2(self.max_batch)),
            ITEM_BLOCK=32,
            num_warps=4,
            **pdl.options(self.items.device),
        )
