"""A paged cache with known contents, NaN wherever no token was stored: for tests of kernels."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKV:
    key_cache: torch.Tensor  # [blocks, block_size, Hkv, D]
    value_cache: torch.Tensor
    block_tables: torch.Tensor  # [slots, width] int32, -1 where no block is
    slots: torch.Tensor  # [S] int32, in no order
    context_lens: torch.Tensor  # [S] int32


def paged_kv(
    contexts: Sequence[int],
    *,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
) -> PagedKV:
    """Random keys and values of sequences of these lengths, in shuffled blocks and slots. Drawn on
    the device: a CPU takes half a minute for the caches of 256 sequences."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.Generator(device).manual_seed(seed)
    num_blocks = [-(-context // block_size) for context in contexts]
    total = sum(num_blocks) + 3
    blocks = (torch.randperm(total - 1, generator=generator) + 1).tolist()
    slots = torch.randperm(len(contexts) + 2, generator=generator)[: len(contexts)]
    tables = torch.full((len(contexts) + 2, max(num_blocks) + 1), -1, dtype=torch.int32)
    shape = (total * block_size, num_kv_heads, head_dim)
    nan = float("nan")
    key, value = (torch.full(shape, nan, dtype=dtype, device=device) for _ in range(2))
    for slot, context, count in zip(slots.tolist(), contexts, num_blocks, strict=True):
        own = torch.tensor([blocks.pop() for _ in range(count)], dtype=torch.int64)
        tables[slot, :count] = own.int()
        at = torch.arange(context)
        rows = (own[at // block_size] * block_size + at % block_size).to(device)
        for cache in (key, value):
            drawn = torch.randn((context, *shape[1:]), generator=values, device=device)
            cache[rows] = drawn.to(dtype)
    pages = (total, block_size, num_kv_heads, head_dim)
    return PagedKV(
        key_cache=key.view(pages),
        value_cache=value.view(pages),
        block_tables=tables.to(device),
        slots=slots.int().to(device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
    )


def starts_of(query_lens: Sequence[int], device: str) -> torch.Tensor:
    """[S + 1] int32."""
    starts = list(itertools.accumulate(query_lens, initial=0))
    return torch.tensor(starts, dtype=torch.int32, device=device)


def check_rows(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Every [.., D] row is as near to the float32 oracle as its dtype allows; NaN never is."""
    bound = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}[actual.dtype]
    assert actual.shape == expected.shape
    error = (actual.float() - expected).norm(dim=-1)
    assert bool((error <= bound * expected.norm(dim=-1)).all()), f"row error {error.max()}"
