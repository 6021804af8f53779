"""Configurations of prefill attention in bfloat16: what ships, which compile_sm90 compiles without
a GPU, and what tests.bench.attention times beside it on one."""

from __future__ import annotations

from dataclasses import replace

import torch

from millstream.kernels.prefill_configs import PrefillConfig, choose_config

_ROWS = 64  # of a program: queries times heads


def shipped_prefill(group: int, head_dim: int) -> list[PrefillConfig]:
    """For `group` query heads a KV head: of any step, and of one of many short prompts."""
    return [
        choose_config(torch.bfloat16, group, head_dim, num_tokens=16_384, longest=longest)
        for longest in (None, 1000)
    ]


def prefill_candidates(group: int, head_dim: int) -> dict[str, PrefillConfig]:
    """By name, those that ship, and what differs from one of them in one thing: how many heads
    share the rows, the key tile, stages, whether the tail is apart. Programs are full."""
    near = []
    for config in shipped_prefill(group, head_dim):
        near.append(config)
        near += [
            replace(config, heads=heads, query_tile=_ROWS // heads)
            for heads in (1, 2, 4)
            if group % heads == 0
        ]
        near += [replace(config, key_tile=key_tile) for key_tile in (32, 64)]
        near += [replace(config, num_stages=2), replace(config, tail_apart=not config.tail_apart)]
    return {_name(config): config for config in near}


def _name(config: PrefillConfig) -> str:
    tile = f"{config.query_tile}x{config.heads}x{config.key_tile}"
    loops = "" if config.tail_apart else " one loop"
    return f"{tile} w{config.num_warps} s{config.num_stages}{loops}"
