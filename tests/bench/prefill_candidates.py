"""Configurations of prefill attention: tests.bench.attention times them on a GPU, compile_sm90
shows without one that they spill nothing."""

from __future__ import annotations

from millstream.kernels.paged_prefill import PrefillConfig

# Query tile, heads, key tile, warps, stages, tail apart.
_Tile = tuple[int, int, int, int, int, bool]
_ANY: list[_Tile] = [
    (128, 1, 64, 8, 3, True),
    (128, 1, 64, 8, 2, True),
    (64, 1, 64, 4, 2, True),
    (64, 1, 64, 4, 3, True),
    (64, 1, 64, 4, 3, False),
    (64, 1, 32, 4, 3, True),
    (64, 1, 32, 4, 3, False),
]
_LARGE_BLOCKS: list[_Tile] = [(128, 1, 128, 8, 2, True)]
_PAIRS: list[_Tile] = [
    (64, 2, 64, 8, 3, True),
    (64, 2, 64, 8, 3, False),
    (64, 2, 32, 8, 2, False),
    (32, 2, 64, 4, 3, True),
    (32, 2, 64, 4, 3, False),
    (32, 2, 32, 4, 3, True),
    (32, 2, 32, 4, 3, False),
]
_FOURS: list[_Tile] = [(32, 4, 64, 8, 3, True), (16, 4, 64, 4, 3, True), (16, 4, 64, 4, 3, False)]


def prefill_candidates(group: int, block_size: int) -> dict[str, PrefillConfig]:
    """By name, those worth a try for `group` query heads a KV head: their programs are full."""
    tiles = [*_ANY]
    tiles += _LARGE_BLOCKS if block_size >= 128 else []
    tiles += _PAIRS if group % 2 == 0 else []
    tiles += _FOURS if group % 4 == 0 else []
    return {
        f"{query}x{heads}x{key} w{warps} s{stages}{'' if apart else ' one loop'}": PrefillConfig(
            query_tile=query,
            heads=heads,
            key_tile=key,
            num_warps=warps,
            num_stages=stages,
            tail_apart=apart,
        )
        for query, heads, key, warps, stages, apart in tiles
    }
