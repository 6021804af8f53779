"""The ranks' sum of parts, added to the residual, and its RMSNorm: one kernel, a row per program.

Each rank writes its part of a row into every rank's memory, takes the others' parts out of its own,
and goes on as add_rms_norm does; no rank waits for another but for the data itself. Parts are added
in the ranks' order, so all ranks get the same bits. Two ways for a part to say that it is there:

- packed: each 64-bit word carries four bytes of data and the number of the exchange. It is there
  when it is seen: the way with the least latency, but it sends twice the bytes.
- flagged: the data, then one number a row, released to the whole system. For larger messages.

A row's mail lies in one of two places by turns. That suffices: a rank writes exchange k + 2 after
it has all parts of k + 1, and another rank sends k + 1 after its own kernel of exchange k ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from millstream.kernels import pdl
from millstream.kernels.pdl import launch_dependents, wait

_WORDS_PER_WARP = 256
_MAX_WARPS = 16
_PLACES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Mailboxes:
    """Memory of every rank that all ranks write to; the same sizes on all of them."""

    addresses: torch.Tensor  # [ranks] int64: of each rank's memory, as this process sees it
    exchanges: torch.Tensor  # [max_rows] int32, zeros at first: of each row so far
    rank: int
    hidden_size: int
    packed: bool

    @classmethod
    def create(
        cls,
        addresses: torch.Tensor,
        *,
        rank: int,
        hidden_size: int,
        max_rows: int,
        packed: bool,
    ) -> Self:
        """addresses: of num_bytes each, all zeros, aligned to 16 bytes."""
        exchanges = torch.zeros(max_rows, dtype=torch.int32, device=addresses.device)
        return cls(
            addresses=addresses,
            exchanges=exchanges,
            rank=rank,
            hidden_size=hidden_size,
            packed=packed,
        )

    @property
    def max_rows(self) -> int:
        return len(self.exchanges)

    def holds(self, part: torch.Tensor) -> bool:
        """Whether such parts [n, hidden] can be exchanged."""
        rows, hidden = part.shape
        return rows <= self.max_rows and hidden == self.hidden_size and hidden % 2 == 0

    @staticmethod
    def num_bytes(ranks: int, hidden_size: int, max_rows: int, *, packed: bool) -> int:
        """Of each rank's memory. Flags, if there are any, lie behind the data."""
        rows = _PLACES * ranks * max_rows
        return rows * hidden_size * 4 if packed else rows * (hidden_size * 2 + 4)


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
def _memory_of(addresses_ptr: tl.tensor, rank: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    return tl.multiple_of(tl.load(addresses_ptr + rank).to(tl.pointer_type(TYPE)), 16)


@triton.jit  # type: ignore[untyped-decorator]
def _packed_parts(
    addresses_ptr: tl.tensor,
    part: tl.tensor,
    row: tl.tensor,
    exchange: tl.tensor,
    rank: tl.tensor,
    max_rows: tl.tensor,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Sends this rank's part and returns the sum of all: the even columns and the odd ones."""
    word = tl.arange(0, BLOCK)
    inside = word < WORDS
    place = (exchange % 2).to(tl.int64) * RANKS
    number = exchange.to(tl.int64)
    sent = (part.to(tl.int64) << 32) | number
    for peer in tl.static_range(RANKS):
        box = _memory_of(addresses_ptr, peer, tl.int64)
        tl.store(box + ((place + rank) * max_rows + row) * WORDS + word, sent, mask=inside)
    own = _memory_of(addresses_ptr, rank, tl.int64)
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for source in tl.static_range(RANKS):
        at = own + ((place + source) * max_rows + row) * WORDS + word
        seen = tl.load(at, mask=inside, other=number, volatile=True)
        while tl.max((seen.to(tl.int32) != exchange).to(tl.int32), axis=0) != 0:
            seen = tl.load(at, mask=inside, other=number, volatile=True)
        data = (seen >> 32).to(tl.int32)
        low += _low(data)
        high += _high(data)
    return low, high


@triton.jit  # type: ignore[untyped-decorator]
def _flagged_parts(
    addresses_ptr: tl.tensor,
    part: tl.tensor,
    row: tl.tensor,
    exchange: tl.tensor,
    rank: tl.tensor,
    max_rows: tl.tensor,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """As _packed_parts."""
    word = tl.arange(0, BLOCK)
    inside = word < WORDS
    place = (exchange % 2).to(tl.int64) * RANKS
    flags = (2 * RANKS * max_rows).to(tl.int64) * WORDS
    mine = (place + rank) * max_rows + row
    for peer in tl.static_range(RANKS):
        box = _memory_of(addresses_ptr, peer, tl.int32)
        tl.store(box + mine * WORDS + word, part, mask=inside)
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        box = _memory_of(addresses_ptr, peer, tl.int32)
        tl.atomic_xchg(box + flags + mine, exchange, sem="release", scope="sys")
    own = _memory_of(addresses_ptr, rank, tl.int32)
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for source in tl.static_range(RANKS):
        theirs = (place + source) * max_rows + row
        flag = own + flags + theirs
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        while seen != exchange:
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        tl.debug_barrier()
        data = tl.load(own + theirs * WORDS + word, mask=inside, other=0, volatile=True)
        low += _low(data)
        high += _high(data)
    return low, high


@triton.jit(do_not_specialize=["rank"])  # type: ignore[untyped-decorator]
def _sum_add_rms_norm_kernel(
    part_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    exchanges_ptr: tl.tensor,
    rank: tl.tensor,
    max_rows: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    PACKED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """All pointers to rows are to pairs of bfloat16, as int32."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, BLOCK)
    inside = word < WORDS
    weight = tl.load(weight_ptr + word, mask=inside, other=0)
    wait(PDL)
    # Never 0, which is what memory holds at first; the same places by turns.
    exchange = tl.load(exchanges_ptr + row) % 0x7FFFFFFE + 1
    part = tl.load(part_ptr + row * WORDS + word, mask=inside, other=0)
    residual = residual_ptr + row * residual_stride + word
    before = tl.load(residual, mask=inside, other=0)
    if PACKED:
        low, high = _packed_parts(
            addresses_ptr, part, row, exchange, rank, max_rows, WORDS, BLOCK, RANKS
        )
    else:
        low, high = _flagged_parts(
            addresses_ptr, part, row, exchange, rank, max_rows, WORDS, BLOCK, RANKS
        )
    low = _round(_round(low) + _low(before))
    high = _round(_round(high) + _high(before))
    tl.store(residual, _pair(low, high), mask=inside)
    mean_square = tl.sum(low * low + high * high, axis=0) / (2 * WORDS)
    scale = tl.rsqrt(mean_square + eps)
    low = _round(_low(weight) * _round(low * scale))
    high = _round(_high(weight) * _round(high * scale))
    tl.store(out_ptr + row * WORDS + word, _pair(low, high), mask=inside)
    tl.store(exchanges_ptr + row, exchange)


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
    out = torch.empty_like(part)
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
        mailboxes.exchanges,
        mailboxes.rank,
        mailboxes.max_rows,
        residual.stride(0) // 2,
        eps,
        WORDS=words,
        BLOCK=block,
        RANKS=len(mailboxes.addresses),
        PACKED=mailboxes.packed,
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
