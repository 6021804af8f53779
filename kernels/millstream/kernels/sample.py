"""Gumbel-max sampling of one token id per row of logits, in two levels; a greedy row is its argmax.

The logits are read once, without any noise, for the mass of each block of the vocabulary. A second
kernel then chooses a block of a row by log mass - log(E), and a token of that block by x /
temperature - log(E), E = Exp(1) noise of that entry alone: Philox4x32-10 keyed by (seed, position)
and the block's or token's id, the very words of the engine's noise.py. Oracle: the engine's
sampling.py. A greedy row takes the same two steps by its largest logits. A block's sum has the same
order in any batch, so a row's token does not depend on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from millstream.kernels import pdl
from millstream.kernels.decode_state import SlotTables, check_tables, store_state
from millstream.kernels.pdl import launch_dependents, wait
from millstream.kernels.sample_masses import LARGEST_BLOCK, block_masses, finite
from millstream.kernels.sample_noise import block_noise, token_noise

_CHOICE_WARPS = 8
_MAX_BLOCKS = 4096
_MAX_ROWS = 65535  # of a grid's second axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What is sampled from, and how. The tables by slot may have any stride and are read on the
    device only: a CUDA graph can hold all of this.

    logits: [R, V] in bfloat16, float16 or float32, which stay.
    slots, positions: [R] int32 or int64, contiguous; positions are of the tokens to sample.
    temperatures: [slots] float32; 0 is greedy: argmax, the lowest id of equals.
    seeds: [slots] int64, the bits of an unsigned seed.
    thresholds: [R] float32, contiguous: tokens of lower logits are not sampled; some token of each
    row must reach it.
    block_size: a power of two from 16 to 2048; what a seed samples depends on it.
    """

    logits: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    temperatures: torch.Tensor
    seeds: torch.Tensor
    thresholds: torch.Tensor | None = None
    block_size: int


