"""The ranks' sum of parts, added to the residual, and its RMSNorm: one kernel, a row per program.

Each rank writes its part of a row into every other rank's memory, takes the others' parts out of
its own, and goes on as add_rms_norm does. Nothing but the data is sent and nothing else is waited
for: a mailbox holds a value that no part holds (_EMPTY), until something else is there; who has
read it empties it. Parts are added in the ranks' order, so all ranks get the same bits.

A row's mail lies in one of two places by turns. That suffices: a rank writes exchange k + 2 after
it has all parts of k + 1, and another rank sends k + 1 after its own kernel of exchange k, which
emptied the place, has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from millstream.kernels import pdl
from millstream.kernels.boxes import padded
from millstream.kernels.pdl import launch_dependents, wait

_WORDS_PER_WARP = 256
_MAX_WARPS = 16
_PLACES = 2
# Two bfloat16 of which the second is -0, which is sent as 0.
_EMPTY = tl.constexpr(-(1 << 31))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mailboxes:
    """Memory of every rank that all ranks write to; the same sizes on all of them."""

    addresses: torch.Tensor  # [ranks] int64: of each rank's memory, as this process sees it
    places: torch.Tensor  # [max_rows] int32, zeros at first: which place each row is to use
    rank: int
    hidden_size: int

    @classmethod
    def create(cls, addresses: torch.Tensor, *, rank: int, hidden_size: int, max_rows: int) -> Self:
        """addresses: of num_bytes each, aligned to 16 bytes and, on every rank, empty."""
        places = torch.zeros(max_rows, dtype=torch.int32, device=addresses.device)
        return cls(addresses=addresses, places=places, rank=rank, hidden_size=hidden_size)

    @property
    def max_rows(self) -> int:
        return len(self.places)

    def holds(self, part: torch.Tensor) -> bool:
        """Whether such parts [n, hidden] can be exchanged."""
        rows, hidden = part.shape
        return rows <= self.max_rows and hidden == self.hidden_size and hidden % 2 == 0

    @staticmethod
    def num_bytes(ranks: int, hidden_size: int, max_rows: int) -> int:
        """Of each rank's memory."""
        return _PLACES * ranks * max_rows * hidden_size * 2

    @staticmethod
    def empty(memory: torch.Tensor) -> None:
        """Makes a rank's memory [num_bytes] uint8 ready for the first exchange."""
        memory.view(torch.int32).fill_(_EMPTY.value)


@triton.jit  # type: ignore[untyped-decorator]
def _low(pair: tl.tensor) -> tl.tensor:
    """The first of two bfloat16 in an int32."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _high(pair: tl.tensor) -> tl.tensor:
    return (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _round(x: tl.tensor) -> tl.tensor:
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _pair(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Two float32 that are bfloat16 values, in an int32."""
    return ((low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF) | high.to(tl.int32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _memory_of(addresses_ptr: tl.tensor, rank: tl.tensor) -> tl.tensor:
    return tl.multiple_of(tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int32)), 16)


