"""Gumbel-max sampling of one token id per row of logits; a greedy row is its argmax.

A random row takes the token whose score x / temperature - log(E) is largest, E = Exp(1) noise of
that token alone: Philox4x32-10 keyed by (seed, position), four token ids to a counter, the very
words of the engine's sampling.py (oracle). Softmax is never formed and logits are read once, in
blocks that leave their best (logit, score, token id) for a second kernel to choose from. Blocks are
of one size whatever the batch, so a row's token does not depend on the other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from millstream.kernels import pdl
from millstream.kernels.pdl import launch_dependents, wait

BLOCK = 2048
_NUM_WARPS = 4
_MAX_BLOCKS = 4096
_MAX_ROWS = 65535  # of a grid's second axis


@triton.jit  # type: ignore[untyped-decorator]
def _log(x: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    """The natural logarithm: an instruction for 30, to 2^-22 of the larger of it and 1."""
    if NATIVE:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        log2 = tl.log2(x)
    return log2 * 0.6931471805599453


@triton.jit  # type: ignore[untyped-decorator]
def _exponential_noise(
    seed: tl.tensor,
    position: tl.tensor,
    first_id: tl.tensor,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
) -> tl.tensor:
    """Exp(1) noise [BLOCK] of token ids first_id and up: -log1p(-u), u = (word + 0.5) / 2^32.

    For small u by five terms of its series (the rest is 2^-22 of it at most): log(1 - u) would lose
    there what makes the smallest E, those that win, differ.
    """
    counter = first_id // 4 + tl.arange(0, BLOCK // 4)
    word_0, word_1, word_2, word_3 = tl.randint4x(
        seed, (position.to(tl.int64) << 32) | counter.to(tl.int64)
    )
    #  [counter, i, j] is word 2 * i + j of the counter, hence of token id 4 * counter + 2 * i + j
    words = tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3)).reshape([BLOCK])
    u = (words.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = tl.minimum(u, 0.999999940395355224609375)  # 1 - 2^-24
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5)))))
    return tl.where(u < 1 / 16, series, -_log(1 - u, NATIVE))


@triton.jit  # type: ignore[untyped-decorator]
def _blocks_kernel(
    logits_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    thresholds_ptr: tl.tensor,
    best_logit_ptr: tl.tensor,
    best_score_ptr: tl.tensor,
    best_id_ptr: tl.tensor,
    logits_stride: tl.tensor,
    temperatures_stride: tl.tensor,
    seeds_stride: tl.tensor,
    vocab_size: tl.tensor,
    first_id: tl.tensor,
    HAS_THRESHOLDS: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Per block of a row: its largest logit, its best score relative to that, and whose it is."""
    launch_dependents(PDL)
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    wait(PDL)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    position = tl.load(positions_ptr + row)
    temperature = tl.load(temperatures_ptr + slot * temperatures_stride)
    logits = tl.load(
        logits_ptr + row * logits_stride + column,
        mask=column < vocab_size,
        other=float("-inf"),
    ).to(tl.float32)
    if HAS_THRESHOLDS:
        logits = tl.where(logits >= tl.load(thresholds_ptr + row), logits, float("-inf"))

    largest = tl.max(logits, axis=0)
    scores = logits
    # Greedy rows draw no noise, nor does a block that thresholds have emptied.
    if (temperature > 0) & (largest > float("-inf")):
        noise = _exponential_noise(
            tl.load(seeds_ptr + slot * seeds_stride),
            position,
            first_id + block * BLOCK,
            BLOCK,
            NATIVE,
        )
        scores = (logits - largest) * (1 / temperature) - _log(noise, NATIVE)
    best_score, best = tl.max(scores, axis=0, return_indices=True)
    out = row * tl.num_programs(0) + block
    tl.store(best_logit_ptr + out, largest)
    tl.store(best_score_ptr + out, best_score)
    tl.store(best_id_ptr + out, first_id + block * BLOCK + best)


