"""Gumbel-max sampling where each rank has the logits of a part of the vocabulary (sample.py).

best_of_shard leaves three numbers a row of a rank's part; once all ranks have those of all,
best_of_shards names the token. Rows are greedy or drawn without filters. Oracle: the engine's
shard_sampling.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from millstream.kernels import pdl
from millstream.kernels.pdl import launch_dependents, wait
from millstream.kernels.sample import BLOCK, _blocks_kernel, _check, of_the_row

_NUM_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _shard_kernel(
    slots_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    best_logit_ptr: tl.tensor,
    best_score_ptr: tl.tensor,
    best_id_ptr: tl.tensor,
    out_ptr: tl.tensor,
    temperatures_stride: tl.tensor,
    num_rows: tl.tensor,
    num_blocks: tl.tensor,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Per row: its blocks' best, as one of a rank."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, WIDTH)
    at = row * num_blocks + block
    wait(PDL)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    temperature = tl.load(temperatures_ptr + slot * temperatures_stride)
    logit = tl.load(best_logit_ptr + at, mask=block < num_blocks, other=float("-inf"))
    score = tl.load(best_score_ptr + at, mask=block < num_blocks, other=float("-inf"))
    score = of_the_row(logit, score, temperature)
    best_score, best = tl.max(score, axis=0, return_indices=True)
    # Rows of NaN have no best: whatever comes out is an id.
    best = tl.minimum(best, num_blocks - 1)
    token_id = tl.load(best_id_ptr + row * num_blocks + best)
    tl.store(out_ptr + row, tl.max(logit, axis=0))
    tl.store(out_ptr + num_rows + row, best_score)
    tl.store(out_ptr + 2 * num_rows + row, token_id.to(tl.float32))


@triton.jit  # type: ignore[untyped-decorator]
def _merge_kernel(
    slots_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    shards_ptr: tl.tensor,
    out_ptr: tl.tensor,
    temperatures_stride: tl.tensor,
    num_rows: tl.tensor,
    num_shards: tl.tensor,
    vocab_size: tl.tensor,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Per row: the best of the ranks' best; scores become relative to the row's largest logit."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    shard = tl.arange(0, WIDTH)
    inside = shard < num_shards
    at = shards_ptr + shard * (3 * num_rows) + row
    wait(PDL)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    temperature = tl.load(temperatures_ptr + slot * temperatures_stride)
    logit = tl.load(at, mask=inside, other=float("-inf"))
    score = tl.load(at + num_rows, mask=inside, other=float("-inf"))
    score = of_the_row(logit, score, temperature)
    best = tl.minimum(tl.argmax(score, axis=0), num_shards - 1)
    token_id = tl.load(shards_ptr + best * (3 * num_rows) + 2 * num_rows + row).to(tl.int64)
    tl.store(out_ptr + row, tl.minimum(token_id, vocab_size - 1))


def best_of_shard(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    *,
    first_id: int,
) -> torch.Tensor:
    """[3, R] float32: of each row its largest logit, its best score relative to that (of a greedy
    row: the logit), and the id of which that is, exact below 2**24.

    logits: [R, V], of the ids from first_id on, a multiple of 4; the rest as in sample.sample.
    Raises ValueError if shapes, dtypes or strides are others.
    """
    _check(logits, slots, positions, temperatures, seeds, None)
    num_rows, width = logits.shape
    if first_id % 4 or first_id + width > 1 << 24:
        raise ValueError(f"ids from {first_id} to {first_id + width}")
    device = logits.device
    out = torch.empty(3, num_rows, device=device)
    if not num_rows:
        return out
    num_blocks = triton.cdiv(width, BLOCK)
    best_logit, best_score = torch.empty(2, num_rows, num_blocks, device=device)
    best_id = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=device)
    options = pdl.options(device)
    _blocks_kernel[(num_blocks, num_rows)](
        logits,
        slots,
        positions,
        temperatures,
        seeds,
        None,
        best_logit,
        best_score,
        best_id,
        logits.stride(0),
        temperatures.stride(0),
        seeds.stride(0),
        width,
        first_id,
        HAS_THRESHOLDS=False,
        BLOCK=BLOCK,
        NATIVE=device.type == "cuda" and torch.version.hip is None,
        num_warps=_NUM_WARPS,
        **options,
    )
    _shard_kernel[(num_rows,)](
        slots,
        temperatures,
        best_logit,
        best_score,
        best_id,
        out,
        temperatures.stride(0),
        num_rows,
        num_blocks,
        WIDTH=triton.next_power_of_2(num_blocks),
        num_warps=1,
        **options,
    )
    return out


def best_of_shards(
    shards: torch.Tensor, slots: torch.Tensor, temperatures: torch.Tensor, *, vocab_size: int
) -> torch.Tensor:
    """The token ids [R] int64 of every rank's best [ranks, 3, R], contiguous; the lowest of equals.

    slots: [R]; temperatures: [slots] float32. Raises ValueError if shapes or dtypes are others.
    """
    num_rows = len(slots)
    if shards.dim() != 3 or shards.shape[1:] != (3, num_rows) or not shards.is_contiguous():
        raise ValueError(f"shards: {tuple(shards.shape)}, not [ranks, 3, {num_rows}], contiguous")
    if shards.dtype != torch.float32 or temperatures.dtype != torch.float32:
        raise ValueError(f"dtypes: {shards.dtype}, {temperatures.dtype}")
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=shards.device)
    if num_rows:
        _merge_kernel[(num_rows,)](
            slots,
            temperatures,
            shards,
            token_ids,
            temperatures.stride(0),
            num_rows,
            len(shards),
            vocab_size,
            WIDTH=triton.next_power_of_2(len(shards)),
            num_warps=1,
            **pdl.options(shards.device),
        )
    return token_ids