@triton.jit  # type: ignore[untyped-decorator]
def block_scores(largest: tl.tensor, noisy: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """largest / temperature + noisy in float64, the same bits for a block alone and among others;
    a greedy row's are its largest logits."""
    divisor = tl.where(temperature > 0, temperature, 1.0).to(tl.float64)
    return largest.to(tl.float64) / divisor + noisy.to(tl.float64)


@triton.jit  # type: ignore[untyped-decorator]
def _choose_block(
    largest: tl.tensor,
    log_sum: tl.tensor,
    temperature: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    block: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Of blocks [n]: the index of the best score, and that score's two parts."""
    noisy = tl.zeros_like(largest)
    if temperature > 0:
        noisy = log_sum - tl.log(block_noise(seed, position, block))
    best = tl.argmax(block_scores(largest, noisy, temperature), axis=0)
    chosen = tl.arange(0, largest.shape[0]) == best
    best_largest = tl.max(tl.where(chosen, largest, float("-inf")), axis=0)
    return best, best_largest, tl.max(tl.where(chosen, noisy, float("-inf")), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _choose_token(
    logits: tl.tensor,
    largest: tl.tensor,
    temperature: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    first_id: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Of a block's logits [BLOCK], the column that the row samples."""
    scores = logits
    if temperature > 0:
        noise = token_noise(seed, position, first_id, BLOCK)
        scores = (logits - finite(largest)) / temperature - tl.log(noise)
    return tl.argmax(scores, axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _choice_kernel(
    logits_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    thresholds_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    log_sum_ptr: tl.tensor,
    out_ptr: tl.tensor,
    computed_ptr: tl.tensor,
    last_tokens_ptr: tl.tensor,
    padding_slot: tl.tensor,
    logits_stride: tl.tensor,
    temperatures_stride: tl.tensor,
    seeds_stride: tl.tensor,
    width: tl.tensor,
    num_blocks: tl.tensor,
    first_id: tl.tensor,
    num_rows: tl.tensor,
    HAS_THRESHOLDS: tl.constexpr,
    SHARD: tl.constexpr,
    ADVANCE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Per row: a block, and a token of it. SHARD: as the three numbers of sample_shards.py.
    ADVANCE: it is the last of the row's slot, which has computed all tokens before it."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, WIDTH)
    at = row * num_blocks + index
    # Before the wait: the step's inputs. Positions may have been computed just before.
    slot = tl.load(slots_ptr + row).to(tl.int64)
    temperature = tl.load(temperatures_ptr + slot * temperatures_stride)
    seed = tl.load(seeds_ptr + slot * seeds_stride)
    wait(PDL)
    position = tl.load(positions_ptr + row)
    largest = tl.load(largest_ptr + at, mask=index < num_blocks, other=float("-inf"))
    log_sum = tl.load(log_sum_ptr + at, mask=index < num_blocks, other=0.0)
    block, block_largest, noisy = _choose_block(
        largest, log_sum, temperature, seed, position, first_id // BLOCK + index
    )
    # Rows of NaN have no best: whatever comes out is an id.
    first = tl.minimum(block, num_blocks - 1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    logits = tl.load(
        logits_ptr + row * logits_stride + column, mask=column < width, other=float("-inf")
    ).to(tl.float32)
    if HAS_THRESHOLDS:
        logits = tl.where(logits >= tl.load(thresholds_ptr + row), logits, float("-inf"))
    token = _choose_token(
        logits, block_largest, temperature, seed, position, first_id + first, BLOCK
    )
    token_id = first_id + tl.minimum(first + token, width - 1)
    if SHARD:
        tl.store(out_ptr + row, block_largest)
        tl.store(out_ptr + num_rows + row, noisy)
        tl.store(out_ptr + 2 * num_rows + row, token_id.to(tl.float32))
    else:
        tl.store(out_ptr + row, token_id.to(tl.int64))
    if ADVANCE:
        computed = position.to(tl.int64)
        last_token = token_id.to(tl.int64)
        store_state(computed_ptr, last_tokens_ptr, padding_slot, slot, computed, last_token)


def sample(rows: Rows, *, advanced: SlotTables | None = None) -> torch.Tensor:
    """The token ids [R] int64 that rows sample.

    advanced: the tables in which each slot (int64; distinct, but for the last, which stays as it
    is) has then computed `positions` tokens, and sampled the row's last.
    Raises ValueError if shapes, dtypes, strides or block_size are others.
    """
    token_ids = torch.empty(len(rows.logits), dtype=torch.int64, device=rows.logits.device)
    choose(rows, token_ids, advanced=advanced)
    return token_ids


def choose(
    rows: Rows,
    out: torch.Tensor,
    *,
    first_id: int | None = None,
    advanced: SlotTables | None = None,
) -> None:
    """The two launches of `sample`, which leave token ids in out [R] int64; or, of logits of the
    ids from first_id on, the three numbers of sample_shards.py in out [3, R] float32."""
    _check(rows)
    if advanced is not None:
        check_tables(rows.slots, advanced)
    logits, block_size, thresholds = rows.logits, rows.block_size, rows.thresholds
    num_rows, width = logits.shape
    if not num_rows:
        return
    largest, log_sums = block_masses(logits, rows.slots, rows.temperatures, thresholds, block_size)
    num_blocks = largest.shape[1]
    _choice_kernel[(num_rows,)](
        logits,
        rows.slots,
        rows.positions,
        rows.temperatures,
        rows.seeds,
        thresholds,
        largest,
        log_sums,
        out,
        None if advanced is None else advanced.computed,
        None if advanced is None else advanced.last_tokens,
        0 if advanced is None else len(advanced.computed) - 1,
        logits.stride(0),
        rows.temperatures.stride(0),
        rows.seeds.stride(0),
        width,
        num_blocks,
        first_id or 0,
        num_rows,
        HAS_THRESHOLDS=thresholds is not None,
        SHARD=first_id is not None,
        ADVANCE=advanced is not None,
        WIDTH=triton.next_power_of_2(num_blocks),
        BLOCK=block_size,
        num_warps=_CHOICE_WARPS,
        **pdl.options(logits.device),
    )


def _check(rows: Rows) -> None:
    logits, block_size, thresholds = rows.logits, rows.block_size, rows.thresholds
    slots, positions = rows.slots, rows.positions
    temperatures, seeds = rows.temperatures, rows.seeds
    if block_size & (block_size - 1) or not 16 <= block_size <= LARGEST_BLOCK:
        raise ValueError(f"block_size: {block_size}, not a power of two from 16 to {LARGEST_BLOCK}")
    if logits.dim() != 2 or not 0 < logits.shape[1] <= block_size * _MAX_BLOCKS:
        raise ValueError(f"logits have shape {tuple(logits.shape)}, not [R, V]")
    if logits.shape[0] > _MAX_ROWS:
        raise ValueError(f"{logits.shape[0]} rows of logits, more than {_MAX_ROWS}")
    if not logits.is_floating_point() or logits.dtype == torch.float64 or logits.stride(1) != 1:
        raise ValueError(f"logits: {logits.dtype} with strides {logits.stride()}")
    per_row = [slots, positions] if thresholds is None else [slots, positions, thresholds]
    if any(tensor.shape != logits.shape[:1] or not tensor.is_contiguous() for tensor in per_row):
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
