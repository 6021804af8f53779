"""Which tiles are fastest for the products of Qwen3-0.6B's layers with so many rows.

    python3 -m tests.bench.tiles --rows 64 128 [--best 4]

For kernels/linear_configs.py: every tile that is full enough and fits is compiled without the GPU,
in parallel, then timed in a CUDA graph over distinct weights; the best are timed again, beside what
ships. About 60 s.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator

import torch
from tests.bench.compilation import compile_in_parallel
from tests.bench.graph_timing import graph_time

from millstream.engine.model_files.model_config import parse_model_config
from millstream.engine.model_files.shapes import config_json
from millstream.kernels.boxes import padded
from millstream.kernels.linear import Workspace, linear
from millstream.kernels.linear_configs import Config, Tile, choose, fits

Shape = tuple[int, int]  # out_features, in_features
MODEL = parse_model_config(config_json("qwen3-0.6b"))
SHAPES: dict[str, Shape] = MODEL.layer_products
LAYERS = MODEL.num_layers
MULTIPROCESSORS = 132
SHARED_BYTES = (60 << 10, 220 << 10)  # fewer do not hide the latency, more are not there


def tiles(shape: Shape, rows: int) -> Iterator[Tile]:
    size, depth = shape
    sizes = itertools.product((16, 32, 64, 128), (16, 32, 64, 128), (64, 128, 256))
    for block_m, block_n, block_k in sizes:
        if not rows / 6 <= block_m < max(2 * rows, 65) or block_m * block_n < 64 * 16:
            continue
        for stages, split_k in itertools.product((3, 4, 5, 6), (1, 2, 4)):
            tile = Tile(
                block_m=block_m,
                block_n=block_n,
                block_k=block_k,
                num_warps=8 if block_m * block_n >= 128 * 128 else 4,
                stages=stages,
                split_k=split_k,
            )
            shared_bytes = stages * (block_m + block_n) * block_k * 2
            programs = -(-rows // block_m) * (size // block_n) * split_k
            few_or_many = not MULTIPROCESSORS / 3 <= programs <= 3 * MULTIPROCESSORS
            if few_or_many or not SHARED_BYTES[0] <= shared_bytes <= SHARED_BYTES[1]:
                continue
            if fits(tile, rows, size, depth) and (split_k == 1 or size == 1024):
                yield tile


def product_of(
    name: str, x: torch.Tensor, config: Config
) -> Callable[[torch.Tensor], torch.Tensor]:
    """What multiplies x with a weight, with the epilogue that the layer has."""
    residual = x.new_zeros(len(x), SHAPES[name][0]) if name in ("o", "down") else None
    workspace = Workspace.create(x.device)
    return lambda weight: linear(
        x, weight, config, workspace, residual=residual, swiglu=name == "gate_up"
    )


def compile_one(name: str, tile: Tile) -> None:
    size, depth = SHAPES[name]
    x = torch.zeros(tile.block_m, depth, dtype=torch.bfloat16)
    weight = torch.zeros(size, depth, dtype=torch.bfloat16)
    product_of(name, x, tile)(weight)


def compile_all(rows: list[int]) -> None:
    jobs = {(name, tile) for name in SHAPES for n in rows for tile in tiles(SHAPES[name], n)}
    compile_in_parallel(compile_one, jobs)
    print(f"{len(jobs)} kernels compiled", flush=True)


def microseconds(
    name: str, rows: int, config: Config, weights: torch.Tensor, replays: int
) -> float:
    x = padded(rows, weights.shape[2], like=weights).normal_()
    product = product_of(name, x, config)
    return 1e6 * graph_time(
        [functools.partial(product, weight) for weight in weights], replays=replays
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", required=True)
    parser.add_argument("--best", type=int, default=4)
    arguments = parser.parse_args()
    compile_all(arguments.rows)
    for name, (size, depth) in SHAPES.items():
        weights = torch.randn(LAYERS, size, depth, device="cuda").bfloat16() / depth**0.5
        for rows in arguments.rows:
            timed = functools.partial(microseconds, name, rows, weights=weights)
            order = sorted(tiles((size, depth), rows), key=lambda tile: timed(tile, replays=3))
            best = {tile: timed(tile, replays=20) for tile in order[: arguments.best]}
            shipped = choose(rows, size, depth)
            text = "cuBLAS" if shipped is None else f"{timed(shipped, replays=20):.2f} us"
            print(f"{name} {rows} rows: {text} ships", flush=True)
            for tile, us in sorted(best.items(), key=lambda entry: entry[1]):
                print(f"  {us:.2f} us {tile}", flush=True)


if __name__ == "__main__":
    main()