@triton.jit  # type: ignore[untyped-decorator]
def _send(
    addresses_ptr: tl.tensor,
    part: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    rank: tl.tensor,
    RANKS: tl.constexpr,
) -> None:
    """Writes this rank's part to offsets `at` of every other rank's memory."""
    part = tl.where(part == _EMPTY, 0, part)
    for peer in tl.static_range(RANKS):
        if peer != rank:
            tl.store(_memory_of(addresses_ptr, peer) + at, part, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _receive(mailbox: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Waits until all of a part is there, takes it, and leaves the mailbox empty."""
    part = tl.load(mailbox, mask=inside, other=0, volatile=True)
    while tl.max((part == _EMPTY).to(tl.int32), axis=0) != 0:
        part = tl.load(mailbox, mask=inside, other=0, volatile=True)
    tl.store(mailbox, tl.full(part.shape, _EMPTY, tl.int32), mask=inside)
    return part


@triton.jit(do_not_specialize=["rank"])  # type: ignore[untyped-decorator]
def _sum_add_rms_norm_kernel(
    part_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    places_ptr: tl.tensor,
    rank: tl.tensor,
    max_rows: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """All pointers to rows are to pairs of bfloat16, as int32."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, BLOCK)
    inside = word < WORDS
    weight = tl.load(weight_ptr + word, mask=inside, other=0)
    wait(PDL)
    place = tl.load(places_ptr + row)
    part = tl.load(part_ptr + row * WORDS + word, mask=inside, other=0)
    first = place.to(tl.int64) * RANKS * max_rows + row
    _send(addresses_ptr, part, (first + rank * max_rows) * WORDS + word, inside, rank, RANKS)

    residual = residual_ptr + row * residual_stride + word
    before = tl.load(residual, mask=inside, other=0)
    own = _memory_of(addresses_ptr, rank)
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for source in tl.static_range(RANKS):
        if source == rank:
            pair = part
        else:
            pair = _receive(own + (first + source * max_rows) * WORDS + word, inside)
        low += _low(pair)
        high += _high(pair)
    low = _round(_round(low) + _low(before))
    high = _round(_round(high) + _high(before))
    tl.store(residual, _pair(low, high), mask=inside)
    mean_square = tl.sum(low * low + high * high, axis=0) / (2 * WORDS)
    scale = tl.rsqrt(mean_square + eps)
    low = _round(_low(weight) * _round(low * scale))
    high = _round(_high(weight) * _round(high * scale))
    tl.store(out_ptr + row * WORDS + word, _pair(low, high), mask=inside)
    tl.store(places_ptr + row, 1 - place)


def sum_add_rms_norm(
    part: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    mailboxes: Mailboxes,
) -> torch.Tensor:
    """Adds the sum of all ranks' parts to residual, in place; returns RMSNorm(residual) * weight.

    Every rank calls it, with as many rows and the same residual and weight, in the same order.

    part: [n, hidden], contiguous; residual: [n, hidden], rows of unit stride and an even distance;
    weight: [hidden]; all bfloat16. Raises ValueError otherwise, and for more rows than fit.
    """
    _check(part, residual, weight, mailboxes)
    num_rows, hidden = part.shape
    out = padded(num_rows, hidden, like=part)
    if not num_rows:
        return out
    words = hidden // 2
    block = triton.next_power_of_2(words)
    _sum_add_rms_norm_kernel[(num_rows,)](
        part.view(torch.int32),
        residual.view(torch.int32),
        weight.view(torch.int32),
        out.view(torch.int32),
        mailboxes.addresses,
        mailboxes.places,
        mailboxes.rank,
        mailboxes.max_rows,
        residual.stride(0) // 2,
        eps,
        WORDS=words,
        BLOCK=block,
        RANKS=len(mailboxes.addresses),
        num_warps=min(max(block // _WORDS_PER_WARP, 1), _MAX_WARPS),
        **pdl.options(part.device),
    )
    return out


def _check(
    part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, mailboxes: Mailboxes
) -> None:
    hidden = mailboxes.hidden_size
    if part.shape != (len(part), hidden) or residual.shape != part.shape:
        raise ValueError(f"part, residual: {part.shape}, {residual.shape}, not [n, {hidden}]")
    if weight.shape != (hidden,) or hidden % 2:
        raise ValueError(f"weight: {tuple(weight.shape)}, not [{hidden}], an even number")
    if any(tensor.dtype != torch.bfloat16 for tensor in (part, residual, weight)):
        raise ValueError(f"dtypes: {part.dtype}, {residual.dtype}, {weight.dtype}, not bfloat16")
    if not part.is_contiguous() or residual.stride(1) != 1 or residual.stride(0) % 2:
        raise ValueError("part must be contiguous, residual of unit stride and an even distance")
    if not mailboxes.holds(part):
        raise ValueError(f"{len(part)} rows, more than {mailboxes.max_rows}")