@triton.jit  # type: ignore[untyped-decorator]
def of_the_row(logit: tl.tensor, score: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Scores of parts of a row, each relative to its part's largest `logit`, made relative to the
    row's; a greedy row's stay."""
    if temperature > 0:
        relative = (logit - tl.max(logit, axis=0)) * (1 / temperature) + score
        score = tl.where(logit > float("-inf"), relative, float("-inf"))
    return score


@triton.jit  # type: ignore[untyped-decorator]
def _reduce_kernel(
    slots_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    best_logit_ptr: tl.tensor,
    best_score_ptr: tl.tensor,
    best_id_ptr: tl.tensor,
    out_ptr: tl.tensor,
    temperatures_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Per row: the best of its blocks; scores become relative to the row's largest logit."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, WIDTH)
    at = row * num_blocks + block
    wait(PDL)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    temperature = tl.load(temperatures_ptr + slot * temperatures_stride)
    logit = tl.load(best_logit_ptr + at, mask=block < num_blocks, other=float("-inf"))
    score = tl.load(best_score_ptr + at, mask=block < num_blocks, other=float("-inf"))
    best = tl.argmax(of_the_row(logit, score, temperature), axis=0)
    # Rows of NaN have no best: whatever comes out is an id.
    token_id = tl.minimum(tl.load(best_id_ptr + row * num_blocks + best), vocab_size - 1)
    tl.store(out_ptr + row, token_id.to(tl.int64))


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    *,
    thresholds: torch.Tensor | None = None,
) -> torch.Tensor:
    """The token ids [R] int64 of logits [R, V] in bfloat16, float16 or float32, which stay.

    slots, positions: [R] int32 or int64, contiguous; positions are of the tokens to sample.
    temperatures: [slots] float32; 0 is greedy: argmax, the lowest id of equals.
    seeds: [slots] int64, the bits of an unsigned seed. The tables by slot may have any stride and
    are read on the device only: a CUDA graph can hold all of this.
    thresholds: [R] float32, contiguous: tokens of lower logits are not sampled; some token of each
    row must reach it.
    Raises ValueError if shapes, dtypes or strides are others.
    """
    _check(logits, slots, positions, temperatures, seeds, thresholds)
    num_rows, vocab_size = logits.shape
    device = logits.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return token_ids
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    best_logit, best_score = torch.empty(2, num_rows, num_blocks, device=device)
    best_id = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=device)
    options = pdl.options(device)
    _blocks_kernel[(num_blocks, num_rows)](
        logits,
        slots,
        positions,
        temperatures,
        seeds,
        thresholds,
        best_logit,
        best_score,
        best_id,
        logits.stride(0),
        temperatures.stride(0),
        seeds.stride(0),
        vocab_size,
        0,
        HAS_THRESHOLDS=thresholds is not None,
        BLOCK=BLOCK,
        NATIVE=device.type == "cuda" and torch.version.hip is None,
        num_warps=_NUM_WARPS,
        **options,
    )
    _reduce_kernel[(num_rows,)](
        slots,
        temperatures,
        best_logit,
        best_score,
        best_id,
        token_ids,
        temperatures.stride(0),
        vocab_size,
        num_blocks,
        WIDTH=triton.next_power_of_2(num_blocks),
        num_warps=1,
        **options,
    )
    return token_ids


def _check(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    thresholds: torch.Tensor | None,
) -> None:
    if logits.dim() != 2 or not 0 < logits.shape[1] <= BLOCK * _MAX_BLOCKS:
        raise ValueError(f"logits have shape {tuple(logits.shape)}, not [R, V]")
    if logits.shape[0] > _MAX_ROWS:
        raise ValueError(f"{logits.shape[0]} rows of logits, more than {_MAX_ROWS}")
    if not logits.is_floating_point() or logits.dtype == torch.float64 or logits.stride(1) != 1:
        raise ValueError(f"logits: {logits.dtype} with strides {logits.stride()}")
    rows = (logits.shape[0],)
    per_row = [slots, positions] if thresholds is None else [slots, positions, thresholds]
    if any(tensor.shape != rows or not tensor.is_contiguous() for tensor in per_row):
        raise ValueError("slots, positions and thresholds must be contiguous, one per row")
    integers = (torch.int32, torch.int64)
    if slots.dtype not in integers or positions.dtype not in integers:
        raise ValueError(f"slots, positions: {slots.dtype}, {positions.dtype}, not integers")
    if temperatures.dim() != 1 or temperatures.shape != seeds.shape:
        raise ValueError("temperatures and seeds must be [slots]")
    if temperatures.dtype != torch.float32 or seeds.dtype != torch.int64:
        raise ValueError(f"temperatures, seeds: {temperatures.dtype}, {seeds.dtype}")
    if thresholds is not None and thresholds.dtype != torch.float32:
        raise ValueError(f"thresholds: {thresholds.dtype}, not float32")
