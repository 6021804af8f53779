"""How prefill attention goes about its tiles, by shape and step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """The tile of a program, and how it is worked through. Sizes are powers of two."""

    query_tile: int  # tokens
    heads: int = 1  # query heads of one KV head: 16 rows or more with them
    key_tile: int
    num_warps: int
    num_stages: int
    tail_apart: bool = True  # tiles around the diagonal have a loop of their own: others no masks


_TWO_HEADS = PrefillConfig(query_tile=32, heads=2, key_tile=64, num_warps=4, num_stages=3)
# A step of many prompts is short if none is longer.
SHORT_CONTEXT, MANY_TOKENS = 1024, 4096


def choose_config(
    dtype: torch.dtype,
    group: int = 1,
    head_dim: int = 128,
    *,
    num_tokens: int = 0,
    longest: int | None = None,
) -> PrefillConfig:
    """What is fastest for `group` query heads a KV head (measured: tests/bench/attention.py).

    num_tokens: of the step's chunks; longest: their longest context, None if nobody knows.
    """
    if dtype.itemsize > 2:
        return PrefillConfig(query_tile=32, key_tile=32, num_warps=8, num_stages=2)
    if group % 2 or head_dim != 128:
        return PrefillConfig(query_tile=64, key_tile=64, num_warps=4, num_stages=3)
    if longest is not None and longest <= SHORT_CONTEXT and num_tokens >= MANY_TOKENS:
        return replace(_TWO_HEADS, key_tile=32, tail_apart=False)
    return _TWO_HEADS
