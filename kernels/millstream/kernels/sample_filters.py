"""Top-k, top-p and min-p as one logit per row, found by a search without a sort.

A filter keeps of a row all tokens whose logit reaches that of some token, which a bisection finds:
each pass over the row (it stays in L2) sums what reaches the middle, and moves one end of the range
to the nearest token's logit, so that it ends after ten to twenty passes. Order and ties are those
of the engine's sampling.py: top-k, then top-p of what is left, then min-p; tokens tied with the
last one kept are kept too. A program does a row; rows that use no filter are not read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from millstream.kernels import pdl
from millstream.kernels.pdl import launch_dependents, wait

_STEP = 8192  # tokens of a row in registers at a time
_NUM_WARPS = 32


@triton.jit  # type: ignore[untyped-decorator]
def _split(
    row_ptr: tl.tensor,
    vocab_size: tl.tensor,
    at: tl.tensor,
    largest: tl.tensor,
    scale: tl.tensor,
    STEP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Of the logits >= at: the sum of exp((logit - largest) * scale) and the least of them; and
    the largest of the others. With a scale of 0 the sum is their number."""
    mass = tl.zeros([STEP], tl.float32)
    above = tl.full([STEP], float("inf"), tl.float32)
    below = tl.full([STEP], float("-inf"), tl.float32)
    for start in tl.range(0, vocab_size, STEP, num_stages=4):
        token_id = start + tl.arange(0, STEP)
        inside = token_id < vocab_size
        logits = tl.load(row_ptr + token_id, mask=inside, other=float("-inf")).to(tl.float32)
        reaches = logits >= at
        mass += tl.where(reaches, tl.exp((logits - largest) * scale), 0.0)
        above = tl.minimum(above, tl.where(reaches, logits, float("inf")))
        below = tl.maximum(below, tl.where(reaches, float("-inf"), logits))
    return tl.sum(mass, axis=0), tl.min(above, axis=0), tl.max(below, axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _search(
    row_ptr: tl.tensor,
    vocab_size: tl.tensor,
    low: tl.tensor,
    largest: tl.tensor,
    scale: tl.tensor,
    needed: tl.tensor,
    STEP: tl.constexpr,
) -> tl.tensor:
    """The largest logit such that the mass of those that reach it is `needed`, if low's is."""
    high = largest
    while low < high:
        middle = low * 0.5 + high * 0.5
        middle = tl.where(middle > low, middle, high)  # neighbouring floats have none between
        mass, above, below = _split(row_ptr, vocab_size, middle, largest, scale, STEP)
        enough = mass >= needed
        low = tl.where(enough, above, low)
        high = tl.where(enough, high, below)
    return low


@triton.jit  # type: ignore[untyped-decorator]
def _thresholds_kernel(
    logits_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    out_ptr: tl.tensor,
    logits_stride: tl.tensor,
    temperatures_stride: tl.tensor,
    top_k_stride: tl.tensor,
    top_p_stride: tl.tensor,
    min_p_stride: tl.tensor,
    vocab_size: tl.tensor,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    wait(PDL)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    temperature = tl.load(temperatures_ptr + slot * temperatures_stride)
    top_k = tl.load(top_k_ptr + slot * top_k_stride)
    top_p = tl.load(top_p_ptr + slot * top_p_stride)
    min_p = tl.load(min_p_ptr + slot * min_p_stride)

    threshold = tl.full([], float("-inf"), tl.float32)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        finite = tl.full([], -3.4028234663852886e38, tl.float32)  # the least that is not -inf
        zero = tl.zeros([], tl.float32)
        _, _, largest = _split(row_ptr, vocab_size, float("inf"), zero, zero, STEP)
        _, smallest, _ = _split(row_ptr, vocab_size, finite, largest, zero, STEP)
        if (top_k > 0) & (top_k < vocab_size):
            needed = top_k.to(tl.float32)
            threshold = _search(row_ptr, vocab_size, smallest, largest, zero, needed, STEP)
        if top_p < 1:
            scale = 1 / temperature
            low = tl.maximum(threshold, smallest)
            total, _, _ = _split(row_ptr, vocab_size, low, largest, scale, STEP)
            needed = top_p * total
            threshold = _search(row_ptr, vocab_size, low, largest, scale, needed, STEP)
        if min_p > 0:
            threshold = tl.maximum(threshold, largest + temperature * tl.log(min_p))
    tl.store(out_ptr + row, threshold)


def thresholds(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """The least logit [R] float32 that each row of logits [R, V] may sample; -inf: any.

    logits: bfloat16, float16 or float32. slots: [R] int32 or int64, contiguous. By slot, of any
    stride, read on the device only: temperatures [slots] float32 (0, greedy: no filter), top_k
    [slots] int32 or int64 (0: off), top_p [slots] float32 (1: off), min_p [slots] float32 (0: off).
    Raises ValueError if shapes, dtypes or strides are others.
    """
    _check(logits, slots, temperatures, top_k, top_p, min_p)
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        _thresholds_kernel[(num_rows,)](
            logits,
            slots,
            temperatures,
            top_k,
            top_p,
            min_p,
            out,
            logits.stride(0),
            temperatures.stride(0),
            top_k.stride(0),
            top_p.stride(0),
            min_p.stride(0),
            vocab_size,
            STEP=_STEP,
            num_warps=_NUM_WARPS,
            **pdl.options(logits.device),
        )
    return out


def _check(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> None:
    if logits.dim() != 2 or not logits.shape[1] or logits.stride(1) != 1:
        raise ValueError(f"logits: {tuple(logits.shape)} with strides {logits.stride()}")
    if not logits.is_floating_point() or logits.dtype == torch.float64:
        raise ValueError(f"logits: {logits.dtype}")
    if slots.shape != logits.shape[:1] or not slots.is_contiguous():
        raise ValueError("slots must be contiguous, one per row")
    integers = (torch.int32, torch.int64)
    if slots.dtype not in integers or top_k.dtype not in integers:
        raise ValueError(f"slots, top_k: {slots.dtype}, {top_k.dtype}, not integers")
    floats = (temperatures, top_p, min_p)
    if any(table.dtype != torch.float32 for table in floats):
        raise ValueError("temperatures, top_p and min_p must be float32")
    if any(table.dim() != 1 or table.shape != top_k.shape for table in floats):
        raise ValueError("temperatures, top_k, top_p and min_p must be [slots]")
