"""Which configuration linear.py's kernels take for which shape; None where cuBLAS is better.

Measured on one H200 in a CUDA graph with distinct weights per layer and dependent launch (Triton
3.6). Shapes that nobody measured have a rule for one row only: there reading the weights is all.
"""

from __future__ import annotations

from dataclasses import dataclass

_MAX_ELEMENTS = 1 << 31  # of a weight: 32-bit offsets
_MANY = 1 << 18  # rows, with which offsets in an output still have 32 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemv:
    """One row of x; block_n outputs per program, block_k weights of each at a time."""

    block_n: int
    block_k: int = 1024
    num_warps: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Tiles of block_m x block_n; stages 0: weights in registers before x is there."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    stages: int = 0
    split_k: int = 1
    across: bool = False  # neighbours share rows of x, not of the weight


Config = Gemv | Tile

_ROW = Gemv(block_n=4)
_16X128 = Tile(block_m=16, block_n=128, block_k=128, stages=5)
_64X16 = Tile(block_m=64, block_n=16, block_k=256, stages=5)
_64X32 = Tile(block_m=64, block_n=32, block_k=256, stages=4)
_64X64 = Tile(block_m=64, block_n=64, block_k=128, stages=5)
_64X128 = Tile(block_m=64, block_n=128, block_k=128, stages=4)
# (out_features, in_features) -> (up to so many rows, configuration or None), by rows.
_MEASURED: dict[tuple[int, int], tuple[tuple[int, Config | None], ...]] = {
    # Qwen3-0.6B: qkv, where the heads are another kernel's (see _HEADS)
    (4096, 1024): (
        (1, _ROW),
        (16, Tile(block_m=16, block_n=64, block_k=512, num_warps=8)),
        (64, _64X32),
        (128, _64X64),
    ),
    # o
    (1024, 2048): (
        (1, Gemv(block_n=2, block_k=2048, num_warps=1)),
        (16, Tile(block_m=16, block_n=32, block_k=256, num_warps=2, split_k=4)),
        (128, _64X16),
        (256, _64X32),
    ),
    # gate_up
    (6144, 1024): (
        (1, _ROW),
        (16, Tile(block_m=16, block_n=64, block_k=1024, num_warps=8)),
        (64, Tile(block_m=64, block_n=64, block_k=128, stages=4)),
        (128, Tile(block_m=128, block_n=64, block_k=64, stages=6)),
        (192, Tile(block_m=64, block_n=64, block_k=64, stages=4)),
        (256, Tile(block_m=128, block_n=128, block_k=64, num_warps=8, stages=5)),
        (512, None),
        (_MANY, Tile(block_m=128, block_n=128, block_k=64, stages=3, across=True)),
    ),
    # down
    (1024, 3072): (
        (1, Gemv(block_n=4, num_warps=4)),
        (16, Tile(block_m=16, block_n=32, block_k=256, split_k=4)),
        (64, Tile(block_m=64, block_n=16, block_k=256, stages=5, split_k=2)),
        (128, _64X16),
        (256, _64X32),
    ),
    # the LM head
    (151936, 1024): (
        (1, _ROW),
        (16, Tile(block_m=16, block_n=128, block_k=128, stages=4)),
        (64, _64X128),
    ),
    # Llama-3.2-1B: qkv, o, gate_up, down, the LM head
    (3072, 2048): ((1, _ROW), (64, _64X32), (128, _64X64)),
    (2048, 2048): ((1, _ROW), (64, _64X16), (128, _64X32)),
    (16384, 2048): (
        (1, _ROW),
        (16, _16X128),
        (64, _64X128),
        (128, Tile(block_m=128, block_n=128, block_k=64, num_warps=8, stages=5)),
    ),
    (2048, 8192): ((1, _ROW), (64, _64X16), (128, _64X32)),
    (128256, 2048): ((1, _ROW), (16, _16X128), (64, _64X128)),
    # Qwen3-8B
    (6144, 4096): ((1, _ROW), (64, Tile(block_m=64, block_n=64, block_k=128, stages=4))),
    (4096, 4096): ((1, _ROW), (64, _64X32)),
    (24576, 4096): ((1, _ROW), (16, _16X128), (64, _64X128)),
    (4096, 12288): ((1, _ROW), (64, _64X32)),
    (151936, 4096): ((1, _ROW), (16, _16X128), (64, _64X128)),
}
# The same of QKV's product in qkv_heads.py, where it is faster than linear.py's and what follows.
_HEADS: dict[tuple[int, int], tuple[tuple[int, Tile | None], ...]] = {
    (4096, 1024): (
        (128, None),
        (256, _64X128),
        (512, None),
        (_MANY, Tile(block_m=128, block_n=128, block_k=64, stages=3, across=True)),
    ),
}
_ONE_ROW = (_ROW, Gemv(block_n=4, block_k=512))


def choose(num_rows: int, out_features: int, in_features: int) -> Config | None:
    """The configuration for x [num_rows, in_features], weight [out_features, in_features].

    None: use cuBLAS. For SwiGLU out_features counts gate and up.
    """
    measured = _MEASURED.get((out_features, in_features))
    if measured is not None:
        return next((config for most, config in measured if num_rows <= most), None)
    fitting = (each for each in _ONE_ROW if fits(each, num_rows, out_features, in_features))
    return next(fitting, None)


def choose_heads(num_rows: int, out_features: int, in_features: int, head_dim: int) -> Tile | None:
    """The tile of QKV's product together with what is done with its heads; None: apart."""
    measured = _HEADS.get((out_features, in_features), ())
    tile = next((tile for most, tile in measured if num_rows <= most), None)
    return tile if tile is not None and tile.block_n == head_dim else None


def fits(config: Config, num_rows: int, out_features: int, in_features: int) -> bool:
    """Whether the configuration computes the shape: nothing but rows is masked."""
    if out_features % config.block_n or out_features * in_features >= _MAX_ELEMENTS:
        return False
    if isinstance(config, Gemv):
        return num_rows == 1 and in_features % config.block_k == 0
    part, rest = divmod(in_features, config.split_k)
    if rest or part % config.block_k:
        return False
    return config.stages > 0 or part // config.block_k <= 4
