"""Gumbel-max sampling where each rank has the logits of a part of the vocabulary (sample.py).

best_of_shard chooses a block of a rank's part, a token of it, and leaves three numbers a row; once
all ranks have those of all, best_of_shards names the token: the one of the block that would have
been chosen from all. Rows are greedy or drawn without filters. Oracle: the engine's
shard_sampling.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from millstream.kernels import pdl
from millstream.kernels.pdl import launch_dependents, wait
from millstream.kernels.sample import Rows, block_scores, choose


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
    """Per row: the token of the rank whose block has the best score."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    shard = tl.arange(0, WIDTH)
    inside = shard < num_shards
    at = shards_ptr + shard * (3 * num_rows) + row
    wait(PDL)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    temperature = tl.load(temperatures_ptr + slot * temperatures_stride)
    largest = tl.load(at, mask=inside, other=float("-inf"))
    noisy = tl.load(at + num_rows, mask=inside, other=float("-inf"))
    best = tl.argmax(block_scores(largest, noisy, temperature), axis=0)
    best = tl.minimum(best, num_shards - 1)
    token_id = tl.load(shards_ptr + best * (3 * num_rows) + 2 * num_rows + row).to(tl.int64)
    tl.store(out_ptr + row, tl.minimum(token_id, vocab_size - 1))


def best_of_shard(rows: Rows, *, first_id: int) -> torch.Tensor:
    """[3, R] float32: of each row the two parts of its best block's score (of a greedy row: its
    largest logit, 0) and the id chosen of that block, exact below 2**24.

    rows: of logits of the ids from first_id on, a multiple of block_size, which is the whole
    vocabulary's; without thresholds.
    Raises ValueError if ids, shapes, dtypes or strides are others, or there are thresholds.
    """
    end_id = first_id + rows.logits.shape[-1]
    if first_id % rows.block_size or end_id > 1 << 24:
        raise ValueError(f"ids from {first_id} to {end_id}")
    if rows.thresholds is not None:
        raise ValueError("a part of the vocabulary is sampled without thresholds")
    out = torch.empty(3, len(rows.logits), device=rows.logits.device)
    choose(rows, out, first_id=first_id)
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
