"""The attention kernels that ship as compile_sm90 takes them, by shape and batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
from tests.bench.prefill_candidates import shipped_prefill
from triton.tools.tensor_descriptor import TensorDescriptor

from millstream.kernels import (
    paged_decode,
    paged_decode_kernel,
    paged_prefill,
    qk_norm_rope_store,
    work_list,
)
from millstream.kernels.decode_configs import invariant_config
from millstream.kernels.prefill_configs import PrefillConfig

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
HEADS = [(16, 8, 128), (40, 8, 128), (32, 4, 128), (9, 3, 64), (32, 8, 64)]


def attention_jobs() -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    lists = {"TILE": 64, "BATCH_BLOCK": 256, "ITEM_BLOCK": 32}
    arguments: tuple[Any, ...] = (I32, I64, I32, 5, 528, 256, 322, 322)
    for cut in ({"FIXED_SHARE": 0, "MOST_PARTS": 1}, {"FIXED_SHARE": 512, "MOST_PARTS": 32}):
        yield work_list._build_work_list_kernel, arguments, {"NUM_KV_HEADS": 8, **lists, **cut}
    for heads in HEADS:
        for block_size in (64, 16):
            for batch in (1, 48, 128, 256):
                yield decode_job(*heads, block_size, batch)
            yield decode_job(*heads, block_size, 256, repeat=True)
            for config in shipped_prefill(heads[0] // heads[1], heads[2]):
                yield prefill_job(*heads, block_size, config)
    yield store_job(16, 8, 128, norm=True)
    yield store_job(9, 3, 64, norm=False)


def decode_job(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    batch: int,
    *,
    repeat: bool = False,
) -> Any:
    shape = num_heads, num_kv_heads, head_dim, BF16
    config = invariant_config(*shape) if repeat else paged_decode.choose_config(batch, *shape)
    group = num_heads // num_kv_heads
    heads = triton.next_power_of_2(group)
    boxes = None
    if config.tail_apart and config.tile <= block_size:
        tokens = torch.empty(1024, num_kv_heads, head_dim, dtype=BF16, device="meta")
        boxes = TensorDescriptor.from_tensor(tokens, [config.tile, 1, head_dim])
    pointers = (BF16, BF16, BF16, I32, I32, I32, F32, F32, F32)
    arguments = (BF16, boxes, boxes, *pointers, 64, 0.1, 322)
    constants = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK": block_size,
        "TILE": config.tile,
        "NUM_STAGES": config.num_stages,
        "TOKENS_ARE_ROWS": config.tokens_are_rows,
        "TAIL_APART": config.tail_apart,
        "COMBINE_HEADS": heads,
        "COMBINE_PARTS": paged_decode.combine_parts(config.num_warps, heads),
        "REPEAT": repeat,
        "BOXES": boxes is not None,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    if config.max_registers is not None:
        constants["maxnreg"] = config.max_registers
    return paged_decode_kernel.paged_decode_kernel, arguments, constants


def prefill_job(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, config: PrefillConfig
) -> Any:
    arguments = (BF16, BF16, BF16, BF16, I32, I64, I32, I32, 5, 64, 0.1)
    constants = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK": block_size,
        "QUERY_TILE": config.query_tile,
        "HEADS": config.heads,
        "KEY_TILE": config.key_tile,
        "NUM_STAGES": config.num_stages,
        "TAIL_APART": config.tail_apart,
        "SEQUENCES_BLOCK": paged_prefill._SEQUENCES_BLOCK,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    return paged_prefill._paged_prefill_kernel, arguments, constants


def store_job(num_heads: int, num_kv_heads: int, head_dim: int, *, norm: bool) -> Any:
    width, half_block = (num_heads + 2 * num_kv_heads) * head_dim, head_dim // 2
    arguments = (BF16, BF16, BF16, BF16, BF16, I64, I64, BF16, BF16, BF16, width, head_dim, 1e-6)
    constants = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "HALF_BLOCK": half_block,
        "HEADS": qk_norm_rope_store._HEADS,
        "NORM": norm,
        "TABLE": True,
        "num_warps": qk_norm_rope_store.num_warps_for(half_block),
        **qk_norm_rope_store.KEEP_ROUNDING,
    }
    return qk_norm_rope_store._qk_norm_rope_store_kernel, arguments, constants
