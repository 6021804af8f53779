"""The work list of decode attention: which program attends to which tokens, made on the GPU.

    context_lens  900 400 700                       2,000 tokens, of 4 programs
    items   0:[0 512) 0:[512 900) 2:[0 256) 2:[256 512) 2:[512 700) 1:[0 128) 1:[128 256) ...

The longest sequence is cut first. A sequence's shares are alike, and small enough that each of so
many programs could have one out of its tokens and all shorter ones'. So most sequences are whole,
the last ones to be taken are cut the finest, and multiprocessors, which take items in the list's
order, end together whatever the number of sequences. (Guided self-scheduling: Polychronopoulos and
Kuck, 1987.) All layers of a step read the same list. Its size is bounded by the number of sequences
and programs, so that a CUDA graph's grid serves any lengths: where a list would not fit, the shares
are even. It is kept short, since a program without an item costs time, too.

How a sequence is cut decides how its attention is rounded. With a FixedCut each is cut by its own
length alone, whatever the others are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from millstream.kernels import pdl
from millstream.kernels.pdl import launch_dependents, wait

# Fields of an item, int32: row of the batch (-1: no item), slot, tokens [START, END), the number of
# items of its sequence, the first of those in the partial results, and its own place there.
ROW, SLOT, START, END, COUNT, FIRST, PART, FIELDS = (tl.constexpr(i) for i in range(8))

_MIN_BATCH_BLOCK = 256  # smaller batches share its compiled kernels
_FIXED_PROGRAMS = 4  # of a multiprocessor, that repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How finely sequences are cut, in programs of a multiprocessor (each has one KV head)."""

    even: float  # no share is larger than the part of all tokens of one of so many
    guided: float = 0.0  # nor than the part of those that are left; 0: it may be
    least: int = 64  # tokens that are not cut


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedCut:
    """Shares of `share` tokens, of more where a sequence would have more than `most_parts`."""

    share: int = 512  # whole tiles
    most_parts: int = 32


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["batch", "even", "guided", "least"],
    do_not_specialize_on_alignment=["context_lens_ptr"],  # they may be a slice
)
def _choose_shares_kernel(
    context_lens_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    batch: tl.tensor,
    even: tl.tensor,
    guided: tl.tensor,
    least: tl.tensor,
    TILE: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program for each sequence: the tokens of its shares, in whole tiles. See Cut; `even` and
    `guided` are in programs of a KV head."""
    launch_dependents(PDL)
    wait(PDL)
    row = tl.program_id(0)
    rows = tl.arange(0, BATCH_BLOCK)
    lens = tl.load(context_lens_ptr + rows, mask=rows < batch, other=0)
    length = tl.load(context_lens_ptr + row)
    most = tl.cdiv(tl.sum(lens.to(tl.int64), axis=0), even)
    if guided > 0:
        later = (lens < length) | ((lens == length) & (rows >= row))
        left = tl.sum(tl.where(later, lens, 0).to(tl.int64), axis=0)
        most = tl.minimum(most, tl.cdiv(left, guided))
    parts = tl.cdiv(length, tl.maximum(most.to(tl.int32), least))
    share = tl.cdiv(length, tl.maximum(parts, 1))
    tl.store(shares_ptr + row, tl.maximum(tl.cdiv(share, TILE), 1) * TILE)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["batch", "capacity", "even", "num_marked"],
    # They may be slices: the kernel is not to be compiled again for an odd offset.
    do_not_specialize_on_alignment=["context_lens_ptr", "slots_ptr"],
)
def _build_work_list_kernel(
    context_lens_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    items_ptr: tl.tensor,
    batch: tl.tensor,
    capacity: tl.tensor,
    even: tl.tensor,
    num_marked: tl.tensor,
    TILE: tl.constexpr,
    FIXED_SHARE: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    ITEM_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program for each sequence: each counts all sequences' items, and writes its own.

    FIXED_SHARE 0: shares as chosen, or even ones if those do not fit. So many unused entries behind
    the list are marked as attention may look at.
    """
    wait(PDL)
    row = tl.program_id(0)
    rows = tl.arange(0, BATCH_BLOCK)
    lens = tl.load(context_lens_ptr + rows, mask=rows < batch, other=0)
    if FIXED_SHARE > 0:
        shares = tl.maximum(tl.cdiv(tl.cdiv(lens, MOST_PARTS), TILE) * TILE, FIXED_SHARE)
    else:
        shares = tl.load(shares_ptr + rows, mask=rows < batch, other=TILE)
        num_items = tl.sum(tl.where(rows < batch, tl.maximum(tl.cdiv(lens, shares), 1), 0), axis=0)
        most = tl.cdiv(tl.sum(lens.to(tl.int64), axis=0), even).to(tl.int32)
        most = tl.maximum(tl.cdiv(most, TILE), 1) * TILE
        shares = tl.where(num_items > batch + even, most, shares)
    # A sequence of no tokens (padding) has an item, too: its output is zeros.
    parts = tl.where(rows < batch, tl.maximum(tl.cdiv(lens, shares), 1), 0)
    largest = tl.minimum(lens, shares)

    before, mine = rows < row, rows == row
    my_parts = tl.sum(tl.where(mine, parts, 0), axis=0)
    my_largest = tl.sum(tl.where(mine, largest, 0), axis=0)
    length = tl.sum(tl.where(mine, lens, 0), axis=0)
    share = tl.sum(tl.where(mine, shares, 0), axis=0)
    first = tl.sum(tl.where(before, parts, 0), axis=0)
    earlier = (largest > my_largest) | ((largest == my_largest) & before)
    place = tl.sum(tl.where(earlier, parts, 0), axis=0)
    slot = tl.load(slots_ptr + row).to(tl.int32)
    for begin in range(0, my_parts, ITEM_BLOCK):
        part = begin + tl.arange(0, ITEM_BLOCK)
        inside = part < my_parts
        item = items_ptr + (place + part) * FIELDS
        tl.store(item + ROW, part * 0 + row, mask=inside)
        tl.store(item + SLOT, part * 0 + slot, mask=inside)
        tl.store(item + START, part * share, mask=inside)
        tl.store(item + END, tl.minimum((part + 1) * share, length), mask=inside)
        tl.store(item + COUNT, part * 0 + my_parts, mask=inside)
        tl.store(item + FIRST, part * 0 + first, mask=inside)
        tl.store(item + PART, first + part, mask=inside)
    if row == 0:
        num_items = tl.sum(parts, axis=0)
        marked_end = tl.minimum(num_items + num_marked, capacity)
        for begin in range(num_items, marked_end, ITEM_BLOCK):
            unused = begin + tl.arange(0, ITEM_BLOCK)
            tl.store(items_ptr + unused * FIELDS + ROW, unused * 0 - 1, mask=unused < marked_end)
    if PDL:
        # Attention reads its item before its own wait. That is right since no kernel starts before
        # all programs here have stored, and their stores are visible.
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()
        launch_dependents(PDL)


class WorkList:
    """The items of up to max_batch sequences."""

    def __init__(
        self,
        *,
        max_batch: int,
        num_kv_heads: int,
        num_multiprocessors: int,
        tile: int,
        cut: Cut | FixedCut,
        max_context: int,
        device: torch.device,
    ) -> None:
        """Raises ValueError if fixed shares are not whole tiles."""
        self.max_batch = max_batch
        self._tile = tile
        self._cut = cut
        per_head = num_multiprocessors / num_kv_heads
        if isinstance(cut, FixedCut):
            if cut.share % tile:
                raise ValueError(f"shares of {cut.share} tokens, tiles of {tile}")
            self._even, self._guided = math.ceil(per_head * _FIXED_PROGRAMS), 0
            self.capacity = max_batch * self._most_parts(cut, max_context)
        else:
            self._even, self._guided = (math.ceil(per_head * n) for n in (cut.even, cut.guided))
            # Cut evenly, each sequence has a rest beside its part of the even shares.
            self.capacity = max_batch + self._even
        self.items = torch.full((self.capacity, FIELDS.value), -1, dtype=torch.int32, device=device)
        self._shares = torch.empty(max_batch, dtype=torch.int32, device=device)

    @staticmethod
    def _most_parts(cut: FixedCut, max_context: int) -> int:
        """Of one sequence."""
        parts: int = max(triton.cdiv(max_context, cut.share), 1)
        return min(parts, cut.most_parts)

    def programs_for(self, batch: int) -> int:
        """Programs a KV head that go through the items of `batch` sequences: as many as there can
        be items, but where fixed shares may be many, each takes every so manyth item."""
        if isinstance(self._cut, Cut):
            return batch + self._even
        items = batch * (self.capacity // self.max_batch)
        return min(items, max(2 * batch, self._even))

    def build(self, slots: torch.Tensor, context_lens: torch.Tensor) -> None:
        """slots: [B] int32 or int64; context_lens: [B] int32, contiguous. Raises ValueError."""
        (batch,) = context_lens.shape
        if not 0 < batch <= self.max_batch or slots.shape != (batch,):
            raise ValueError(f"{batch} lengths, {slots.shape[0]} slots; at most {self.max_batch}")
        if context_lens.dtype != torch.int32 or slots.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"lengths are {context_lens.dtype}, slots {slots.dtype}")
        if not slots.is_contiguous() or not context_lens.is_contiguous():
            raise ValueError("slots and context_lens must be contiguous")
        fixed = self._cut if isinstance(self._cut, FixedCut) else None
        options = {
            "TILE": self._tile,
            "BATCH_BLOCK": max(_MIN_BATCH_BLOCK, triton.next_power_of_2(self.max_batch)),
            "num_warps": 4,
            **pdl.options(self.items.device),
        }
        if isinstance(self._cut, Cut):
            _choose_shares_kernel[(batch,)](
                context_lens, self._shares, batch, self._even, self._guided, self._cut.least,
                **options,
            )  # fmt: skip
        _build_work_list_kernel[(batch,)](
            context_lens,
            slots,
            self._shares,
            self.items,
            batch,
            self.capacity,
            self._even,
            self.programs_for(batch),
            FIXED_SHARE=0 if fixed is None else fixed.share,
            MOST_PARTS=1 if fixed is None else fixed.most_parts,
            ITEM_BLOCK=32,
            **options,
        )
